"""More neurons against NumPy in float64, in place too."""

import numpy as np
import pytest

from blobmem.ops.host import activation

SIZE = 70_001  # several threads and blocks, and an incomplete one


def values(dtype, *shape, seed=0):
    return (2 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def leaky6(x, slope):
    return np.where(x > 0, np.minimum(x, 6), slope * x)


CLIP = {"low": -0.5, "high": 0.8}
EXP = {"rate": 0.4, "offset": 1.5}
LOG = {"scale": -0.05, "shift": 2.5, "factor": 3.0}

FORWARD = {  # the op's name, its attributes, its formula
    "absval": ("absval", {}, np.abs),
    "bnll": ("bnll", {}, lambda x: np.log1p(np.exp(x))),
    "clip": ("clip", CLIP, lambda x: np.maximum(np.minimum(x, 0.8), -0.5)),
    "elu": ("elu", {"alpha": 0.7}, lambda x: np.where(x > 0, x, 0.7 * (np.exp(x) - 1))),
    "elu-negative": ("elu", {"alpha": -0.7}, lambda x: np.where(x > 0, x, -0.7 * (np.exp(x) - 1))),
    "exp": ("exp", EXP, lambda x: np.exp(0.4 * x + 1.5)),
    "log": ("log", LOG, lambda x: 3 * np.log(2.5 - 0.05 * x)),
    "relu6": ("relu6", {"slope": 0.0}, lambda x: leaky6(x, 0)),
    "relu6-leaky": ("relu6", {"slope": 0.25}, lambda x: leaky6(x, 0.25)),
    "swish": ("swish", {"beta": 1.5}, lambda x: x * sigmoid(1.5 * x)),
    "threshold": ("threshold", {"threshold": 0.3}, lambda x: (x > 0.3) * 1.0),
}

BACKWARD = {  # what the op is given besides dy, and the derivative by x
    "absval": ("x", np.sign),
    "bnll": ("y", sigmoid),
    "clip": ("x", lambda x: ((x >= -0.5) & (x <= 0.8)) * 1.0),
    "elu": ("xy", lambda x: np.where(x > 0, 1, 0.7 * np.exp(x))),
    "elu-negative": ("xy", lambda x: np.where(x > 0, 1, -0.7 * np.exp(x))),
    "exp": ("y", lambda x: 0.4 * np.exp(0.4 * x + 1.5)),
    "log": ("x", lambda x: -0.15 / (2.5 - 0.05 * x)),
    "relu6": ("x", lambda x: ((x > 0) & (x < 6)) * 1.0),
    "relu6-leaky": ("x", lambda x: np.where(x > 0, x < 6, 0.25)),
    "swish": ("x", lambda x: sigmoid(1.5 * x) * (1 + 1.5 * x * (1 - sigmoid(1.5 * x)))),
}


def ops_of(name):
    op = FORWARD[name][0]
    return getattr(activation, f"{op}_forward"), getattr(activation, f"{op}_backward", None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, in_place, dtype, close, garbage):
    _, attributes, formula = FORWARD[name]
    x = values(dtype, SIZE)
    expected = formula(x.astype(np.float64))
    y = x if in_place else garbage(SIZE)
    ops_of(name)[0](x, y, **attributes)
    close(y, expected, digits=3)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, in_place, dtype, close, garbage):
    _, attributes, formula = FORWARD[name]
    given, derivative = BACKWARD[name]
    x, dy = values(dtype, SIZE), values(dtype, SIZE, seed=1)
    wide = x.astype(np.float64)
    arrays = {"x": x, "y": formula(wide).astype(dtype)}
    expected = dy.astype(np.float64) * derivative(wide)
    dx = dy if in_place else garbage(SIZE)
    ops_of(name)[1](*[arrays[letter] for letter in given], dy, dx, **attributes)
    close(dx, expected, digits=4)


@pytest.mark.parametrize("name", ["elu", "relu6", "relu6-leaky"])
def test_the_output_will_do(name, dtype):
    """In place nothing is kept of the input."""
    _, attributes, _ = FORWARD[name]
    forward, backward = ops_of(name)
    x, dy = np.concatenate([values(dtype, 500), np.array([0, 6, -0.0], dtype)]), values(dtype, 503, seed=1)
    y, by_input, by_output = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    forward(x, y, **attributes)
    rest = (y,) if BACKWARD[name][0] == "xy" else ()
    backward(x, *rest, dy, by_input, **attributes)
    backward(y, *rest, dy, by_output, **attributes)
    np.testing.assert_array_equal(by_input, by_output)


def test_bounds():
    edges = np.array([-0.5, 0.8, -0.50001, 0.80001], np.float64)
    dx = np.empty(4)
    activation.clip_backward(edges, np.ones(4), dx, **CLIP)
    assert dx.tolist() == [1, 1, 0, 0]
    activation.relu6_backward(np.array([0, 6, 5.9, 0.1]), np.ones(4), dx, slope=0.0)
    assert dx.tolist() == [0, 0, 1, 1]
    activation.absval_backward(np.array([0, -0.0, -2, 3]), np.ones(4), dx)
    assert dx.tolist() == [0, 0, -1, 1]
    activation.threshold_forward(np.array([0.3, 0.30001, 0.2, np.inf]), dx, threshold=0.3)
    assert dx.tolist() == [0, 1, 0, 1]


def test_large_numbers_do_not_overflow(dtype):
    x = np.array([-1e4, 1e4], dtype)
    y, slope, one = np.empty_like(x), np.empty_like(x), np.ones_like(x)
    with np.errstate(all="raise", under="ignore"):
        activation.bnll_forward(x, y)
        assert y.tolist() == [0, 1e4]
        activation.bnll_backward(y, one, slope)
        assert slope.tolist() == [0, 1]
        activation.elu_forward(x, y, alpha=0.5)
        assert y.tolist() == [-0.5, 1e4]
        activation.swish_forward(x, y, beta=1.0)
        assert y.tolist() == [0, 1e4]
        activation.swish_backward(x, one, slope, beta=1.0)
        assert slope.tolist() == [0, 1]


@pytest.mark.parametrize("name", sorted(set(FORWARD) - {"threshold"}))
def test_passes_not_a_number_on(name, dtype):
    """A net that has diverged must not look healthy."""
    y = np.zeros(2, dtype)
    ops_of(name)[0](np.array([np.nan, 1], dtype), y, **FORWARD[name][1])
    assert np.isnan(y[0]) and not np.isnan(y[1])


CASES = [(name, way) for name in FORWARD for way in ("forward", "backward") if way == "forward" or name in BACKWARD]


@pytest.mark.parametrize("name, way", CASES, ids=["-".join(case) for case in CASES])
def test_threads_and_memory(name, way, dtype, same_bits, frugal):
    x, y, dy = (values(dtype, 8, 30, 301, seed=i) for i in range(3))
    _, attributes, _ = FORWARD[name]
    forward, backward = ops_of(name)
    if way == "forward":
        op, operands = forward, (x, y)
    else:
        op, operands = backward, (*([x] * len(BACKWARD[name][0])), dy, y)
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)
