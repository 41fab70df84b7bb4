"""Compiled: pooling, planes [start, stop) of (images * channels); the operands end with x's and y's plane sizes."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.philox import philox, uniform_of
from blobmem.ops.host.pool_vectors import NOWHERE, put_places, raise_row, raise_windows
from blobmem.ops.host.products import copy_run
from blobmem.ops.host.tile import lanes

NO_PLACE = 255
"""In a mask in bytes, of a window with nothing in it."""


@part
def span(place, stride, pad, size, limit):
    """The part of a window that lies inside [0, limit)."""
    first = place * stride - pad
    return max(first, 0), min(first + size, limit)


@kernel
def largest(start, stop, x, y, mask, with_mask, kh, kw, sh, sw, ph, pw, height, width, rows, columns):
    """First down the windows' columns, a whole row of x at a time, then along what that leaves.

    `best` has the row with its padding, lower than any number, so that no window needs clipping. For a mask in
    bytes places are counted from the window's first row on, and from its first column on when they are put there.
    """
    near = mask.itemsize == 1
    pitch, shift, edge = (kw, sw, pw) if near else (width, 0, 0)
    within = min(columns, (width + pw + sw - 1) // sw)
    step = lanes(x)
    wide = max(width + pw, (columns - 1) * sw + kw) + 3 * step
    best, where = np.full(wide, -np.inf, x.dtype), np.full(wide, NOWHERE, np.int32)
    values, places = np.empty(columns + step, x.dtype), np.empty(columns + step, np.int32)
    for line in range(start * rows, stop * rows):
        plane, r = line // rows * height * width, line % rows
        h0, h1 = span(r, sh, ph, kh, height)
        top = r * sh - ph if near else 0
        for h in range(h0, h1):
            for j in range(0, width, step):
                place = (h - top) * pitch + j
                raise_row(best, where, pw + j, x, plane + h * width + j, min(step, width - j), place, h == h0)
        if sw <= 2:
            for w in range(kw):
                for c in range(0, columns, step):
                    raise_windows(values, places, c, best, where, c * sw + w, sw == 2, w == 0)
        else:
            for c in range(columns):
                values[c], places[c] = best[c * sw], where[c * sw]
                for w in range(c * sw + 1, c * sw + kw):
                    equal = best[w] == values[c] and where[w] < places[c]
                    if best[w] > values[c] or best[w] != best[w] or equal:
                        values[c], places[c] = best[w], where[w]
        for c in range(within if h1 > h0 else 0, columns):
            values[c], places[c] = 0, c * shift - edge - 1
        copy_run(y, line * columns, values, 0, columns)
        if with_mask:
            for c in range(0, columns, step):
                put_places(mask, line * columns + c, values, places, c, columns - c, c * shift - edge, shift)


@kernel
def scatter(start, stop, dy, mask, dx, fresh, height, width, rows, columns):
    """Each element of dy is added where its mask says, if it says so; to zeros if `fresh`."""
    for plane in range(start, stop):
        target = dx[plane * height * width : (plane + 1) * height * width]
        if fresh:
            target[:] = 0
        for i in range(plane * rows * columns, (plane + 1) * rows * columns):
            if mask[i] >= 0:
                target[mask[i]] += dy[i]


@kernel
def scatter_near(start, stop, dy, mask, dx, kh, kw, sh, sw, ph, pw, height, width, rows, columns):
    """`scatter` to zeros with a mask in bytes. Indices are unsigned, or each would be asked whether it is negative."""
    one, apart = np.uint64(1), np.uint64(sw)
    steps = np.empty(256, np.uint64)  # from the first element of a window, clipped or not, to each
    for place in range(kh * kw):
        steps[place] = place // kw * width + place % kw
    i = np.uint64(start * rows * columns)
    for plane in range(start, stop):
        target = dx[plane * height * width : (plane + 1) * height * width]
        target[:] = 0
        for r in range(rows):
            first = np.uint64((r * sh - ph) * width - pw)
            for _ in range(columns):
                if mask[i] != NO_PLACE:
                    target[first + steps[mask[i]]] += dy[i]
                first += apart
                i += one


@kernel
def average(start, stop, x, y, kh, kw, sh, sw, ph, pw, height, width, rows, columns):
    """First down the windows' columns, a whole row of x at a time, then along what that leaves."""
    sums = np.empty(width, x.dtype)
    for plane in range(start, stop):
        for r in range(rows):
            h0, h1 = span(r, sh, ph, kh, height)
            _, padded = span(r, sh, ph, kh, height + ph)
            tall = padded - (r * sh - ph)
            sums[:] = 0
            for h in range(h0, h1):
                line = x[(plane * height + h) * width : (plane * height + h + 1) * width]
                for j in range(width):
                    sums[j] += line[j]
            for c in range(columns):
                w0, w1 = span(c, sw, pw, kw, width)
                _, padded = span(c, sw, pw, kw, width + pw)
                total = x.dtype.type(0)
                for j in range(w0, w1):
                    total += sums[j]
                y[(plane * rows + r) * columns + c] = total / max(1, tall * (padded - (c * sw - pw)))


@kernel
def average_backward(start, stop, dy, dx, fresh, kh, kw, sh, sw, ph, pw, height, width, rows, columns):
    """The transpose of `average`, added to dx, or to zeros if `fresh`: along a row, then to all rows of the window."""
    sums = np.empty(width, dy.dtype)
    for plane in range(start, stop):
        target = dx[plane * height * width : (plane + 1) * height * width]
        if fresh:
            target[:] = 0
        for r in range(rows):
            h0, h1 = span(r, sh, ph, kh, height)
            _, padded = span(r, sh, ph, kh, height + ph)
            tall = padded - (r * sh - ph)
            sums[:] = 0
            for c in range(columns):
                w0, w1 = span(c, sw, pw, kw, width)
                _, padded = span(c, sw, pw, kw, width + pw)
                value = dy[(plane * rows + r) * columns + c] / max(1, tall * (padded - (c * sw - pw)))
                for j in range(w0, w1):
                    sums[j] += value
            for h in range(h0, h1):
                line = target[h * width : (h + 1) * width]
                for j in range(width):
                    line[j] += sums[j]


@kernel
def stochastic_train(start, stop, x, y, mask, with_mask, key, number, kh, kw, sh, sw, ph, pw, height, width, rows,
                     columns):  # fmt: skip
    """The first element at which the running sum reaches a random share of the whole.

    Each output takes one random number, the first output that of `number`.
    """
    for i in range(start * rows * columns, stop * rows * columns):
        plane, r, c = i // (rows * columns), i // columns % rows, i % columns
        h0, h1 = span(r, sh, ph, kh, height)
        w0, w1 = span(c, sw, pw, kw, width)
        total = 0.0
        for h in range(h0, h1):
            for w in range(w0, w1):
                total += x[(plane * height + h) * width + w]
        wanted = total * uniform_of(philox(key, (number + i) // 4)[(number + i) % 4])
        place, passed, found = h0 * width + w0, 0.0, False
        for h in range(h0, h1):
            for w in range(w0, w1):
                passed += x[(plane * height + h) * width + w]
                if not found and passed >= wanted:
                    place, found = h * width + w, True
        empty = h1 <= h0 or w1 <= w0
        y[i] = 0 if empty else x[plane * height * width + place]
        if with_mask:
            h, w = place // width, place % width
            near = (h - r * sh + ph) * kw + w - c * sw + pw
            mask[i] = -1 if empty else near if mask.itemsize == 1 else place


@kernel
def stochastic_test(start, stop, x, y, kh, kw, sh, sw, ph, pw, height, width, rows, columns):
    """The mean of a window's values, each weighted by itself; 0 where they sum to nothing."""
    for i in range(start * rows * columns, stop * rows * columns):
        plane, r, c = i // (rows * columns), i // columns % rows, i % columns
        h0, h1 = span(r, sh, ph, kh, height)
        w0, w1 = span(c, sw, pw, kw, width)
        total, squares = 0.0, 0.0
        for h in range(h0, h1):
            for w in range(w0, w1):
                value = x[(plane * height + h) * width + w]
                total += value
                squares += value * value
        y[i] = squares / total if total > 0 else 0.0
