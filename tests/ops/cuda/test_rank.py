"""Accuracy and argmax against the host's, with many equal values."""

import numpy as np
import pytest

from blobmem.errors import NetError

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


def coarse(rng, shape, dtype):
    """Few different values, and some that are not numbers or infinite."""
    x = rng.integers(-4, 5, shape).astype(dtype)
    chance = rng.uniform(size=shape)
    x[chance < 0.1], x[chance > 0.95] = np.nan, -np.inf
    return x


@DTYPES
@pytest.mark.parametrize("shape", [(0, 5, 1), (3, 1, 1), (70, 10, 1), (4, 1030, 1), (2, 21, 7), (2, 6, 1200)], ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignored", [None, 1], ids=["all", "ignoring"])
def test_accuracy(ignored, top_k, shape, dtype, cuda, rng):
    outer, classes, inner = shape
    x, label = coarse(rng, shape, dtype), rng.integers(0, classes, (outer, inner)).astype(dtype)
    attributes = {"top_k": top_k, "ignore_label": ignored, "layer": "accuracy"}
    share = np.full((), np.nan, dtype)
    for per_class in (None, np.full(classes, np.nan, dtype)):
        cuda.compare("accuracy_forward", x, label, share, per_class, rtol=1e-7, **attributes)


def test_accuracy_of_a_label_that_is_no_class(cuda):
    x, label = np.zeros((2, 3, 1), np.float32), np.array([[0], [3]], np.float32)
    with pytest.raises(NetError, match="layer 'accuracy': label 3 of item 1 is no class: expected 0 to 2"):
        cuda.run("accuracy_forward", x, label, np.zeros(1, np.float32), np.zeros(3, np.float32), top_k=1,
                 ignore_label=None, layer="accuracy")  # fmt: skip


@DTYPES
@pytest.mark.parametrize("values", [False, True], ids=["indices", "values"])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("shape", [(3, 4), (5, 1100), (40, 3, 2, 2)], ids=str)
def test_argmax_of_items(shape, top_k, values, dtype, cuda, rng):
    y = np.full((shape[0], 2 if values else 1, top_k), 7, dtype)
    cuda.compare("argmax_forward", coarse(rng, shape, dtype), y, top_k=top_k, out_max_val=values, axis=None)


@DTYPES
@pytest.mark.parametrize("values", [False, True], ids=["indices", "values"])
@pytest.mark.parametrize("axis, top_k", [(0, 2), (1, 5), (2, 1), (3, 3)])
def test_argmax_along_an_axis(axis, top_k, values, dtype, cuda, rng):
    shape = [2, 5, 30, 3]
    x = coarse(rng, shape, dtype)
    shape[axis] = top_k
    cuda.compare("argmax_forward", x, np.full(shape, 7, dtype), top_k=top_k, out_max_val=values, axis=axis)


def test_argmax_by_hand(cuda):
    x = np.array([[1, 9, 9, np.nan]], np.float32)
    y = cuda.run("argmax_forward", x, np.zeros((1, 2, 4), np.float32), top_k=4, out_max_val=True, axis=None)[1]
    np.testing.assert_array_equal(y[0], np.array([[2, 1, 0, 3], [9, 9, 1, np.nan]], np.float32))
