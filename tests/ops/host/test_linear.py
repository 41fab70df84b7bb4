"""Inner products against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import linear

SHAPES = [(3, 5, 4), (1, 1, 1), (64, 33, 10), (7, 700, 301), (130, 9, 513), (1, 900, 70), (400, 1, 3)]  # M, K, N


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_inner_product(shape, transpose, dtype, close, garbage):
    m, k, n = shape
    x, w, b = values(dtype, m, k), values(dtype, *((k, n) if transpose else (n, k)), seed=1), values(dtype, n, seed=2)
    dy = values(dtype, m, n, seed=3)
    digits = 3 + 0.3 * np.sqrt(max(shape))
    wide = [a.astype(np.float64) for a in (x, w if transpose else w.T, dy)]
    for bias in (None, b):
        y = garbage(m, n)
        linear.inner_product_forward(x, w, bias, y, transpose=transpose)
        close(y, wide[0] @ wide[1] + (0 if bias is None else bias), digits)
    dx = garbage(m, k)
    linear.inner_product_backward_data(dy, w, dx, transpose=transpose)
    close(dx, wide[2] @ wide[1].T, digits)
    if not transpose:
        linear.inner_product_backward_data(dy, w, dx, transpose=False, add=True)
        close(dx, 2 * wide[2] @ wide[1].T, digits)
    dw, db = garbage(*w.shape), garbage(n)
    expected = wide[0].T @ wide[2] if transpose else wide[2].T @ wide[0]
    for times in (1, 2, 3):
        linear.inner_product_backward_weights(x, dy, dw, transpose=transpose, accumulate=times > 1)
        close(dw, times * expected, digits)
        linear.inner_product_backward_bias(dy, db, accumulate=times > 1)
        close(db, times * wide[2].sum(0), digits)


def test_opposite_gradients_of_shared_parameters_leave_nothing(dtype, garbage):
    x, dy = values(dtype, 5, 33), values(dtype, 5, 17, seed=1)
    dw, db = garbage(17, 33), garbage(17)
    for sign in (1, -1):
        linear.inner_product_backward_weights(x, sign * dy, dw, transpose=False, accumulate=sign < 0)
        linear.inner_product_backward_bias(sign * dy, db, accumulate=sign < 0)
    assert not dw.any()
    assert not db.any()


def test_an_empty_batch(dtype, garbage):
    x, w, dy = values(dtype, 0, 4), values(dtype, 3, 4), values(dtype, 0, 3)
    linear.inner_product_forward(x, w, values(dtype, 3), dy, transpose=False)
    linear.inner_product_backward_data(dy, w, x, transpose=False)
    dw, db = garbage(3, 4), garbage(3)
    linear.inner_product_backward_weights(x, dy, dw, transpose=False, accumulate=False)
    linear.inner_product_backward_bias(dy, db, accumulate=False)
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("transpose", [False, True])
def test_threads_and_memory(transpose, dtype, same_bits, frugal):
    x, w, b = values(dtype, 40, 310), values(dtype, 280, 310), values(dtype, 280)
    dy = values(dtype, 40, 280)
    w = np.ascontiguousarray(w.T) if transpose else w
    for op, operands, attributes in (
        (linear.inner_product_forward, (x, w, b, dy), {"transpose": transpose}),
        (linear.inner_product_backward_data, (dy, w, x), {"transpose": transpose}),
        (linear.inner_product_backward_weights, (x, dy, w), {"transpose": transpose, "accumulate": True}),
        (linear.inner_product_backward_weights, (x, dy, w), {"transpose": transpose, "accumulate": False}),
    ):
        same_bits(op, *operands, **attributes)
        frugal(op, *operands, **attributes)
    same_bits(linear.inner_product_backward_bias, values(dtype, 300, 400), values(dtype, 400), accumulate=True)
    frugal(linear.inner_product_backward_bias, values(dtype, 300, 400), values(dtype, 400), accumulate=True)
