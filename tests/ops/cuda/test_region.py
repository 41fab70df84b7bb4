"""Pooling over regions on a CUDA device against the host."""

import numpy as np
import pytest

REGIONS = [(0, 0, 0, 15, 11), (1, 3, 2, 9, 8), (0, 4, 4, 4, 4), (1, 1, 3, 9, 7), (0, 10, 8, 30, 40), (1, 40, 2, 50, 6),
           (0, -30, -20, -10, -2), (1, -7, -5, 4, 3), (0, 9, 8, 3, 2), (1, -1e30, 0, 1e30, 6)]  # fmt: skip


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0625], ids=str)
@pytest.mark.parametrize("grid", [(2, 3), (1, 1), (7, 5)], ids=["2x3", "1x1", "7x5"])
def test_regions(cuda, rng, grid, scale, dtype):
    x = rng.integers(-9, 9, (2, 3, 12, 16)).astype(dtype)
    regions = np.array(REGIONS, dtype)
    y = np.full((len(regions), 3, *grid), np.nan, dtype)
    *_, argmax = cuda.compare("roi_pool_forward", x, regions, y, np.zeros(y.shape, np.int32), scale=scale, rtol=0)
    cuda.compare("roi_pool_forward", x, regions, y, None, scale=scale, rtol=0)
    dy = rng.normal(size=y.shape).astype(dtype)
    # in the host's order: the same bits
    cuda.compare("roi_pool_backward", dy, regions, argmax, np.full_like(x, np.nan), rtol=0)


def test_many_cells_at_one_place(cuda, rng, dtype):
    regions = np.array([(k % 2, 3, 3, 3, 3) for k in range(40)], dtype)
    argmax, dy = rng.integers(-1, 3, (40, 2, 3, 3)).astype(np.int32), rng.normal(size=(40, 2, 3, 3)).astype(dtype)
    cuda.compare("roi_pool_backward", dy, regions, argmax, np.full((2, 2, 20, 20), np.nan, dtype), rtol=0)


def test_fractions(cuda, rng, dtype):
    ends = rng.random((60, 4)) * 40 - 4
    regions = np.hstack([rng.integers(0, 2, (60, 1)), ends]).astype(dtype)
    x, y = rng.normal(size=(2, 2, 21, 23)).astype(dtype), np.zeros((60, 2, 6, 7), dtype)
    cuda.compare("roi_pool_forward", x, regions, y, np.zeros(y.shape, np.int32), scale=0.7, rtol=0)


def test_what_is_not_a_number_does_not_vanish(cuda, dtype):
    x, y = np.zeros((1, 1, 4, 4), dtype), np.zeros((1, 1, 2, 1), dtype)
    x[0, 0, 1, 2] = np.nan
    *_, y, _ = cuda.run("roi_pool_forward", x, np.array([[0, 0, 0, 3, 3]], dtype), y, None, scale=1.0)
    assert np.isnan(y[0, 0, 0, 0]) and y[0, 0, 1, 0] == 0


def test_no_region(cuda, dtype):
    x, none, cells = np.ones((1, 2, 3, 3), dtype), np.zeros((0, 5), dtype), np.zeros((0, 2, 2, 2), dtype)
    cuda.run("roi_pool_forward", x, none, cells, None, scale=1.0)
    cuda.compare("roi_pool_backward", cells, none, cells.astype(np.int32), x)


@pytest.mark.parametrize("wrong, value", [((2, 0, 0, 1, 1), 2), ((-1, 0, 0, 1, 1), -1), ((0, 0, np.nan, 1, 1), "nan"),
                                          ((0, 0, 0, np.inf, 1), "inf")], ids=["image", "negative", "nan", "inf"])  # fmt: skip
def test_a_region_of_nothing(cuda, wrong, value, dtype):
    x, y = np.ones((2, 1, 3, 3), dtype), np.zeros((2, 1, 1, 1), dtype)
    regions = np.array([(0, 0, 0, 1, 1), wrong], dtype)
    said = f"region 1 has {value}; it is an image, 0 to 1, and four finite coordinates"
    with pytest.raises(ValueError, match=said):
        cuda.run("roi_pool_forward", x, regions, y, None, scale=1.0)
    with pytest.raises(ValueError, match=said):
        cuda.run("roi_pool_backward", y, regions, np.zeros(y.shape, np.int32), x)
