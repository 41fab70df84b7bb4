"""Images of another size by interpolation, as the libraries do it that pycaffe calls.

An axis of m pixels becomes one of n: pixel i of the result lies at place x of the source and is a weighted sum of the
few source pixels around it, so that an axis is a table of sources and a table of weights, and an image is done an axis
after the other. Nothing is smoothed before it is made smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ORDERS = (0, 1, 3)
"""Orders of interpolation: the nearest pixel, linear, cubic."""


class Taps(NamedTuple):
    """For each pixel of the result along an axis: sources (taps, n), as positions, and their weights (taps, n)."""

    sources: np.ndarray
    weights: np.ndarray


def centred(length: int, target: int, order: int) -> Taps:
    """Pixels are areas: x = (i + 0.5) m / n - 0.5. Nothing is beyond the edges: what would be there has weight 0.

    Cubic is the convolution of Keys (1981) with a = -1/2, through four pixels. So does scikit-image's `resize` with
    mode "constant" (before 0.19; later ones differ in cubics).
    """
    places = (np.arange(target) + 0.5) * (length / target) - 0.5
    sources, weights = _around(places, order, _keys)
    inside = (sources >= 0) & (sources < length)
    return Taps(np.clip(sources, 0, length - 1), weights * inside)


def cornered(length: int, target: int, order: int) -> Taps:
    """Pixels are points: x = i (m - 1) / (n - 1), first on first and last on last. The image is mirrored at its edges.

    Cubic weights are a B-spline's, of coefficients that `spline_coefficients` gives. So does SciPy's `zoom`.
    """
    places = np.linspace(0, length - 1, target) if target > 1 else np.zeros(1)
    sources, weights = _around(places, order, _spline)
    sources = np.abs(sources)
    return Taps(np.clip(np.minimum(sources, 2 * (length - 1) - sources), 0, None), weights)


def spline_coefficients(values: np.ndarray, axis: int) -> np.ndarray:
    """The coefficients of the cubic B-spline through values along an axis, mirrored at its ends, in float64.

    They solve c[i-1] + 4 c[i] + c[i+1] = 6 v[i] (Unser 1999), here by elimination from the first row to the last.
    """
    values = np.moveaxis(values, axis, 0).astype(np.float64)
    count = len(values)
    if count == 1:
        return np.moveaxis(values, 0, axis)
    coefficients = 6 * values
    upper = np.empty(count)
    upper[0] = 2 / 4
    coefficients[0] /= 4
    for i in range(1, count):
        lower = 2 if i == count - 1 else 1
        pivot = 4 - lower * upper[i - 1]
        upper[i] = 1 / pivot
        coefficients[i] = (coefficients[i] - lower * coefficients[i - 1]) / pivot
    for i in range(count - 2, -1, -1):
        coefficients[i] -= upper[i] * coefficients[i + 1]
    return np.moveaxis(coefficients, 0, axis)


def along(values: np.ndarray, axis: int, taps: Taps) -> np.ndarray:
    """An array with one axis resampled, in float64."""
    shape = [1] * values.ndim
    shape[axis] = -1
    total: np.ndarray | float = 0.0
    for sources, weights in zip(*taps, strict=True):
        total = total + values.take(sources, axis) * weights.reshape(shape)
    return np.asarray(total)


def _around(places: np.ndarray, order: int, cubic: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The pixels around places, some beyond the edges, and their weights."""
    if order == 0:
        return np.floor(places + 0.5).astype(np.int64)[None], np.ones((1, len(places)))
    below = np.floor(places)
    share = places - below
    first = below.astype(np.int64)
    if order == 1:
        return np.stack([first, first + 1]), np.stack([1 - share, share])
    return first + np.arange(-1, 3)[:, None], cubic(share)


def _keys(t: np.ndarray) -> np.ndarray:
    """Weights of the pixels at -1, 0, 1 and 2 for a place at 0 <= t < 1."""
    return np.stack([
        ((2 - t) * t - 1) * t / 2,
        ((3 * t - 5) * t * t + 2) / 2,
        ((4 - 3 * t) * t + 1) * t / 2,
        (t - 1) * t * t / 2,
    ])  # fmt: skip


def _spline(t: np.ndarray) -> np.ndarray:
    """Weights of the coefficients at -1, 0, 1 and 2 for a place at 0 <= t < 1."""
    return np.stack([
        (1 - t) ** 3 / 6,
        (4 - 6 * t**2 + 3 * t**3) / 6,
        (1 + 3 * t + 3 * t**2 - 3 * t**3) / 6,
        t**3 / 6,
    ])  # fmt: skip
