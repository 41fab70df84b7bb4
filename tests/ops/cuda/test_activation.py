"""The other neurons on CUDA against the host's, in place too."""

import numpy as np
import pytest

FORWARD = [
    ("absval", {}),
    ("bnll", {}),
    ("clip", {"low": -0.5, "high": 0.8}),
    ("clip", {"low": 0.8, "high": -0.5}),
    ("elu", {"alpha": 0.7}),
    ("elu", {"alpha": -0.7}),
    ("exp", {"rate": 0.4, "offset": 1.5}),
    ("log", {"scale": -0.05, "shift": 2.5, "factor": 3.0}),
    ("relu6", {"slope": 0.0}),
    ("relu6", {"slope": 0.25}),
    ("swish", {"beta": 1.5}),
    ("threshold", {"threshold": 0.3}),
]
OF_OUTPUT = {"bnll", "exp"}
BACKWARD = [case for case in FORWARD if case[0] != "threshold"]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SIZES = pytest.mark.parametrize("size", [0, 1, 1026, 5003])


def values(rng, size, dtype):
    """Numbers of both signs, some special and some where a function changes."""
    x = (4 * rng.normal(size=size)).astype(dtype)
    special = np.array([np.nan, np.inf, -np.inf, 0, 6, -0.5, 0.8, 0.3], dtype)
    x[5:13] = special[: x[5:13].size]
    return x


@SIZES
@DTYPES
@pytest.mark.parametrize("name, attributes", FORWARD, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_forward(cuda, rng, name, attributes, size, dtype):
    x = values(rng, size, dtype)
    cuda.compare(f"{name}_forward", x, np.full_like(x, np.nan), **attributes)
    cuda.compare(f"{name}_forward", x, x, **attributes)


@SIZES
@DTYPES
@pytest.mark.parametrize("name, attributes", BACKWARD, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_backward(cuda, rng, name, attributes, size, dtype):
    x, dy = values(rng, size, dtype), rng.normal(size=size).astype(dtype)
    given = [x]
    if name in OF_OUTPUT or name == "elu":
        y = cuda.run(f"{name}_forward", x, np.empty_like(x), **attributes)[1]
        given = [y] if name in OF_OUTPUT else [x, y]
    cuda.compare(f"{name}_backward", *given, dy, np.full_like(x, np.nan), **attributes)
    cuda.compare(f"{name}_backward", *given, dy, dy, **attributes)


@DTYPES
def test_nothing_overflows(cuda, dtype):
    x = np.array([-3000, -90, 0, 90, 3000], dtype)
    assert np.isfinite(cuda.run("bnll_forward", x, np.empty_like(x))[1]).all()
    assert cuda.run("swish_forward", x, np.empty_like(x), beta=1.0)[1].tolist()[::4] == [0, 3000]
    assert cuda.run("elu_forward", x, np.empty_like(x), alpha=2.0)[1].tolist()[::4] == [-2, 3000]
