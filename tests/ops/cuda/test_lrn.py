"""Local response normalisation: windows in registers and wider ones, channels in one run and in several, in place."""

import numpy as np
import pytest

from blobmem.ops.cuda import lrn

ACROSS = {"alpha": 0.7, "beta": 0.75, "k": 1.5}
WITHIN = {"alpha": 0.7, "beta": 0.75}
DTYPES = [np.float32, np.float64]


def arrays(rng, dtype, shape):
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    return x, dy, np.zeros_like(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 5, 7, 9, 13])
@pytest.mark.parametrize("shape", [(2, 7, 5, 6), (1, 1, 1, 1), (1, 53, 3, 7)])
def test_across(cuda, rng, shape, size, dtype):
    x, dy, y = arrays(rng, dtype, shape)
    options = ACROSS | {"local_size": size}
    cuda.compare("lrn_forward", x, y, **options)
    cuda.compare("lrn_backward", x, dy, np.zeros_like(x), **options)
    cuda.compare("lrn_backward", x, dy, dy, **options)


def last(x):
    """The same with the channels last."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 5, 7, 9, 13])
@pytest.mark.parametrize("shape", [(2, 7, 5, 6), (1, 1, 1, 1), (2, 64, 5, 7), (1, 12, 20, 19), (1, 2052, 1, 2)])
def test_channels_last(cuda, rng, shape, size, dtype):
    x, dy, y = arrays(rng, dtype, shape)
    options = ACROSS | {"local_size": size}
    close = 1e-12 if dtype == np.float64 else 1e-5

    def compare(name, *operands):
        first = cuda.run(name, *operands, **options)
        turned = {id(a): last(a) for a in operands}
        second = cuda.run(name, *(turned[id(a)] for a in operands), layout="NHWC", **options)
        for one, other in zip(first, second, strict=True):
            np.testing.assert_allclose(other, last(one), rtol=close, atol=close)

    compare("lrn_forward", x, y)
    compare("lrn_backward", x, dy, np.zeros_like(x))
    compare("lrn_backward", x, dy, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize("shape", [(2, 7, 5, 6), (1, 1, 1, 1), (1, 2, 3, 17)])
def test_within(cuda, rng, shape, size, dtype):
    x, dy, y = arrays(rng, dtype, shape)
    options = WITHIN | {"local_size": size}
    _, y = cuda.compare("lrn_within_forward", x, y, **options)
    cuda.compare("lrn_within_backward", x, y, dy, np.zeros_like(x), **options)
    cuda.compare("lrn_within_backward", x, y, dy, dy, **options)


@pytest.mark.parametrize("beta", [0.5, 1.3])
def test_other_powers(cuda, rng, beta):
    x, dy, y = arrays(rng, np.float32, (2, 6, 4, 5))
    options = {"beta": beta, "local_size": 3}
    cuda.compare("lrn_forward", x, y, **ACROSS | options)
    cuda.compare("lrn_backward", x, dy, np.zeros_like(x), **ACROSS | options)
    _, y = cuda.compare("lrn_within_forward", x, y, **WITHIN | options)
    cuda.compare("lrn_within_backward", x, y, dy, np.zeros_like(x), **WITHIN | options)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_beyond_the_channels_nothing_counts(cuda, rng, layout):
    """With k = 0, and zeros at the edge, a channel beyond would have a scale of zero."""
    x, dy, dx = (last(a) for a in arrays(rng, np.float32, (1, 9, 2, 2)))
    x[..., [0, -1]] = 0
    if layout == "NCHW":
        x, dy, dx = (np.ascontiguousarray(np.moveaxis(a, -1, 1)) for a in (x, dy, dx))
    *_, dx = cuda.run("lrn_backward", x, dy, dx, local_size=3, layout=layout, **ACROSS | {"k": 0.0})
    assert np.isfinite(dx).all() and dx.any()


def test_nothing(cuda, rng):
    for shape in [(0, 3, 4, 5), (2, 3, 0, 5)]:
        x, dy, y = arrays(rng, np.float32, shape)
        cuda.run("lrn_forward", x, y, local_size=5, **ACROSS)
        cuda.run("lrn_backward", x, dy, np.zeros_like(x), local_size=5, **ACROSS)
        cuda.run("lrn_within_backward", x, y, dy, np.zeros_like(x), local_size=5, **WITHIN)
        cuda.run("lrn_forward", x, y, local_size=5, layout="NHWC", **ACROSS)
        cuda.run("lrn_backward", x, dy, np.zeros_like(x), local_size=5, layout="NHWC", **ACROSS)
    assert not getattr(cuda.device, "launches", [])  # a real device does not count them


@pytest.mark.parametrize("op, size", [("lrn_backward", 13), ("lrn_within_backward", 3)])
def test_little_scratch(cuda, rng, monkeypatch, op, size):
    monkeypatch.setattr(lrn, "_SCRATCH", 2000)
    x, dy, y = arrays(rng, np.float32, (5, 7, 5, 6))
    operands, options = ((x,), ACROSS) if op == "lrn_backward" else ((x, y + x), WITHIN)
    cuda.compare(op, *operands, dy, dy, **options, local_size=size)
    assert len(getattr(cuda.device, "launches", "many")) > 2
