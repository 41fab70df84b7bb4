"""Interpolation, beside values that scikit-image 0.26 (`warp`) and SciPy 1.17 (`zoom`) gave."""

import numpy as np
import pytest

from blobmem.io.resampling import along, centred, cornered, spline_coefficients

ROW = np.array([3.0, 7, 1, 4, 9])


@pytest.mark.parametrize(
    ("order", "target", "expected"),
    [
        (0, 8, [3, 3, 7, 1, 1, 4, 9, 9]),
        (0, 3, [3, 1, 9]),
        (1, 8, [2.625, 4.75, 6.625, 2.875, 1.9375, 3.8125, 6.8125, 7.5]),
        (1, 3, [4.33333333, 1, 7.33333333]),
        (3, 8, [2.47265625, 5.14990234, 6.88317871, 2.54602051, 1.20568848, 3.74108887, 7.60461426, 8.19030762]),
        (3, 3, [4.55555556, 1, 8.22222222]),
    ],
    ids=["nearest-8", "nearest-3", "linear-8", "linear-3", "cubic-8", "cubic-3"],
)
def test_centred(order, target, expected):
    # beyond the edges lies 0 here and the smallest value there
    result = along(ROW - ROW.min(), 0, centred(5, target, order)) + ROW.min()
    np.testing.assert_allclose(result, expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("order", "target", "expected"),
    [
        (0, 8, [3, 7, 7, 1, 1, 4, 4, 9]),
        (1, 8, [3, 5.28571429, 6.14285714, 2.71428571, 1.85714286, 3.57142857, 6.14285714, 9]),
        (3, 8, [3, 5.50062474, 6.6788838, 2.72053311, 0.62640566, 3.03540192, 6.94252395, 9]),
        (0, 3, [3, 1, 9]),
        (1, 3, [3, 1, 9]),
        (3, 3, [3, 1, 9]),
    ],
    ids=["nearest-8", "linear-8", "cubic-8", "nearest-3", "linear-3", "cubic-3"],
)
def test_cornered(order, target, expected):
    values = spline_coefficients(ROW, 0) if order == 3 else ROW
    np.testing.assert_allclose(along(values, 0, cornered(5, target, order)), expected, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_a_spline_goes_through_its_values(length):
    values = np.random.default_rng(0).normal(size=(2, length))
    coefficients = spline_coefficients(values, 1)
    np.testing.assert_allclose(along(coefficients, 1, cornered(length, length, 3)), values, atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("taps", [centred, cornered])
def test_the_same_length_changes_nothing(taps, order):
    values = np.arange(12.0).reshape(3, 4)
    coefficients = spline_coefficients(values, 1) if (taps, order) == (cornered, 3) else values
    np.testing.assert_allclose(along(coefficients, 1, taps(4, 4, order)), values, atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("taps", [centred, cornered])
@pytest.mark.parametrize(("length", "target"), [(1, 7), (7, 1), (2, 9), (100, 3)])
def test_sources_are_pixels_and_weights_are_shares(taps, order, length, target):
    sources, weights = taps(length, target, order)
    assert sources.shape == weights.shape and sources.shape[1] == target
    assert sources.min() >= 0 and sources.max() < length
    inside = np.abs(np.linspace(-1, 1, target)) < 0.5 if target > 3 else slice(0)
    if taps is cornered or length > 2:
        np.testing.assert_allclose(weights.sum(0)[inside], 1)
