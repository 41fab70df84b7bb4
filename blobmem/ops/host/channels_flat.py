"""Compiled: what `channels` does, for arrays (outer, channels) whose channels have no runs of elements to go along.

Loops run along the channels, some hundreds at a time, so that they go through memory in order. Sums are taken in double
precision.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part

TILE = 256


@part
def sum_rows_of(x, outer, channels, first, sums):
    """sums[c] = the sum of x[:, first + c]."""
    sums[:] = 0
    for n in range(outer):
        row = x[n * channels + first : n * channels + first + sums.size]
        for c in range(sums.size):
            sums[c] += row[c]


@part
def dot_rows_of(x, y, outer, channels, first, sums):
    """sums[c] = the sum of x[:, first + c] * y[:, first + c]."""
    sums[:] = 0
    for n in range(outer):
        at = n * channels + first
        xs, ys = x[at : at + sums.size], y[at : at + sums.size]
        for c in range(sums.size):
            sums[c] += xs[c] * ys[c]


@kernel
def sum_columns(start, stop, scratch, x, y, product, outer, channels, total, accumulate):
    """total[c] (+)= the sum of x[:, c], or of x[:, c] * y[:, c] if `product`, for channels [start, stop)."""
    for first in range(start, stop, TILE):
        sums = scratch[: min(TILE, stop - first)]
        if product:
            dot_rows_of(x, y, outer, channels, first, sums)
        else:
            sum_rows_of(x, outer, channels, first, sums)
        for c in range(sums.size):
            value = x.dtype.type(sums[c])
            total[first + c] = value + (total[first + c] if accumulate else x.dtype.type(0))


@kernel
def normalize_columns(start, stop, scratch, x, y, xhat, keep, outer, channels, mean, inv_std, running_mean, running_var,
                      eps, fraction):  # fmt: skip
    """As `channels.normalize`."""
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        means, spread = scratch[:count], scratch[TILE : TILE + count]
        sum_rows_of(x, outer, channels, first, means)
        for c in range(count):
            means[c] = means[c] / outer
            spread[c] = 0
        for n in range(outer):
            xs = x[n * channels + first : n * channels + first + count]
            for c in range(xs.size):
                spread[c] += (xs[c] - means[c]) * (xs[c] - means[c])
        for c in range(count):
            running_mean[first + c] = running_mean[first + c] * fraction + means[c]
            running_var[first + c] = running_var[first + c] * fraction + spread[c] / max(1, outer - 1)
            spread[c] = 1 / math.sqrt(spread[c] / outer + eps)
            mean[first + c], inv_std[first + c] = means[c], spread[c]
            mean[channels + first + c] = means[c] - mean[first + c]
        for n in range(outer):
            at, end = n * channels + first, n * channels + first + count
            xs, ys = x[at:end], y[at:end]
            for c in range(ys.size):
                ys[c] = (xs[c] - means[c]) * spread[c]
            if keep:
                kept = xhat[at:end]
                for c in range(kept.size):
                    kept[c] = ys[c]


@kernel
def normalize_columns_backward(start, stop, scratch, xhat, inv_std, dy, dx, outer, channels):
    """As `channels.normalize_backward`."""
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        plain, along = scratch[:count], scratch[TILE : TILE + count]
        sum_rows_of(dy, outer, channels, first, plain)
        dot_rows_of(dy, xhat, outer, channels, first, along)
        scale = inv_std[first : first + count]
        for c in range(count):
            plain[c] = plain[c] / outer
            along[c] = along[c] / outer
        for n in range(outer):
            at, end = n * channels + first, n * channels + first + count
            dys, dxs, kept = dy[at:end], dx[at:end], xhat[at:end]
            for c in range(dxs.size):
                dxs[c] = np.float64(dys[c]) - plain[c] - kept[c] * along[c]
                dxs[c] = dxs[c] * scale[c]
