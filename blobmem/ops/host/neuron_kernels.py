"""Compiled: the neurons that NumPy would need temporaries for."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel, reducing_part
from blobmem.ops.host.philox import philox

DROP_BLOCKS = 64
"""Blocks of random words that `drop` draws at a time, into a scratch of 4 uint32 each."""


@kernel
def relu(start, stop, x, y, slope):
    """Elements [start, stop)."""
    xs, ys = x[start:stop], y[start:stop]
    if slope == 0:
        for i in range(xs.size):
            v = xs[i]
            ys[i] = 0 if v <= 0 else v  # not a number stays: a net that diverged must not look healthy
    else:
        for i in range(xs.size):
            v = xs[i]
            ys[i] = v if v > 0 else v * x.dtype.type(slope)


@kernel
def relu_gradient(start, stop, x, dy, dx, slope):
    """Elements [start, stop)."""
    xs, dys, dxs = x[start:stop], dy[start:stop], dx[start:stop]
    if slope == 0:
        for i in range(xs.size):
            d = dys[i]
            dxs[i] = d if xs[i] > 0 else 0
    else:
        for i in range(xs.size):
            d = dys[i]
            dxs[i] = d if xs[i] > 0 else d * x.dtype.type(slope)


@kernel
def drop(start, stop, scratch, x, y, mask, threshold, scale, key):
    """Blocks [start, stop) of four elements: those go whose 24 random bits are below `threshold` (uint32)."""
    for first in range(start, stop, DROP_BLOCKS):
        blocks = min(DROP_BLOCKS, stop - first)
        words = scratch[: 4 * blocks]
        for j in range(blocks):
            words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = philox(key, first + j)
        end = min(4 * (first + blocks), x.size)
        xs, ys, keep = x[4 * first : end], y[4 * first : end], mask[4 * first : end]
        for i in range(keep.size):
            keep[i] = words[i] >> np.uint32(8) >= threshold
        for i in range(keep.size):
            ys[i] = xs[i] * scale if keep[i] else 0


@kernel
def drop_backward(start, stop, dy, mask, dx, scale):
    """Elements [start, stop)."""
    dys, dxs, keep = dy[start:stop], dx[start:stop], mask[start:stop]
    for i in range(dys.size):
        dxs[i] = dys[i] * (scale * keep[i])


@kernel
def prelu(start, stop, x, slope, y, channels, inner):
    """Planes [start, stop) of `inner` elements."""
    for plane in range(start, stop):
        a = slope[plane % channels]
        xs, ys = x[plane * inner : (plane + 1) * inner], y[plane * inner : (plane + 1) * inner]
        for i in range(inner):
            v = xs[i]
            ys[i] = v if v > 0 else v * a


@kernel
def prelu_backward(start, stop, x, slope, dy, dx, channels, inner):
    """Planes [start, stop) of `inner` elements."""
    for plane in range(start, stop):
        a = slope[plane % channels]
        first, end = plane * inner, (plane + 1) * inner
        xs, dys, dxs = x[first:end], dy[first:end], dx[first:end]
        for i in range(inner):
            d = dys[i]
            dxs[i] = d if xs[i] > 0 else d * a


@reducing_part
def negative_products(x, dy):
    """The sum of x * dy where x is not positive."""
    total = x.dtype.type(0)
    for i in range(x.size):
        v = x[i]
        total += dy[i] * (v if v <= 0 else x.dtype.type(0))
    return total


@kernel
def prelu_slope(start, stop, x, dy, outer, channels, inner, dslope, accumulate):
    """Channels [start, stop)."""
    for c in range(start, stop):
        total = 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            total += negative_products(x[first : first + inner], dy[first : first + inner])
        dslope[c] = x.dtype.type(total) + (dslope[c] if accumulate else x.dtype.type(0))
