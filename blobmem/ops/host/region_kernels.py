"""Compiled: the largest values of the cells of a grid over regions of planes."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part

_FAR = 2.0**30  # beyond any plane


@part
def rounded(value):
    """The nearest whole number, halves away from zero, as C rounds."""
    value = min(max(np.float64(value), -_FAR), _FAR)
    return np.int64(math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5))


@part
def cell(index, first, length, count, limit, like):
    """Cell `index` of `count` over a region of `length` from `first` on: where it begins and ends inside [0, limit).

    In the arrays' precision, since a rounding error may make the difference of a whole row.
    """
    size = like(length) / like(count)
    begin = np.int64(math.floor(like(index) * size)) + first
    end = np.int64(math.ceil(like(index + 1) * size)) + first
    return min(max(begin, 0), limit), min(max(end, 0), limit)


@kernel
def largest_of_cells(start, stop, x, regions, y, argmax, keep, scale):
    """Planes [start, stop) of (regions * channels)."""
    channels, height, width = x.shape[1:]
    rows, columns = y.shape[2:]
    like = x.dtype.type
    for i in range(start, stop):
        k, c = i // channels, i % channels
        plane = x[np.int64(regions[k, 0]), c]
        x0, y0 = rounded(regions[k, 1] * like(scale)), rounded(regions[k, 2] * like(scale))
        x1, y1 = rounded(regions[k, 3] * like(scale)), rounded(regions[k, 4] * like(scale))
        wide, tall = max(x1 - x0 + 1, 1), max(y1 - y0 + 1, 1)
        for r in range(rows):
            top, bottom = cell(r, y0, tall, rows, height, like)
            for q in range(columns):
                left, right = cell(q, x0, wide, columns, width, like)
                value, place = like(0), -1
                for h in range(top, bottom):
                    for w in range(left, right):
                        v = plane[h, w]
                        if place < 0 or v > value or v != v:
                            value, place = v, h * width + w
                y[k, c, r, q] = value
                if keep:
                    argmax[k, c, r, q] = place


@kernel
def add_to_largest(start, stop, dy, regions, argmax, dx):
    """Channels [start, stop): every element of dy is added where its maximum was found."""
    width = dx.shape[3]
    for c in range(start, stop):
        dx[:, c] = 0
        for k in range(dy.shape[0]):
            plane = dx[np.int64(regions[k, 0]), c]
            for r in range(dy.shape[2]):
                for q in range(dy.shape[3]):
                    place = argmax[k, c, r, q]
                    if place >= 0:
                        plane[place // width, place % width] += dy[k, c, r, q]
