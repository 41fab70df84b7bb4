"""Neurons, dropout, copies, fills and sums on CUDA against the host's."""

import numpy as np
import pytest

from blobmem.ops.host.random import draws_at
from blobmem.ops.registry import table

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SIZES = pytest.mark.parametrize("size", [0, 1, 4, 1027, 5000])
DRAWS = draws_at(3, "test", 5)
POWERS = [(p, 0.5, 2.5) for p in (0.0, 1.0, 2.0, 3.0, -0.5)] + [(2.0, 0.0, 1.0), (0.5, -1.0, 0.0)]


def values(rng, size, dtype):
    """Numbers of both signs, and a few special ones where there is room."""
    x = (2 * rng.normal(size=size)).astype(dtype)
    x[5:9] = [np.nan, np.inf, -np.inf, 0][: x[5:9].size]
    return x


def check(cuda, name, given, **attributes):
    """The op over `given`, into an array of its own and over the last of the given."""
    y = np.full_like(given[-1], np.nan)
    cuda.compare(name, *given, y, **attributes)
    cuda.compare(name, *given, given[-1], **attributes)


@SIZES
@DTYPES
@pytest.mark.parametrize("slope", [0.0, 0.1, -0.3])
def test_relu(cuda, rng, dtype, size, slope):
    x = values(rng, size, dtype)
    check(cuda, "relu_forward", [x], slope=slope)
    check(cuda, "relu_backward", [x, values(rng, size, dtype)], slope=slope)


def test_relu_of_infinities_without_slope(cuda):
    x = np.array([-np.inf, np.inf, np.nan, -1], np.float32)
    assert cuda.run("relu_forward", x, x, slope=0.0)[1].tolist()[:2] == [0, np.inf]
    dy = np.full(4, np.inf, np.float32)
    assert cuda.run("relu_backward", x, dy, dy, slope=0.0)[1].tolist() == [0, np.inf, 0, 0]


def test_more_elements_than_a_launch_has_threads(cuda, rng):
    x = rng.normal(size=2048 * 256 * 4 + 4 * 300 + 3).astype(np.float32)
    np.testing.assert_array_equal(cuda.run("relu_forward", x, x, slope=0.0)[1], np.maximum(x, 0))


def run_on_part(cuda, name, arrays, start, stop, **attributes):
    """The op over elements [start, stop) of arrays; gives back the arrays whole."""
    device, places, results = cuda.device, [], []
    for array in arrays:
        places.append(device.allocate(array.nbytes, name))
        device.memcpy_htod(places[-1], array)
    whole = [device.as_array(at, a.shape, a.dtype) for at, a in zip(places, arrays, strict=True)]
    table("cuda")[name](*(w.part(start * w.dtype.itemsize, (stop - start,)) for w in whole), **attributes)
    device.synchronize()
    for place, array in zip(places, arrays, strict=True):
        results.append(np.empty_like(array))
        device.memcpy_dtoh(results[-1], place)
        device.free(place)
    return results


@DTYPES
@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("stop", [1020, 1021, 1023])
def test_parts_of_arrays(cuda, rng, dtype, start, stop):
    x = rng.normal(size=1032).astype(dtype)
    inside = (np.arange(x.size) >= start) & (np.arange(x.size) < stop)
    y = np.full_like(x, 9)
    got = run_on_part(cuda, "relu_forward", [x, y], start, stop, slope=0.5)
    np.testing.assert_array_equal(got[1], np.where(inside, np.where(x > 0, x, x * dtype(0.5)), 9))
    mask = np.full(x.size, 7, np.uint8)
    _, y, mask = run_on_part(cuda, "dropout_forward", [x, y, mask], start, stop, ratio=0.5, draws=DRAWS)
    assert (y[~inside] == 9).all() and (mask[~inside] == 7).all() and (mask[inside] < 2).all()
    np.testing.assert_array_equal(y[inside], (2 * x * mask)[inside])
    dx = run_on_part(cuda, "dropout_backward", [x, mask, np.full_like(x, 9)], start, stop, ratio=0.5)[2]
    np.testing.assert_array_equal(dx, np.where(inside, y, 9))


@SIZES
@DTYPES
@pytest.mark.parametrize("kind", ["sigmoid", "tanh"])
def test_sigmoid_and_tanh(cuda, rng, dtype, size, kind):
    check(cuda, f"{kind}_forward", [20 * values(rng, size, dtype)])
    check(cuda, f"{kind}_backward", [values(rng, size, dtype), values(rng, size, dtype)])


@DTYPES
@pytest.mark.parametrize("power, scale, shift", POWERS)
def test_power(cuda, rng, dtype, power, scale, shift):
    x, dy = rng.uniform(-2, 2, 1027).astype(dtype), rng.normal(size=1027).astype(dtype)
    attributes = {"power": power, "scale": scale, "shift": shift}
    with np.errstate(all="ignore"):
        check(cuda, "power_forward", [x], **attributes)
        check(cuda, "power_backward", [x, np.full_like(x, np.nan), dy], **attributes)


@SIZES
@DTYPES
@pytest.mark.parametrize("ratio", [0.0, 0.4, 0.999])
def test_dropout_has_the_bits_of_the_host(cuda, rng, dtype, size, ratio):
    x = values(rng, size, dtype)
    for y in (np.full_like(x, np.nan), x):
        mask = np.full(size, 77, np.uint8)
        _, got, mask = cuda.compare("dropout_forward", x, y, mask, ratio=ratio, draws=DRAWS, rtol=0)
        if size > 1000 and ratio < 0.9:
            assert abs(mask.mean() - (1 - ratio)) < 0.05
        cuda.compare("dropout_backward", x, mask, y, ratio=ratio, rtol=0)
        cuda.compare("dropout_backward", got, mask, got, ratio=ratio, rtol=0)


def test_dropout_draws_anew_in_another_iteration(cuda):
    x = np.ones(1000, np.float32)
    masks = [
        cuda.run("dropout_forward", x, x, np.zeros(1000, np.uint8), ratio=0.5, draws=draws_at(3, "test", iteration))[2]
        for iteration in (1, 1, 2, 1 << 33)
    ]
    assert [(masks[0] == mask).all() for mask in masks] == [True, True, False, False]


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 4, 1), (1, 6, 49), (2, 3, 128), (5, 1, 7), (2, 700, 3), (0, 3, 4)])
@pytest.mark.parametrize("shared", [False, True])
def test_prelu(cuda, rng, dtype, shape, shared):
    x, dy = rng.normal(size=shape).astype(dtype), rng.normal(size=shape).astype(dtype)
    slope = rng.normal(size=1 if shared else shape[1]).astype(dtype)
    y = np.full_like(x, np.nan)
    cuda.compare("prelu_forward", x, slope, y)
    cuda.compare("prelu_forward", x, slope, x)
    cuda.compare("prelu_backward_data", x, slope, dy, y)
    cuda.compare("prelu_backward_data", x, slope, dy, dy)
    rounding = np.finfo(dtype).eps * np.abs(x * dy).sum()
    cuda.compare("prelu_backward_slope", x, dy, np.full_like(slope, np.nan), accumulate=False, atol=rounding)
    cuda.compare("prelu_backward_slope", x, dy, slope, accumulate=True, atol=rounding)


@pytest.mark.parametrize("shared", [False, True])
def test_prelu_slope_over_many(cuda, rng, shared):
    x = rng.normal(size=(3, 2, 30_001)).astype(np.float32)
    cuda.compare("prelu_backward_slope", x, np.sin(x), np.zeros(1 if shared else 2, np.float32), accumulate=False)


COPIED = ["uint8", "int32", "int64", "float32", "float64"]


@SIZES
@pytest.mark.parametrize("source", COPIED)
@pytest.mark.parametrize("target", COPIED)
def test_copy(cuda, rng, source, target, size):
    x = rng.integers(0, 200, size).astype(source)
    y = cuda.run("copy", x, np.full(size, 201).astype(target))[1]
    np.testing.assert_array_equal(y, x.astype(target))


@SIZES
@DTYPES
@pytest.mark.parametrize("value", [0.0, 2.5, np.nan])
def test_fill(cuda, dtype, size, value):
    np.testing.assert_array_equal(
        cuda.run("fill", np.full(size, 7, dtype), value=value)[0], np.full(size, value, dtype)
    )


@SIZES
@DTYPES
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_sum_arrays(cuda, rng, dtype, size, count):
    xs = [values(rng, size, dtype) for _ in range(count)]
    cuda.compare("sum_arrays", *xs, np.full(size, np.nan, dtype))
    cuda.compare("sum_arrays", *xs, xs[0])
