"""Reductions of rows: few and many, short, long, empty."""

import numpy as np
import pytest

OPERATIONS = ["SUM", "ASUM", "SUMSQ", "MEAN"]
SHAPES = [(1, 1), (3, 70), (1, 70001), (63, 1200), (3, 33000), (700, 1), (0, 5), (4, 0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_reduction(cuda, rng, shape, operation, dtype):
    x, dy = rng.normal(size=shape).astype(dtype), rng.normal(size=shape[0]).astype(dtype)
    x[:, ::3] = 0
    atol = (2e-6 if dtype == np.float32 else 1e-13) * (10 + shape[1]) / (shape[1] + 1 if operation == "MEAN" else 1)
    cuda.compare("reduction_forward", x, np.ones_like(dy), operation=operation, coeff=-2.5, atol=atol)
    given = None if operation in ("SUM", "MEAN") else x
    cuda.compare("reduction_backward", given, dy, np.ones_like(x), operation=operation, coeff=0.3)


def test_same_bits(cuda, rng):
    x, y = rng.normal(size=(3, 33000)).astype(np.float32), np.zeros(3, np.float32)
    first, second = (cuda.run("reduction_forward", x, y, operation="SUM", coeff=1.0)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)
