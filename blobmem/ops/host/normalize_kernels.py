"""Compiled: arrays (images, channels, positions) divided by L2 norms. Sums are added up in double precision."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.channels import sum_of
from blobmem.ops.host.compiled import kernel, part, reducing_part


@reducing_part
def squares_of(x):
    """The sum of squares of a run of elements, in double precision."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * x[i]
    return total


@reducing_part
def products_of(x, y):
    """The sum of products of two runs, in double precision."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * y[i]
    return total


@part
def divided_products_of(x, y, by):
    """The sum of x * y / by, in double precision."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * y[i] / by[i]
    return total


@kernel
def whole(start, stop, x, y, norms, keep, scale, shared, channels, inner, eps):
    """Images [start, stop), each by the norm of all its elements."""
    count = channels * inner
    for n in range(start, stop):
        norm = math.sqrt(squares_of(x[n * count : (n + 1) * count]) + eps)
        for c in range(channels):
            factor = x.dtype.type(scale[0 if shared else c] / norm)
            first, end = n * count + c * inner, n * count + (c + 1) * inner
            xs, ys = x[first:end], y[first:end]
            for i in range(inner):
                ys[i] = xs[i] * factor
        if keep:
            norms[n] = norm


@kernel
def whole_backward(start, stop, x, norms, scale, shared, dy, dx, channels, inner):
    """Images [start, stop): dx = (s dy - x * the image's sum of x s dy / norm ** 2) / norm."""
    for n in range(start, stop):
        norm, along = np.float64(norms[n]), 0.0
        for c in range(channels):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            along += scale[0 if shared else c] * products_of(x[first:end], dy[first:end])
        back = x.dtype.type(along / (norm * norm * norm))
        for c in range(channels):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            xs, dys, dxs = x[first:end], dy[first:end], dx[first:end]
            factor = x.dtype.type(scale[0 if shared else c] / norm)
            for i in range(inner):
                dxs[i] = factor * dys[i] - back * xs[i]


@kernel
def places(start, stop, sums, x, y, norms, keep, scale, shared, channels, inner, chunk, eps):
    """Chunks [start, stop) of positions of images, each position by the norm over its channels."""
    cuts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        n, j = item // cuts, item % cuts * chunk
        size = min(chunk, inner - j)
        sums[:size] = eps
        for c in range(channels):
            first = (n * channels + c) * inner + j
            xs = x[first : first + size]
            for i in range(size):
                sums[i] += np.float64(xs[i]) * xs[i]
        for i in range(size):
            norm = math.sqrt(sums[i])
            if keep:
                norms[n * inner + j + i] = norm
            sums[i] = 1 / norm
        for c in range(channels):
            first = (n * channels + c) * inner + j
            xs, ys = x[first : first + size], y[first : first + size]
            s = np.float64(scale[0 if shared else c])
            for i in range(size):
                ys[i] = xs[i] * s * sums[i]


@kernel
def places_backward(start, stop, sums, x, norms, scale, shared, dy, dx, channels, inner, chunk):
    """Chunks [start, stop) of positions of images: as `whole_backward`, position by position."""
    cuts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        n, j = item // cuts, item % cuts * chunk
        size = min(chunk, inner - j)
        norm = norms[n * inner + j : n * inner + j + size]
        sums[:size] = 0
        for c in range(channels):
            first = (n * channels + c) * inner + j
            xs, dys = x[first : first + size], dy[first : first + size]
            s = np.float64(scale[0 if shared else c])
            for i in range(size):
                sums[i] += s * xs[i] * dys[i]
        for i in range(size):
            square = np.float64(norm[i]) * norm[i]
            sums[i] /= square
        for c in range(channels):
            first = (n * channels + c) * inner + j
            xs, dys, dxs = x[first : first + size], dy[first : first + size], dx[first : first + size]
            s = np.float64(scale[0 if shared else c])
            for i in range(size):
                dxs[i] = (s * dys[i] - xs[i] * sums[i]) / norm[i]


@kernel
def scale_gradient(start, stop, x, norms, each, dy, images, channels, inner, total):
    """total[c] = the sum of x * dy / norm for channels [start, stop); `each`: a norm for every position."""
    for c in range(start, stop):
        value = 0.0
        for n in range(images):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            if each:
                value += divided_products_of(x[first:end], dy[first:end], norms[n * inner : (n + 1) * inner])
            else:
                value += products_of(x[first:end], dy[first:end]) / norms[n]
        total[c] = value


@kernel
def give_scale(total, dscale, accumulate):
    """dscale (+)= the totals by channel, or their sum where there is one scale for all."""
    if dscale.size == 1:
        dscale[0] = sum_of(total) + (dscale[0] if accumulate else 0.0)
    else:
        for c in range(dscale.size):
            dscale[c] = total[c] + (dscale[c] if accumulate else 0.0)
