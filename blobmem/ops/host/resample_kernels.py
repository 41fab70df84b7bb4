"""Compiled: planes in another size, planes [start, stop) of (images * channels).

The operands end with x's and y's plane sizes.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel, part


@part
def between(count, size, dtype):
    """Where `count` points lie among `size` with the same ends: the two beside each, and the share of the right one."""
    left, right, share = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, dtype)
    for i in range(count):
        at = i * (size - 1) / (count - 1) if count > 1 else 0.0
        left[i] = np.int64(at)
        right[i] = min(left[i] + 1, size - 1)
        share[i] = at - left[i]
    return left, right, share


@kernel
def interpolate(start, stop, x, y, crop, height, width, rows, columns):
    """Bilinear, corners on corners of the part of x that is left when `crop` is cut off (before, after)."""
    upper, lower, below = between(rows, height - crop[0] - crop[1], x.dtype)
    left, right, beside = between(columns, width - crop[0] - crop[1], x.dtype)
    one = x.dtype.type(1)
    for plane in range(start, stop):
        for r in range(rows):
            first = (plane * height + crop[0] + upper[r]) * width + crop[0]
            second = (plane * height + crop[0] + lower[r]) * width + crop[0]
            v = below[r]
            line = y[(plane * rows + r) * columns : (plane * rows + r + 1) * columns]
            for c in range(columns):
                u = beside[c]
                above = (one - u) * x[first + left[c]] + u * x[first + right[c]]
                under = (one - u) * x[second + left[c]] + u * x[second + right[c]]
                line[c] = (one - v) * above + v * under


@kernel
def add_interpolated(start, stop, dy, dx, crop, height, width, rows, columns):
    """The transpose of `interpolate`."""
    upper, lower, below = between(rows, height - crop[0] - crop[1], dy.dtype)
    left, right, beside = between(columns, width - crop[0] - crop[1], dy.dtype)
    one = dy.dtype.type(1)
    for plane in range(start, stop):
        target = dx[plane * height * width : (plane + 1) * height * width]
        target[:] = 0
        for r in range(rows):
            first, second = (crop[0] + upper[r]) * width + crop[0], (crop[0] + lower[r]) * width + crop[0]
            v = below[r]
            for c in range(columns):
                u = beside[c]
                value = dy[(plane * rows + r) * columns + c]
                target[first + left[c]] += (one - v) * (one - u) * value
                target[first + right[c]] += (one - v) * u * value
                target[second + left[c]] += v * (one - u) * value
                target[second + right[c]] += v * u * value


@kernel
def copy_nearest(start, stop, x, y, times, over, height, width, rows, columns):
    """y's row r is x's row r * times[0] // over[0]; columns likewise."""
    for plane in range(start, stop):
        for r in range(rows):
            line = (plane * height + r * times[0] // over[0]) * width
            for c in range(columns):
                y[(plane * rows + r) * columns + c] = x[line + c * times[1] // over[1]]


@kernel
def add_nearest(start, stop, dy, dx, times, over, height, width, rows, columns):
    """The transpose of `copy_nearest`."""
    for plane in range(start, stop):
        target = dx[plane * height * width : (plane + 1) * height * width]
        target[:] = 0
        for r in range(rows):
            line = r * times[0] // over[0] * width
            for c in range(columns):
                target[line + c * times[1] // over[1]] += dy[(plane * rows + r) * columns + c]


@kernel
def first_outside(mask, size):
    """The first index of what is neither a place in a plane of `size` elements nor -1; -1 if there is none."""
    for i in range(mask.size):
        if not -1 <= mask[i] < size:
            return i
    return -1


@kernel
def put(start, stop, x, mask, y, height, width, rows, columns):
    """Every element of x goes to its place in y; of several at one place the last stays, elsewhere y is 0."""
    for plane in range(start, stop):
        target = y[plane * rows * columns : (plane + 1) * rows * columns]
        target[:] = 0
        for i in range(plane * height * width, (plane + 1) * height * width):
            place = np.int64(mask[i])
            if place >= 0:
                target[place] = x[i]


@kernel
def take(start, stop, dy, mask, dx, height, width, rows, columns):
    """Every element of dx is what dy has at its place; 0 for one that has none."""
    for plane in range(start, stop):
        source = dy[plane * rows * columns : (plane + 1) * rows * columns]
        for i in range(plane * height * width, (plane + 1) * height * width):
            place = np.int64(mask[i])
            dx[i] = source[place] if place >= 0 else 0
