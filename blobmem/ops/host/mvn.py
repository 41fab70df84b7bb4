"""Rows brought to mean 0 and, if asked, to deviation 1."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.channels import spread_of, sum_of
from blobmem.ops.host.compiled import kernel, part, reducing_part
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 16384


@reducing_part
def _dot_from(x, mean, dy):
    """The sum of (x - mean) * dy, in double precision."""
    total = 0.0
    for i in range(x.size):
        total += (np.float64(x[i]) - mean) * dy[i]
    return total


@part
def _statistics(x):
    """Mean and deviation of a row, in double precision."""
    mean = sum_of(x) / x.size
    return mean, math.sqrt(spread_of(x, mean) / x.size)


@kernel
def _normalize(start, stop, x, y, size, scaled, eps):
    """Rows [start, stop)."""
    for row in range(start, stop):
        xs, ys = x[row * size : (row + 1) * size], y[row * size : (row + 1) * size]
        if scaled:
            mean, deviation = _statistics(xs)
            factor = 1 / (deviation + eps)
        else:
            mean, factor = sum_of(xs) / size, 1.0
        for i in range(size):
            ys[i] = (xs[i] - mean) * factor


@op
def mvn_forward(x: np.ndarray, y: np.ndarray, *, normalize_variance: bool, eps: float) -> None:
    """y = x - mean of its row, over the row's deviation + eps if asked; x and y (rows, values) may be one array."""
    rows, size = x.shape
    parallel_for(_normalize, rows, x.reshape(-1), y.reshape(-1), size, normalize_variance, float(eps),
                 grain=1 + _GRAIN // max(1, size))  # fmt: skip


@kernel
def _normalize_backward(start, stop, x, dy, dx, size, scaled, eps):
    """Rows [start, stop). The statistics are taken again: the row is in a cache by then, and nothing has to be kept."""
    for row in range(start, stop):
        xs, dys = x[row * size : (row + 1) * size], dy[row * size : (row + 1) * size]
        dxs = dx[row * size : (row + 1) * size]
        plain = sum_of(dys) / size
        mean, factor, along = 0.0, 1.0, 0.0
        if scaled:
            mean, deviation = _statistics(xs)
            factor = 1 / (deviation + eps)
            if deviation > 0:
                along = _dot_from(xs, mean, dys) / size * factor / deviation
        for i in range(size):
            dxs[i] = (dys[i] - plain - (xs[i] - mean) * along) * factor


@op
def mvn_backward(x: np.ndarray | None, dy: np.ndarray, dx: np.ndarray, *, normalize_variance: bool,
                 eps: float) -> None:  # fmt: skip
    """dx of `mvn_forward` from its x (None unless the variance is normalized); dy and dx may be one array.

    With d = deviation and f = 1 / (d + eps): dx = f * (dy - mean(dy) - (x - mean) * f / d * mean((x - mean) * dy)), the
    last term 0 where d is.
    """
    rows, size = dy.shape
    flat = dy.reshape(-1)
    parallel_for(_normalize_backward, rows, flat if x is None else x.reshape(-1), flat, dx.reshape(-1), size,
                 normalize_variance, float(eps), grain=1 + _GRAIN // max(1, size))  # fmt: skip
