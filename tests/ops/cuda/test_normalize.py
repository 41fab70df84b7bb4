"""Division by L2 norms of images and of positions, with one scale and with one for each channel."""

import numpy as np
import pytest

SHAPES = [(2, 3, 4), (3, 5, 1), (1, 7, 600), (2, 21, 9), (2, 3, 12100)]
EPS = 0.3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_both_directions(cuda, rng, shape, each, shared, dtype):
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    scale = rng.uniform(0.5, 2, () if shared else shape[1]).astype(dtype)
    norms, out = np.zeros((shape[0], shape[2]) if each else shape[:1], dtype), np.zeros_like(x)
    norms = cuda.compare("l2_normalize_forward", x, scale, out, norms, each=each, eps=EPS)[3]
    cuda.compare("l2_normalize_forward", x, scale, out, None, each=each, eps=EPS)
    cuda.compare("l2_normalize_forward", x, scale, x, norms, each=each, eps=EPS)
    cuda.compare("l2_normalize_backward", x, scale, norms, dy, out)
    cuda.compare("l2_normalize_backward", x, scale, norms, dy, dy)
    atol = (1e-6 if dtype == np.float32 else 1e-14) * (10 + x.size**0.5)
    for accumulate in (False, True):
        cuda.compare("l2_normalize_backward_scale", x, norms, dy, scale, accumulate=accumulate, atol=atol)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)])
def test_nothing(cuda, rng, shape, each):
    x, scale = np.zeros(shape, np.float32), rng.normal(size=3).astype(np.float32)
    norms = np.zeros((shape[0], shape[2]) if each else shape[:1], np.float32)
    norms = cuda.compare("l2_normalize_forward", x, scale, x, norms, each=each, eps=EPS)[3]
    cuda.run("l2_normalize_backward", x, scale, norms, x, np.zeros_like(x))
    for accumulate in (False, True):
        cuda.compare("l2_normalize_backward_scale", x, norms, x, scale, accumulate=accumulate)
