"""Rows brought to mean 0 and deviation 1: short and long, odd and whole packs, in one part and in several."""

import numpy as np
import pytest

SHAPES = [(1, 1), (7, 5), (3, 70), (33, 300), (3, 8900), (2, 36000), (2, 33001)]
DTYPES = [np.float32, np.float64]


def rows(rng, dtype, shape, mean=0.0):
    return (rng.normal(size=shape) + mean).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_forward(cuda, rng, shape, scaled, dtype):
    x, options = rows(rng, dtype, shape, 3), {"normalize_variance": scaled, "eps": 1e-9}
    cuda.compare("mvn_forward", x, np.zeros_like(x), **options)
    cuda.compare("mvn_forward", x, x, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(cuda, rng, shape, dtype):
    x, dy, options = rows(rng, dtype, shape, 3), rows(rng, dtype, shape, 1), {"eps": 1e-3}
    cuda.compare("mvn_backward", x, dy, np.zeros_like(x), normalize_variance=True, **options)
    cuda.compare("mvn_backward", x, dy, dy, normalize_variance=True, **options)
    cuda.compare("mvn_backward", None, dy, np.zeros_like(x), normalize_variance=False, **options)
    cuda.compare("mvn_backward", None, dy, dy, normalize_variance=False, **options)


def test_rows_of_one_value(cuda, rng):
    x, dy = np.full((3, 40), 1234.5, np.float32), rows(rng, np.float32, (3, 40))
    _, y = cuda.compare("mvn_forward", x, np.ones_like(x), normalize_variance=True, eps=0.5)
    assert (y == 0).all()
    cuda.compare("mvn_backward", x, dy, np.zeros_like(x), normalize_variance=True, eps=0.5)


def test_rows_far_from_zero(cuda, rng):
    x = rows(rng, np.float32, (2, 33001), 20000)
    cuda.compare("mvn_forward", x, np.zeros_like(x), normalize_variance=True, eps=1e-9, atol=1e-3)


def test_nothing(cuda):
    for shape in [(0, 5), (5, 0)]:
        x = np.zeros(shape, np.float32)
        cuda.run("mvn_forward", x, x, normalize_variance=True, eps=1.0)
        cuda.run("mvn_backward", x, x, x, normalize_variance=True, eps=1.0)
