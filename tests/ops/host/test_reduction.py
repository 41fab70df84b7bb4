"""Reductions of rows against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import reduction

SHAPES = [(1, 1), (3, 70), (1, 300001), (63, 5000), (64, 33), (700, 1), (0, 5), (4, 0)]
EXPECTED = {
    "SUM": lambda x: x.sum(1),
    "ASUM": lambda x: np.abs(x).sum(1),
    "SUMSQ": lambda x: (x**2).sum(1),
    "MEAN": lambda x: x.sum(1) / max(1, x.shape[1]),
}
SLOPE = {
    "SUM": np.ones_like,
    "ASUM": np.sign,
    "SUMSQ": lambda x: 2 * x,
    "MEAN": lambda x: np.full_like(x, 1 / max(1, x.shape[1])),
}


def make(dtype, shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(dtype)
    x[:, ::3] = 0
    return x, rng.normal(size=shape[0]).astype(dtype)


@pytest.mark.parametrize("coeff", [1.0, -2.5])
@pytest.mark.parametrize("operation", EXPECTED)
@pytest.mark.parametrize("shape", SHAPES)
def test_reduction(shape, operation, coeff, dtype, close, garbage):
    x, dy = make(dtype, shape)
    wide = x.astype(np.float64)
    y, dx = garbage(shape[0]), garbage(*shape)
    reduction.reduction_forward(x, y, operation=operation, coeff=coeff)
    close(y, coeff * EXPECTED[operation](wide), digits=2)
    given = None if operation in ("SUM", "MEAN") else x
    reduction.reduction_backward(given, dy, dx, operation=operation, coeff=coeff)
    close(dx, coeff * dy[:, None].astype(np.float64) * SLOPE[operation](wide), digits=2)


def test_a_long_sum_keeps_its_small_parts():
    x = np.full((1, 1 << 22), 0.1, np.float32)
    y = np.empty(1, np.float32)
    reduction.reduction_forward(x, y, operation="SUM", coeff=1.0)
    assert y[0] == np.float32(x[0, 0] * np.float64(x.size))


@pytest.mark.parametrize("operation", EXPECTED)
@pytest.mark.parametrize("shape", [(1, 400003), (900, 401)])
def test_threads_and_memory(shape, operation, dtype, same_bits, frugal):
    x, dy = make(dtype, shape)
    given = None if operation in ("SUM", "MEAN") else x
    for check in (same_bits, frugal):
        check(reduction.reduction_forward, x, np.empty_like(dy), operation=operation, coeff=0.5)
        check(reduction.reduction_backward, given, dy, np.empty_like(x), operation=operation, coeff=0.5)
