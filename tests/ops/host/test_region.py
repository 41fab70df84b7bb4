"""Pooling over regions against slices of the plane."""

import numpy as np
import pytest

from blobmem.ops.host import region

REGIONS = {
    "whole": (0, 0, 0, 15, 11),
    "inside": (1, 3, 2, 9, 8),
    "one point": (0, 4, 4, 4, 4),
    "halves": (1, 1, 3, 9, 7),
    "beyond": (0, 10, 8, 30, 40),
    "outside": (1, 40, 2, 50, 6),
    "before": (0, -30, -20, -10, -2),
    "overlapping the corner": (1, -7, -5, 4, 3),
    "backwards": (0, 9, 8, 3, 2),
    "far": (1, -1e30, 0, 1e30, 6),
}


def away(value):
    """The nearest whole number, halves away from zero."""
    return int(np.sign(value) * np.floor(abs(value) + 0.5))


def pooled(x, row, grid, scale):
    """Of one region, the values and the indices of the maxima."""
    image, *ends = (float(np.clip(v, -2e6, 2e6)) for v in row)
    x0, y0, x1, y1 = (away(v * scale) for v in ends)
    values, places = np.zeros((x.shape[1], *grid)), np.full((x.shape[1], *grid), -1)
    height, width = x.shape[2:]
    index = np.arange(height * width).reshape(height, width)
    for r, c in np.ndindex(*grid):
        tall, wide = max(y1 - y0 + 1, 1), max(x1 - x0 + 1, 1)
        # whole numbers only: floor and ceiling of fractions
        rows = slice(*(min(max(v + y0, 0), height) for v in (r * tall // grid[0], -(-(r + 1) * tall // grid[0]))))
        columns = slice(*(min(max(v + x0, 0), width) for v in (c * wide // grid[1], -(-(c + 1) * wide // grid[1]))))
        part = x[int(image), :, rows, columns].reshape(x.shape[1], -1)
        if part.size:
            values[:, r, c] = part.max(1)
            places[:, r, c] = index[rows, columns].ravel()[part.argmax(1)]
    return values, places


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0625], ids=str)
@pytest.mark.parametrize("grid", [(2, 3), (1, 1), (7, 5)], ids=["2x3", "1x1", "7x5"])
def test_forward_and_backward(grid, scale, dtype, close, garbage):
    rng = np.random.default_rng(0)
    x = rng.permutation(2 * 3 * 12 * 16).reshape(2, 3, 12, 16).astype(dtype)
    rows = np.array(list(REGIONS.values()), dtype)
    expected = [pooled(x, row, grid, scale) for row in rows]
    y, argmax = garbage(len(rows), 3, *grid), np.full((len(rows), 3, *grid), 7, np.int32)
    region.roi_pool_forward(x, rows, y, argmax, scale=scale)
    np.testing.assert_array_equal(y, [values for values, _ in expected])
    np.testing.assert_array_equal(argmax, [places for _, places in expected])
    y.fill(np.nan)
    region.roi_pool_forward(x, rows, y, None, scale=scale)
    np.testing.assert_array_equal(y, [values for values, _ in expected])
    dy, sums = rng.normal(size=y.shape).astype(dtype), np.zeros((2, 3, 12 * 16))
    for (k, c, r, q), place in np.ndenumerate(argmax):
        if place >= 0:
            sums[int(rows[k, 0]), c, place] += dy[k, c, r, q]
    dx = garbage(*x.shape)
    region.roi_pool_backward(dy, rows, argmax, dx)
    close(dx, sums.reshape(x.shape), 4)


def test_by_hand(dtype, garbage):
    x = np.arange(30, dtype=dtype).reshape(1, 1, 5, 6)
    y, argmax = garbage(2, 1, 2, 2), np.zeros((2, 1, 2, 2), np.int32)
    # at half the scale: columns 1 to 4 (2.5 becomes 3, 1.5 becomes 2), rows 0 to 2; cells of rows 0-1 and 1-2
    rows = np.array([[0, 2, 0, 8, 4], [0, 3, 1, 5, 1]], dtype)
    region.roi_pool_forward(x, rows, y, argmax, scale=0.5)
    assert y[0, 0].tolist() == [[8, 10], [14, 16]]
    assert y[1, 0].tolist() == [[8, 9], [8, 9]]
    assert argmax[1, 0].tolist() == [[8, 9], [8, 9]]


def test_what_is_not_a_number_does_not_vanish(dtype, garbage):
    x, y = np.zeros((1, 1, 4, 4), dtype), garbage(1, 1, 2, 1)
    x[0, 0, 1, 2] = np.nan
    region.roi_pool_forward(x, np.array([[0, 0, 0, 3, 3]], dtype), y, None, scale=1.0)
    assert np.isnan(y[0, 0, 0, 0]) and y[0, 0, 1, 0] == 0


def test_no_region(dtype, garbage):
    x, rows = np.ones((1, 2, 3, 3), dtype), np.zeros((0, 5), dtype)
    region.roi_pool_forward(x, rows, np.zeros((0, 2, 2, 2), dtype), None, scale=1.0)
    dx = garbage(1, 2, 3, 3)
    region.roi_pool_backward(np.zeros((0, 2, 2, 2), dtype), rows, np.zeros((0, 2, 2, 2), np.int32), dx)
    assert not dx.any()


@pytest.mark.parametrize("wrong", [(2, 0, 0, 1, 1), (-1, 0, 0, 1, 1), (0, 0, np.nan, 1, 1), (0, 0, 0, np.inf, 1)],
                         ids=["image", "negative", "nan", "inf"])  # fmt: skip
def test_a_region_of_nothing(wrong, dtype):
    x, y = np.ones((2, 1, 3, 3), dtype), np.zeros((2, 1, 1, 1), dtype)
    with pytest.raises(ValueError, match="region 1 is .*; it is an image, 0 to 1, and four finite coordinates"):
        region.roi_pool_forward(x, np.array([(0, 0, 0, 1, 1), wrong], dtype), y, None, scale=1.0)
    assert not y.any()


def test_threads_and_memory(dtype, same_bits, frugal):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 60, 30, 30)).astype(dtype)
    rows = np.hstack([rng.integers(0, 2, (50, 1)), rng.integers(0, 10, (50, 2)), rng.integers(10, 20, (50, 2))])
    rows = rows.astype(dtype)
    y, argmax = np.zeros((50, 60, 3, 3), dtype), np.zeros((50, 60, 3, 3), np.int32)
    _, _, y, argmax = same_bits(region.roi_pool_forward, x, rows, y, argmax, scale=1.0)
    frugal(region.roi_pool_forward, x, rows, y, argmax, scale=1.0)
    same_bits(region.roi_pool_backward, y, rows, argmax, x)
    frugal(region.roi_pool_backward, y, rows, argmax, x)
