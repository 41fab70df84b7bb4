"""Neurons against NumPy in float64, in place too."""

import numpy as np
import pytest

from blobmem.ops.host import neuron
from blobmem.ops.host.random import draws_at

SIZE = 70_001  # several threads and blocks, and an incomplete one


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


FORWARD = {
    "relu": (neuron.relu_forward, {"slope": 0.0}, lambda x: np.maximum(x, 0)),
    "leaky": (neuron.relu_forward, {"slope": 0.25}, lambda x: np.where(x > 0, x, 0.25 * x)),
    "sigmoid": (neuron.sigmoid_forward, {}, sigmoid),
    "tanh": (neuron.tanh_forward, {}, np.tanh),
    "square": (neuron.power_forward, {"power": 2.0, "scale": 0.5, "shift": 3.0}, lambda x: (3 + 0.5 * x) ** 2),
    "fraction": (neuron.power_forward, {"power": 1.5, "scale": 0.1, "shift": 2.0}, lambda x: (2 + 0.1 * x) ** 1.5),
    "negative": (neuron.power_forward, {"power": -1.0, "scale": 0.1, "shift": 2.0}, lambda x: 1 / (2 + 0.1 * x)),
    "linear": (neuron.power_forward, {"power": 1.0, "scale": -3.0, "shift": 2.0}, lambda x: 2 - 3 * x),
    "constant": (neuron.power_forward, {"power": 0.0, "scale": 2.0, "shift": 0.0}, np.ones_like),
    "copy": (neuron.copy, {}, lambda x: x),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, in_place, dtype, close, garbage):
    op, attributes, formula = FORWARD[name]
    x = values(dtype, SIZE)
    expected = formula(x.astype(np.float64))
    y = x if in_place else garbage(SIZE)
    op(x, y, **attributes)
    close(y, expected)


BACKWARD = {  # whether the op is given x or y; the derivative by x
    "relu": (neuron.relu_backward, {"slope": 0.0}, "x", lambda x: (x > 0) * 1.0),
    "leaky": (neuron.relu_backward, {"slope": 0.25}, "x", lambda x: np.where(x > 0, 1, 0.25)),
    "sigmoid": (neuron.sigmoid_backward, {}, "y", lambda x: sigmoid(x) * (1 - sigmoid(x))),
    "tanh": (neuron.tanh_backward, {}, "y", lambda x: 1 - np.tanh(x) ** 2),
    "square": (neuron.power_backward, {"power": 2.0, "scale": 0.5, "shift": 3.0}, "xy", lambda x: 3 + 0.5 * x),
    "fraction": (neuron.power_backward, {"power": 1.5, "scale": 0.1, "shift": 2.0}, "xy",
                 lambda x: 0.15 * (2 + 0.1 * x) ** 0.5),
    "linear": (neuron.power_backward, {"power": 1.0, "scale": -3.0, "shift": 2.0}, "xy", lambda x: x * 0 - 3),
    "constant": (neuron.power_backward, {"power": 0.0, "scale": 2.0, "shift": 0.0}, "xy", lambda x: x * 0),
}  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, in_place, dtype, close, garbage):
    op, attributes, given, derivative = BACKWARD[name]
    x, dy = values(dtype, SIZE), values(dtype, SIZE, seed=1)
    expected = dy.astype(np.float64) * derivative(x.astype(np.float64))
    y = FORWARD[name][2](x.astype(np.float64)).astype(dtype)
    dx = dy if in_place else garbage(SIZE)
    op(*[{"x": x, "y": y}[letter] for letter in given], dy, dx, **attributes)
    close(dx, expected, digits=4)


def test_power_zero_has_no_gradient_where_the_base_is_zero(dtype, garbage):
    dx = garbage(3)
    x = np.zeros(3, dtype)
    neuron.power_backward(x, x + 1, np.ones(3, dtype), dx, power=0.0, scale=1.0, shift=0.0)
    assert (dx == 0).all()


def test_sigmoid_of_large_numbers(dtype, garbage):
    y = garbage(4)
    with np.errstate(all="raise"):
        neuron.sigmoid_forward(np.array([-1e4, 1e4, -np.inf, np.inf], dtype), y)
    assert y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_relu_passes_not_a_number_on(slope, dtype):
    """A net that has diverged must not look healthy."""
    y = np.zeros(2, dtype)
    neuron.relu_forward(np.array([np.nan, 1], dtype), y, slope=slope)
    np.testing.assert_array_equal(y, [np.nan, 1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 6, 1), (1, 2, 40_000), (700, 130, 1), (2, 3, 0)])
def test_prelu(shape, shared, dtype, close, garbage):
    x, dy = values(dtype, *shape), values(dtype, *shape, seed=1)
    slope = values(dtype, 1 if shared else shape[1], seed=2)
    wide = slope[None, :, None].astype(np.float64)
    y, dx = garbage(*shape), garbage(*shape)
    neuron.prelu_forward(x, slope, y)
    close(y, np.where(x > 0, x, wide * x))
    neuron.prelu_backward_data(x, slope, dy, dx)
    close(dx, np.where(x > 0, dy, wide * dy))
    terms = np.where(x > 0, 0, x.astype(np.float64) * dy)
    expected = terms.sum(keepdims=shared, axis=None if shared else (0, 2)).reshape(slope.shape)
    dslope = garbage(*slope.shape)
    neuron.prelu_backward_slope(x, dy, dslope, accumulate=False)
    close(dslope, expected, digits=10)
    neuron.prelu_backward_slope(x, dy, dslope, accumulate=True)
    close(dslope, 2 * expected, digits=10)
    neuron.prelu_forward(x, slope, x)
    np.testing.assert_array_equal(x, y)


def test_dropout(dtype, close, garbage):
    x, dy = values(dtype, SIZE) + 10, values(dtype, SIZE)
    y, mask = garbage(SIZE), np.full(SIZE, 77, np.uint8)
    neuron.dropout_forward(x, y, mask, ratio=0.3, draws=draws_at(1, "d", 0))
    assert set(mask.tolist()) == {0, 1}
    assert abs(mask.mean() - 0.7) < 4 * np.sqrt(0.21 / SIZE)
    close(y, np.where(mask, x / 0.7, 0))
    dx = garbage(SIZE)
    neuron.dropout_backward(dy, mask, dx, ratio=0.3)
    close(dx, np.where(mask, dy / 0.7, 0))
    kept = x.copy()
    neuron.dropout_forward(kept, kept, mask, ratio=0.3, draws=draws_at(1, "d", 0))
    np.testing.assert_array_equal(kept, y)
    neuron.dropout_backward(dy, mask, dy, ratio=0.3)
    np.testing.assert_array_equal(dy, dx)


def test_dropout_draws_by_seed_stream_iteration_and_element(dtype):
    def drawn(size, *draws):
        mask = np.zeros(size, np.uint8)
        neuron.dropout_forward(np.ones(size, dtype), np.ones(size, dtype), mask, ratio=0.5, draws=draws_at(*draws))
        return mask

    first = drawn(1000, 1, "a", 0)
    np.testing.assert_array_equal(first, drawn(1000, 1, "a", 0))
    np.testing.assert_array_equal(first[:333], drawn(333, 1, "a", 0))
    for other in ((2, "a", 0), (1, "b", 0), (1, "a", 1)):
        assert 400 < (first != drawn(1000, *other)).sum() < 600
    assert drawn(1000, 1, "a", 0).any()


def test_no_dropout(dtype):
    x, mask = values(dtype, 100), np.zeros(100, np.uint8)
    y = np.empty_like(x)
    neuron.dropout_forward(x, y, mask, ratio=0.0, draws=draws_at(1, "d", 0))
    assert mask.all()
    np.testing.assert_array_equal(x, y)


def test_copy_converts(dtype):
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    y = np.empty(6, dtype)
    neuron.copy(x, y)
    assert y.tolist() == [0, 1, 2, 3, 4, 5]


def test_fill(dtype):
    for shape in ((), (3,), (0, 2), (SIZE,)):
        y = np.full(shape, np.nan, dtype)
        neuron.fill(y, value=2.5)
        assert (y == 2.5).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_sum_arrays(count, dtype, close, garbage):
    xs = [values(dtype, 9, 4001, seed=i) for i in range(count)]
    y = garbage(9, 4001)
    neuron.sum_arrays(*xs, y)
    close(y, np.sum(xs, axis=0, dtype=np.float64), digits=2)
    neuron.sum_arrays(*xs, xs[0])
    np.testing.assert_array_equal(xs[0], y)


def cases(dtype):
    shape = (8, 30, 301)
    x, y, dy = (values(dtype, *shape, seed=i) for i in range(3))
    slope, mask = values(dtype, 30), np.zeros(shape, np.uint8)
    power = {"power": 1.7, "scale": 0.1, "shift": 9.0}
    return {
        "relu": (neuron.relu_forward, (x, y), {"slope": 0.1}),
        "relu_backward": (neuron.relu_backward, (x, dy, y), {"slope": 0.1}),
        "sigmoid": (neuron.sigmoid_forward, (x, y), {}),
        "sigmoid_backward": (neuron.sigmoid_backward, (x, dy, y), {}),
        "tanh": (neuron.tanh_forward, (x, y), {}),
        "tanh_backward": (neuron.tanh_backward, (x, dy, y), {}),
        "power": (neuron.power_forward, (x, y), power),
        "power_backward": (neuron.power_backward, (x, x, dy, y), power),
        "dropout": (neuron.dropout_forward, (x, y, mask), {"ratio": 0.4, "draws": draws_at(3, "x", 5)}),
        "dropout_backward": (neuron.dropout_backward, (dy, mask, y), {"ratio": 0.4}),
        "prelu": (neuron.prelu_forward, (x, slope, y), {}),
        "prelu_backward": (neuron.prelu_backward_data, (x, slope, dy, y), {}),
        "prelu_slope": (neuron.prelu_backward_slope, (x, dy, slope), {"accumulate": True}),
        "prelu_shared": (neuron.prelu_backward_slope, (x, dy, slope[:1]), {"accumulate": False}),
        "copy": (neuron.copy, (x, y), {}),
        "fill": (neuron.fill, (x,), {"value": 3.0}),
        "sum": (neuron.sum_arrays, (x, y, dy), {}),
    }


@pytest.mark.parametrize("name", cases(np.float32))
def test_threads_and_memory(name, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)
