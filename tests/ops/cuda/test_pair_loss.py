"""Euclidean, sigmoid cross-entropy and contrastive losses against the host's."""

import numpy as np
import pytest

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SHAPES = pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 13), (3, 4000), (600, 5)], ids=str)


def fresh(dtype, *shape):
    return np.full(shape, np.nan, dtype)


@DTYPES
@SHAPES
def test_euclidean(shape, dtype, cuda, rng):
    a, b = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    diff = cuda.compare("euclidean_loss_forward", a, b, fresh(dtype, *shape), fresh(dtype, 1))[2]
    for sign in (1.0, -1.0):
        cuda.compare("euclidean_loss_backward", diff, np.full(1, 0.7, dtype), fresh(dtype, *shape), sign=sign)


@DTYPES
@SHAPES
@pytest.mark.parametrize(
    "ignored, normalization",
    [(None, "VALID"), (0, "VALID"), (-1, "VALID"), (-1, "FULL"), (2, "BATCH_SIZE"), (1, "NONE")],
)
def test_sigmoid_cross_entropy(ignored, normalization, shape, dtype, cuda, rng):
    x, target = rng.normal(size=shape).astype(dtype) * 4, rng.uniform(-2, 2, shape).astype(dtype)
    x.reshape(-1)[:2] = [200, -200][: min(2, x.size)]
    attributes = {"ignore_label": ignored, "normalization": normalization}
    cuda.compare("sigmoid_cross_entropy_forward", x, target, fresh(dtype, 1), **attributes)
    dloss = np.full(1, 1.5, dtype)
    cuda.compare("sigmoid_cross_entropy_backward", x, target, dloss, fresh(dtype, *shape), **attributes)


@DTYPES
@SHAPES
@pytest.mark.parametrize("legacy", [False, True], ids=["now", "legacy"])
def test_contrastive(legacy, shape, dtype, cuda, rng):
    a = rng.normal(size=shape).astype(dtype)
    b = a + rng.normal(size=shape).astype(dtype) * 0.3
    similar = (rng.integers(0, 2, shape[0]) + 0.25).astype(dtype)  # the whole part counts
    b[:1] = a[:1]
    attributes = {"margin": 1.3, "legacy": legacy}
    cuda.compare("contrastive_loss_forward", a, b, similar, fresh(dtype, 1), **attributes)
    dloss = np.full(1, 1.5, dtype)
    cuda.compare("contrastive_loss_backward", a, b, similar, dloss, fresh(dtype, *shape), **attributes)


def test_what_is_not_a_number_shows(cuda):
    a, zero = np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), np.float32)
    loss, label = np.zeros(1, np.float32), np.zeros(2, np.float32)
    assert np.isnan(cuda.run("euclidean_loss_forward", a, zero, zero.copy(), loss)[3])
    assert np.isnan(cuda.run("contrastive_loss_forward", a, zero, label, loss, margin=1.0, legacy=False)[3])
    attributes = {"ignore_label": None, "normalization": "FULL"}
    assert np.isnan(cuda.run("sigmoid_cross_entropy_forward", a, zero, loss, **attributes)[2])
