"""Sums, products and maxima against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import eltwise

SHAPE = (3, 7, 3001)  # several blocks, and an incomplete one
COUNTS = [2, 3, 4, 5, 8]


def values(dtype, count, shape=SHAPE):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("alias", [None, 0, 1])
def test_sum(count, alias, dtype, close, garbage):
    xs = values(dtype, count)
    coeffs = tuple(np.random.default_rng(1).uniform(-2, 2, count))
    expected = sum(c * x.astype(np.float64) for c, x in zip(coeffs, xs, strict=True))
    y = garbage(*SHAPE) if alias is None else xs[alias]
    eltwise.eltwise_sum(*xs, y, coeffs=coeffs)
    close(y, expected, digits=3)


def test_sum_of_one_array_with_itself_in_place(dtype):
    x = np.arange(5, dtype=dtype)
    eltwise.eltwise_sum(x, x, x, x, coeffs=(1.0, 2.0, -0.5))
    assert x.tolist() == [0, 2.5, 5, 7.5, 10]


def test_sum_backward(dtype, close, garbage):
    (dy,) = values(dtype, 1)
    dx = garbage(*SHAPE)
    eltwise.eltwise_sum_backward(dy, dx, coeff=-0.3)
    close(dx, -0.3 * dy.astype(np.float64))
    eltwise.eltwise_sum_backward(dy, dy, coeff=-0.3)
    np.testing.assert_array_equal(dx, dy)


def test_multiple(dtype, close, garbage):
    (x,), number = values(dtype, 1), np.array([-0.3], dtype)
    y, expected = garbage(*SHAPE), number * x.astype(np.float64)
    eltwise.multiply(x, number, y)
    close(y, expected)
    eltwise.multiply(x, number, y, accumulate=True)
    close(y, 2 * expected)
    eltwise.multiply(x, number, x)
    close(x, expected)


@pytest.mark.parametrize("count", COUNTS)
def test_product(count, dtype, close, garbage):
    xs = values(dtype, count)
    y = garbage(*SHAPE)
    eltwise.eltwise_prod(*xs, y)
    close(y, np.prod(xs, axis=0, dtype=np.float64), digits=3)


@pytest.mark.parametrize("count", COUNTS)
def test_product_backward(count, dtype, close, garbage):
    dy, *xs = values(dtype, count + 1)
    xs[0][0] = 0
    dx = garbage(*SHAPE)
    for i, x in enumerate(xs):
        others = [other for other in xs if other is not x]
        eltwise.eltwise_prod_backward(dy, dx, *others)
        expected = dy.astype(np.float64) * np.prod(others, axis=0, dtype=np.float64)
        close(dx, expected, digits=3)
        if i:
            y = np.prod(xs, axis=0)
            eltwise.eltwise_prod_backward_unstable(dy, dx, x, y)
            close(dx, expected, digits=8)


@pytest.mark.parametrize("count", COUNTS)
def test_maximum(count, dtype, garbage):
    xs = [np.round(x * 2) for x in values(dtype, count)]  # with ties
    y, mask = garbage(*SHAPE), np.full(SHAPE, -7, np.int32)
    eltwise.eltwise_max(*xs, y, mask)
    np.testing.assert_array_equal(y, np.max(xs, axis=0))
    expected = np.argmax(xs, axis=0)
    np.testing.assert_array_equal(mask, np.where((expected == 0) & (xs[0] == xs[1]), 1, expected))
    assert np.array_equal(np.unique(mask), range(count))
    dx, total = garbage(*SHAPE), np.zeros(SHAPE, dtype)
    for index in range(count):
        eltwise.eltwise_max_backward(xs[0] + 1, mask, dx, index=index)
        np.testing.assert_array_equal(dx, np.where(mask == index, xs[0] + 1, 0))
        total += dx
    np.testing.assert_array_equal(total, xs[0] + 1)


def test_maximum_gradient_keeps_infinities_apart(dtype, garbage):
    dx = garbage(2)
    eltwise.eltwise_max_backward(np.array([np.inf, 1], dtype), np.array([0, 1], np.int32), dx, index=1)
    assert dx.tolist() == [0, 1]


def cases(dtype):
    xs, mask = values(dtype, 6), np.zeros(SHAPE, np.int32)
    return {
        "sum": (eltwise.eltwise_sum, xs, {"coeffs": (1.0, 2.0, 3.0, 0.1, 0.7)}),
        "sum_backward": (eltwise.eltwise_sum_backward, xs[:2], {"coeff": 0.1}),
        "prod": (eltwise.eltwise_prod, xs, {}),
        "prod_backward": (eltwise.eltwise_prod_backward, xs, {}),
        "unstable": (eltwise.eltwise_prod_backward_unstable, xs[:4], {}),
        "max": (eltwise.eltwise_max, [*xs, mask], {}),
        "max_backward": (eltwise.eltwise_max_backward, [xs[0], mask, xs[1]], {"index": 0}),
    }


@pytest.mark.parametrize("name", cases(np.float32))
def test_threads_and_memory(name, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)
