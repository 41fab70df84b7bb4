"""Sums, products and maxima on CUDA against the host's."""

import numpy as np
import pytest

from blobmem import dtypes

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
COUNTS = pytest.mark.parametrize("count", [2, 3, 4, 8, 9, 20])
SHAPE = (3, 7, 41)


def values(rng, count, dtype, shape=SHAPE):
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


def outputs(xs):
    """Fresh memory, and each of some inputs."""
    return [np.full_like(xs[0], np.nan), xs[0], xs[1], xs[-1]]


@COUNTS
@DTYPES
def test_sum(cuda, rng, count, dtype):
    xs = values(rng, count, dtype)
    coeffs = tuple(rng.uniform(-2, 2, count))
    for y in outputs(xs):
        cuda.compare("eltwise_sum", *xs, y, coeffs=coeffs)


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_sum_of_one_array_with_itself_in_place(cuda, count):
    x, other = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    arrays = [x, *[other] * (count - 1), x, x]
    coeffs = (0.5, *[1.0] * (count - 1), 2.0)
    y = cuda.run("eltwise_sum", *arrays, coeffs=coeffs)[-1]
    np.testing.assert_allclose(y, 2.5 * x + count - 1)


@DTYPES
@pytest.mark.parametrize("coeff", [-0.3, 1.0])
def test_sum_backward(cuda, rng, dtype, coeff):
    (dy,) = values(rng, 1, dtype)
    cuda.compare("eltwise_sum_backward", dy, np.full_like(dy, np.nan), coeff=coeff)
    cuda.compare("eltwise_sum_backward", dy, dy, coeff=coeff)


@DTYPES
@pytest.mark.parametrize("size", [1, 1000, 1003])
def test_multiple(cuda, rng, dtype, size):
    (x,), number = values(rng, 1, dtype, (size,)), np.array([-0.3], dtype)
    cuda.compare("multiply", x, number, np.full_like(x, np.nan))
    cuda.compare("multiply", x, number, x)
    cuda.compare("multiply", x, number, 2 * x, accumulate=True)


@pytest.mark.parametrize("dtype", dtypes.HALVES)
def test_multiple_of_halves_by_a_float(cuda, rng, dtype):
    """Which may be none of theirs."""
    x, y = (rng.normal(size=1003).astype(dtypes.of(dtype)) for _ in range(2))
    number, wide = np.array([1 + 2**-11], np.float32), [each.astype(np.float32) for each in (x, y)]
    for accumulate, expected in ((False, number * wide[0]), (True, wide[1] + number * wide[0])):
        got = cuda.run("multiply", x, number, y, accumulate=accumulate)[2]
        np.testing.assert_array_equal(got, expected.astype(x.dtype))


@COUNTS
@DTYPES
def test_product(cuda, rng, count, dtype):
    xs = values(rng, count, dtype)
    for y in outputs(xs):
        cuda.compare("eltwise_prod", *xs, y)
    dy, *others = xs
    others[0][0] = 0
    for dx in outputs(xs):
        cuda.compare("eltwise_prod_backward", dy, dx, *others)


@DTYPES
def test_product_backward_by_division(cuda, rng, dtype):
    dy, x, y = values(rng, 3, dtype)
    for dx in (np.full_like(dy, np.nan), dy):
        cuda.compare("eltwise_prod_backward_unstable", dy, dx, x, y)


@COUNTS
@DTYPES
def test_maximum(cuda, rng, count, dtype):
    xs = [np.round(x * 2) for x in values(rng, count, dtype)]  # with ties
    mask = np.full(SHAPE, -7, np.int32)
    for y in outputs(xs):
        _, mask = cuda.compare("eltwise_max", *xs, y, mask)[-2:]
    assert np.unique(mask).size == count
    for index in (0, 1, count - 1):
        for dx in (np.full_like(xs[0], np.nan), xs[0]):
            cuda.compare("eltwise_max_backward", xs[0], mask, dx, index=index)


@DTYPES
def test_maximum_of_what_is_not_a_number(cuda, dtype):
    xs = [np.array(row, dtype) for row in ([np.nan, 1, 1, np.inf], [2, np.nan, 1, np.inf], [3, 3, np.nan, 1])]
    cuda.compare("eltwise_max", *xs, np.empty(4, dtype), np.empty(4, np.int32))
    dy = np.full(4, np.inf, dtype)
    assert cuda.run("eltwise_max_backward", dy, np.array([0, 1, 0, 1], np.int32), dy, index=1)[2].tolist() == [
        0, np.inf, 0, np.inf,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2,), (1030,)], ids=str)
def test_sizes(cuda, rng, shape):
    xs = values(rng, 3, np.float32, shape)
    y = np.full_like(xs[0], np.nan)
    cuda.compare("eltwise_sum", *xs, y, coeffs=(1.0, 2.0, 0.5))
    cuda.compare("eltwise_sum", *xs[:2], y, coeffs=(1.0, 2.0))
    cuda.compare("eltwise_prod", *xs, y)
    cuda.compare("eltwise_max", *xs, y, np.zeros(shape, np.int32))


def test_too_many_inputs_in_place(cuda):
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="at most 8 of 9 inputs"):
        cuda.run("eltwise_prod", *[x] * 9, x)
    assert cuda.run("eltwise_sum", *[x] * 8, x, coeffs=(1.0,) * 8)[0].tolist() == [8, 8, 8]
