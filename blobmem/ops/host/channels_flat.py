"""Compiled: what `channels` does, for arrays (outer, channels) whose channels have no runs of elements to go along.

Loops run along the channels, some hundreds at a time, so that they go through memory in order. Sums are taken in double
precision.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.channels import keep_statistics, kept_mean
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


@part
def normalize_rows(x, y, xhat, keep, start, stop, channels, first, means, scales):
    """y, and xhat if it is to be kept: (x - means) * scales, for rows [start, stop) of the channels from `first` on."""
    for n in range(start, stop):
        at, end = n * channels + first, n * channels + first + means.size
        xs, ys = x[at:end], y[at:end]
        for c in range(ys.size):
            ys[c] = (xs[c] - means[c]) * scales[c]
        if keep:
            kept = xhat[at:end]
            for c in range(kept.size):
                kept[c] = ys[c]


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
            keep_statistics(first + c, means[c], spread[c], outer, channels, mean, inv_std, running_mean, running_var,
                            eps, fraction)  # fmt: skip
            means[c], spread[c] = kept_mean(first + c, channels, mean), inv_std[first + c]
        normalize_rows(x, y, xhat, keep, 0, outer, channels, first, means, spread)


@kernel
def normalize_columns_given(start, stop, scratch, x, y, xhat, keep, channels, mean, inv_std):
    """As `channels.normalize_given`, for rows [start, stop)."""
    for first in range(0, channels, TILE):
        count = min(TILE, channels - first)
        means, scales = scratch[:count], scratch[TILE : TILE + count]
        for c in range(count):
            means[c], scales[c] = kept_mean(first + c, channels, mean), inv_std[first + c]
        normalize_rows(x, y, xhat, keep, start, stop, channels, first, means, scales)


@kernel
def merge_moments_columns(start, stop, x, outer, channels, moments, before):
    """As `channels.merge_moments`, row by row."""
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        means, spreads = moments[first : first + count], moments[channels + first : channels + first + count]
        if not before:
            means[:] = 0
            spreads[:] = 0
        for n in range(outer):
            xs, share = x[n * channels + first : n * channels + first + count], 1 / np.float64(before + n + 1)
            for c in range(xs.size):
                far = xs[c] - means[c]
                means[c] += far * share
                spreads[c] += far * (xs[c] - means[c])


@part
def gradient_rows(xhat, dy, dx, start, stop, channels, first, relu, times, plus, less, tilt, scale):
    """As `channels.gradient_run`, for rows [start, stop) of the channels from `first` on."""
    for n in range(start, stop):
        at, end = n * channels + first, n * channels + first + less.size
        dys, dxs, kept = dy[at:end], dx[at:end], xhat[at:end]
        for c in range(dxs.size):
            g = dys[c]
            if relu and not kept[c] * times[c] + plus[c] > 0:
                g = dy.dtype.type(0)
            dxs[c] = np.float64(g) - less[c] - kept[c] * tilt[c]
            dxs[c] = dxs[c] * scale[c]


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
        gradient_rows(xhat, dy, dx, 0, outer, channels, first, False, scale, scale, plain, along, scale)


@kernel
def gradient_sums_columns(start, stop, scratch, xhat, dy, outer, channels, gamma, beta, with_gamma, with_beta, relu,
                          sums, new):  # fmt: skip
    """As `channels.gradient_sums`."""
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        times, plus = scratch[:count], scratch[TILE : TILE + count]
        plain, along = sums[first : first + count], sums[channels + first : channels + first + count]
        for c in range(count):
            times[c] = gamma[first + c] if with_gamma else xhat.dtype.type(1)
            plus[c] = beta[first + c] if with_beta else xhat.dtype.type(0)
            if new:
                plain[c], along[c] = 0, 0
        for n in range(outer):
            at, end = n * channels + first, n * channels + first + count
            dys, kept = dy[at:end], xhat[at:end]
            for c in range(dys.size):
                g = dys[c]
                if relu and not kept[c] * times[c] + plus[c] > 0:
                    g = dy.dtype.type(0)
                plain[c] += g
                along[c] += g * kept[c]


@kernel
def gradient_columns_given(start, stop, scratch, xhat, dy, dx, channels, inv_std, gamma, beta, with_gamma,
                           with_beta, relu, sums, count):  # fmt: skip
    """As `channels.gradient_given`, for rows [start, stop)."""
    for first in range(0, channels, TILE):
        width = min(TILE, channels - first)
        times, plus, less, tilt, scale = [scratch[k * TILE : k * TILE + width] for k in range(5)]
        for c in range(width):
            at = first + c
            times[c] = gamma[at] if with_gamma else xhat.dtype.type(1)
            plus[c] = beta[at] if with_beta else xhat.dtype.type(0)
            less[c], tilt[c], scale[c] = sums[at] / count, sums[channels + at] / count, times[c] * inv_std[at]
        gradient_rows(xhat, dy, dx, start, stop, channels, first, relu, times, plus, less, tilt, scale)
