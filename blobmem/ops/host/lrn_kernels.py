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


@part
def shares_of(scales, beta, x, dy, ratios, leads):
    """ratios = dy * y / scales, y being x * scales ** -beta as `raise_to` has it, and leads = dy * scales ** -beta.

    leads may be dy.
    """
    if beta == 0.75:
        for j in range(scales.size):
            root = math.sqrt(scales[j])
            root *= math.sqrt(root)
            ratios[j] = dy[j] * (x[j] / root) / scales[j]
            leads[j] = dy[j] / root
    else:
        for j in range(scales.size):
            power = scales[j] ** x.dtype.type(-beta)
            ratios[j] = dy[j] * (x[j] * power) / scales[j]
            leads[j] = dy[j] * power


@part
def scales_of(x, c, channels, positions, size, alpha, k, scales):
    """scales = k + alpha / size * the sum of x ** 2 over `size` channels around c, at the first scales.size places."""
    t = x.dtype.type
    n = scales.size
    scales[:] = 0
    for other in range(max(0, c - size // 2), min(channels, c + size // 2 + 1)):
        row = x[other * positions : other * positions + n]
        for j in range(n):
            scales[j] += row[j] * row[j]
    for j in range(n):
        scales[j] = t(k) + t(alpha / size) * scales[j]


@kernel
def across(start, stop, scratch, x, y, channels, positions, chunk, size, alpha, beta, k):
    """Items [start, stop); scratch has a row of scales."""
    parts = (positions + chunk - 1) // chunk
    for item in range(start, stop):
        n = min(chunk, positions - item % parts * chunk)
        first = item // parts * channels * positions + item % parts * chunk
        scales = scratch[:n]
        for c in range(channels):
            at = first + c * positions
            scales_of(x[first:], c, channels, positions, size, alpha, k, scales)
            raise_to(scales, beta, x[at : at + n], y[at : at + n])


@kernel
def across_backward(start, stop, scratch, x, dy, dx, channels, positions, chunk, size, alpha, beta, k):
    """Items [start, stop); scratch has dy * y / scale of all channels, and a row for scales, then for sums."""
    parts = (positions + chunk - 1) // chunk
    factor = x.dtype.type(2 * alpha * beta / size)
    for item in range(start, stop):
        n = min(chunk, positions - item % parts * chunk)
        first = item // parts * channels * positions + item % parts * chunk
        sums = scratch[channels * n : channels * n + n]
        for c in range(channels):
            at = first + c * positions
            scales_of(x[first:], c, channels, positions, size, alpha, k, sums)
            ratios = scratch[c * n : c * n + n]
            shares_of(sums, beta, x[at : at + n], dy[at : at + n], ratios, dx[at : at + n])
        for c in range(channels):
            sums[:] = 0
            for other in range(max(0, c - size // 2), min(channels, c + size // 2 + 1)):
                ratios = scratch[other * n : other * n + n]
                for j in range(n):
                    sums[j] += ratios[j]
            at = first + c * positions
            xs, dxs = x[at : at + n], dx[at : at + n]
            for j in range(n):
                dxs[j] -= factor * xs[j] * sums[j]


@part
def window(place, half, limit):
    """The part of a window that lies inside [0, limit), and its size clipped to the padding of `half` only."""
    return max(0, place - half), min(limit, place + half + 1), min(limit + half, place + half + 1) - (place - half)


@part
def sum_around(values, squared, row, height, width, half, sums):
    """sums = the sums of values, or of their squares, over the windows around the elements of a row of a plane."""
    sums[:] = 0
    for h in range(max(0, row - half), min(height, row + half + 1)):
        for along in range(-min(half, width - 1), min(half, width - 1) + 1):
            first, n = max(0, -along), width - abs(along)
            to, of = sums[first : first + n], values[h * width + first + along :]
            if squared:
                for i in range(n):
                    to[i] += of[i] * of[i]
            else:
                for i in range(n):
                    to[i] += of[i]


@part
def scales_within(x, row, height, width, half, alpha, scales):
    """scales = 1 + alpha * the mean of x ** 2 over the windows around the elements of a row of a plane."""
    sum_around(x, True, row, height, width, half, scales)
    _, _, tall = window(row, half, height)
    for i in range(width):
        _, _, wide = window(i, half, width)
        scales[i] = 1 + alpha * scales[i] / (tall * wide)


@kernel
def within(start, stop, scratch, x, y, height, width, size, alpha, beta):
    """Planes [start, stop); scratch has a row, in double precision."""
    scales = scratch[:width]
    for row in range(start * height, stop * height):
        plane = x[row // height * height * width : (row // height + 1) * height * width]
        scales_within(plane, row % height, height, width, size // 2, alpha, scales)
        for i in range(width):
            y[row * width + i] = x[row * width + i] * scales[i] ** -beta


@kernel
def within_backward(start, stop, scratch, x, y, dy, dx, height, width, size, alpha, beta):
    """Planes [start, stop).

    Scratch, in double precision, has a row, and of a plane, rounded as x is, scales and dy * y / (scale * window).
    """
    t, half, n = x.dtype.type, size // 2, height * width
    sums, scales, ratios = scratch[:width], scratch[width : width + n], scratch[width + n : width + 2 * n]
    for plane in range(start, stop):
        base = plane * n
        for row in range(height):
            scales_within(x[base : base + n], row, height, width, half, alpha, sums)
            _, _, tall = window(row, half, height)
            for i in range(width):
                _, _, wide = window(i, half, width)
                at, scale = row * width + i, t(sums[i])
                scales[at] = scale
                ratios[at] = t(dy[base + at] * y[base + at] / (scale * (tall * wide)))
        for row in range(height):
            sum_around(ratios, False, row, height, width, half, sums)
            for i in range(width):
                at = row * width + i
                lead = dy[base + at] * scales[at] ** -beta
                dx[base + at] = lead - 2 * alpha * beta * x[base + at] * sums[i]
