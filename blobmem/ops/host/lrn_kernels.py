"""Compiled: local response normalisation. Across channels an item is a chunk of one image's positions, all channels."""

from __future__ import annotations

import math

from blobmem.ops.host.compiled import kernel, part


@part
def raise_to(values, beta, factors, to):
    """to = factors * values ** -beta; for the usual beta, 3/4, with square roots, which are vector instructions."""
    if beta == 0.75:
        for j in range(to.size):
            root = math.sqrt(values[j])
            to[j] = factors[j] / (root * math.sqrt(root))
    else:
        for j in range(to.size):
            to[j] = factors[j] * values[j] ** to.dtype.type(-beta)


@kernel
def across(start, stop, scratch, x, y, scale, keep, channels, positions, chunk, size, alpha, beta, k):
    """Items [start, stop)."""
    parts = (positions + chunk - 1) // chunk
    t = x.dtype.type
    for item in range(start, stop):
        n = min(chunk, positions - item % parts * chunk)
        first = item // parts * channels * positions + item % parts * chunk
        sums = scratch[:n]
        for c in range(channels):
            sums[:] = 0
            for other in range(max(0, c - size // 2), min(channels, c + size // 2 + 1)):
                row = x[first + other * positions : first + other * positions + n]
                for j in range(n):
                    sums[j] += row[j] * row[j]
            at = first + c * positions
            kept = scale[at : at + n]
            for j in range(n):
                sums[j] = t(k) + t(alpha / size) * sums[j]
            raise_to(sums, beta, x[at : at + n], y[at : at + n])
            if keep:
                for j in range(n):
                    kept[j] = sums[j]


@kernel
def across_backward(start, stop, scratch, x, y, scale, dy, dx, channels, positions, chunk, size, alpha, beta):
    """Items [start, stop); scratch has dy * y / scale of all channels, and a row for sums."""
    parts = (positions + chunk - 1) // chunk
    factor = x.dtype.type(2 * alpha * beta / size)
    for item in range(start, stop):
        n = min(chunk, positions - item % parts * chunk)
        first = item // parts * channels * positions + item % parts * chunk
        for c in range(channels):
            at = first + c * positions
            ratios, dys, ys, scales = scratch[c * n : c * n + n], dy[at : at + n], y[at : at + n], scale[at : at + n]
            for j in range(n):
                ratios[j] = dys[j] * ys[j] / scales[j]
        sums = scratch[channels * n : channels * n + n]
        for c in range(channels):
            sums[:] = 0
            for other in range(max(0, c - size // 2), min(channels, c + size // 2 + 1)):
                ratios = scratch[other * n : other * n + n]
                for j in range(n):
                    sums[j] += ratios[j]
            at = first + c * positions
            xs, dxs = x[at : at + n], dx[at : at + n]
            raise_to(scale[at : at + n], beta, dy[at : at + n], dxs)
            for j in range(n):
                dxs[j] -= factor * xs[j] * sums[j]


@part
def window(place, half, limit):
    """The part of a window that lies inside [0, limit), and its size clipped to the padding of `half` only."""
    return max(0, place - half), min(limit, place + half + 1), min(limit + half, place + half + 1) - (place - half)


@kernel
def within(start, stop, x, y, scale, keep, height, width, size, alpha, beta):
    """Planes [start, stop)."""
    half = size // 2
    for plane in range(start, stop):
        xs = x[plane * height * width : (plane + 1) * height * width]
        for i in range(height * width):
            h0, h1, tall = window(i // width, half, height)
            w0, w1, wide = window(i % width, half, width)
            total = 0.0
            for h in range(h0, h1):
                for w in range(w0, w1):
                    total += xs[h * width + w] * xs[h * width + w]
            value = 1 + alpha * total / (tall * wide)
            at = plane * height * width + i
            y[at] = xs[i] * value**-beta
            if keep:
                scale[at] = value


@kernel
def within_backward(start, stop, scratch, x, y, scale, dy, dx, height, width, size, alpha, beta):
    """Planes [start, stop); scratch has dy * y / (scale * window) of one."""
    half = size // 2
    for plane in range(start, stop):
        base = plane * height * width
        for i in range(height * width):
            _, _, tall = window(i // width, half, height)
            _, _, wide = window(i % width, half, width)
            scratch[i] = dy[base + i] * y[base + i] / (scale[base + i] * (tall * wide))
        for i in range(height * width):
            h0, h1, _ = window(i // width, half, height)
            w0, w1, _ = window(i % width, half, width)
            total = 0.0
            for h in range(h0, h1):
                for w in range(w0, w1):
                    total += scratch[h * width + w]
            dx[base + i] = dy[base + i] * scale[base + i] ** -beta - 2 * alpha * beta * x[base + i] * total
