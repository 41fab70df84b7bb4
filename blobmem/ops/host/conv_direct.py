"""Convolutions without a matrix product: depthwise ones, where there is none to win, and those of four axes and more.

All axes but the last are flattened to rows; a table says which source row each tap sees from each output row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from blobmem.ops.host.compiled import kernel, part, reducing_part
from blobmem.ops.host.parallel import parallel_for

Shape = tuple[int, ...]


@lru_cache(maxsize=256)
def rows_seen(source: Shape, out: Shape, taps: Shape, stride: Shape, pad: Shape, dilation: Shape) -> np.ndarray:
    """(output rows, rows of taps): the source row, -1 outside. The tuples are those of all axes but the last."""
    table = np.zeros((1, 1), np.int64)
    for x, y, k, s, p, d in zip(source, out, taps, stride, pad, dilation, strict=True):
        at = np.arange(y)[:, None] * s - p + np.arange(k)[None, :] * d
        at[(at < 0) | (at >= x)] = -1
        outer, inner = table[:, None, :, None], at[None, :, None, :]
        joined = np.where((outer < 0) | (inner < 0), -1, outer * x + inner)
        table = joined.reshape(table.shape[0] * y, table.shape[1] * k)
    return np.ascontiguousarray(table)


@part
def span(shift, stride, size, count):
    """Which of `count` places see inside a row of `size` at place * stride + shift."""
    low = (stride - 1 - shift) // stride if shift < 0 else 0
    high = (size - shift + stride - 1) // stride
    return min(low, count), max(min(low, count), min(high, count))


@reducing_part
def _dot(x, step, y):
    total = x.dtype.type(0)
    if step == 1:
        for j in range(y.size):
            total += x[j] * y[j]
    else:
        for j in range(y.size):
            total += x[j * step] * y[j]
    return total


@part
def _add_products(y, y_step, weight, x, x_step, count):
    """y[j * y_step] += weight * x[j * x_step]."""
    if y_step == 1 and x_step == 1:
        for j in range(count):
            y[j] += weight * x[j]
    else:
        for j in range(count):
            y[j * y_step] += weight * x[j * x_step]


@kernel
def _forward(start, stop, x, w, b, with_bias, y, groups, channels, outs, table, x_plane, taps, s, p, d, x_size, y_size):
    """Output planes [start, stop) of (images * groups * outs)."""
    rows, tap_rows = table.shape
    for item in range(start, stop):
        m = item % (groups * outs)
        first = item // outs * channels
        y0 = item * rows * y_size
        value = b[m] if with_bias else 0.0
        for j in range(y0, y0 + rows * y_size):
            y[j] = value
        for c in range(channels):
            w0 = (m * channels + c) * tap_rows * taps
            for r in range(rows):
                for t in range(tap_rows):
                    if table[r, t] < 0:
                        continue
                    to, at = y0 + r * y_size, (first + c) * x_plane + table[r, t] * x_size - p
                    for tx in range(taps):
                        low, high = span(tx * d - p, s, x_size, y_size)
                        weight = w[w0 + t * taps + tx]
                        if high > low:
                            _add_products(y[to + low :], 1, weight, x[at + tx * d + low * s :], s, high - low)


@kernel
def _backward_data(start, stop, dy, w, b, with_bias, dx, groups, channels, outs, table, x_plane, taps, s, p, d, x_size,
                   y_size):  # fmt: skip
    """Source planes [start, stop) of (images * groups * channels)."""
    rows, tap_rows = table.shape
    for item in range(start, stop):
        x0 = item * x_plane
        value = b[item % (groups * channels)] if with_bias else 0.0
        for j in range(x0, x0 + x_plane):
            dx[j] = value
        for o in range(outs):
            plane = item // channels * outs + o
            w0 = (plane % (groups * outs) * channels + item % channels) * tap_rows * taps
            for r in range(rows):
                for t in range(tap_rows):
                    if table[r, t] < 0:
                        continue
                    to, at = x0 + table[r, t] * x_size - p, (plane * rows + r) * y_size
                    for tx in range(taps):
                        low, high = span(tx * d - p, s, x_size, y_size)
                        weight = w[w0 + t * taps + tx]
                        if high > low:
                            _add_products(dx[to + tx * d + low * s :], s, weight, dy[at + low :], 1, high - low)


@kernel
def _backward_weights(start, stop, x, dy, dw, accumulate, images, groups, channels, outs, table, x_plane, taps, s, p, d,
                      x_size, y_size):  # fmt: skip
    """Kernels [start, stop) of (groups * outs * channels), summed over images and positions."""
    rows, tap_rows = table.shape
    for item in range(start, stop):
        m, c = item // channels, item % channels
        w0 = item * tap_rows * taps
        for t in range(tap_rows):
            for tx in range(taps):
                low, high = span(tx * d - p, s, x_size, y_size)
                total = 0.0
                for i in range(images):
                    plane = (i * groups * outs + m) * rows
                    x0 = ((i * groups + m // outs) * channels + c) * x_plane + tx * d - p
                    for r in range(rows):
                        if table[r, t] >= 0 and high > low:
                            at, to = x0 + table[r, t] * x_size + low * s, (plane + r) * y_size
                            total += _dot(x[at:], s, dy[to + low : to + high])
                old = dw[w0 + t * taps + tx] if accumulate else x.dtype.type(0)
                dw[w0 + t * taps + tx] = old + x.dtype.type(total)


def shape_of(x: np.ndarray, w: np.ndarray, y: np.ndarray, stride: Shape, pad: Shape, dilation: Shape,
              group: int) -> tuple:  # fmt: skip
    """What the kernels take after the arrays, for the convolution x -> y."""
    table = rows_seen(x.shape[2:-1], y.shape[2:-1], w.shape[2:-1], stride[:-1], pad[:-1], dilation[:-1])
    return (group, x.shape[1] // group, y.shape[1] // group, table, math.prod(x.shape[2:]), w.shape[-1], stride[-1],
            pad[-1], dilation[-1], x.shape[-1], y.shape[-1])  # fmt: skip


def direct_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, y: np.ndarray, *, stride: Shape, pad: Shape,
                   dilation: Shape, group: int) -> None:  # fmt: skip
    """As `conv.conv_forward`."""
    shape = shape_of(x, w, y, stride, pad, dilation, group)
    parallel_for(_forward, y.shape[0] * y.shape[1], x.reshape(-1), w.reshape(-1), w.reshape(-1) if b is None else b,
                 b is not None, y.reshape(-1), *shape)  # fmt: skip


def direct_backward_data(dy: np.ndarray, w: np.ndarray, b: np.ndarray | None, dx: np.ndarray, *, stride: Shape,
                         pad: Shape, dilation: Shape, group: int) -> None:  # fmt: skip
    """As `conv.conv_backward_data`; with `b`, as `conv.deconv_forward`."""
    shape = shape_of(dx, w, dy, stride, pad, dilation, group)
    parallel_for(_backward_data, dx.shape[0] * dx.shape[1], dy.reshape(-1), w.reshape(-1),
                 w.reshape(-1) if b is None else b, b is not None, dx.reshape(-1), *shape)  # fmt: skip


def direct_backward_weights(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *, stride: Shape, pad: Shape,
                            dilation: Shape, group: int, accumulate: bool) -> None:  # fmt: skip
    """As `conv.conv_backward_weights`."""
    shape = shape_of(x, dw, dy, stride, pad, dilation, group)
    parallel_for(_backward_weights, dw.shape[0] * dw.shape[1], x.reshape(-1), dy.reshape(-1), dw.reshape(-1),
                 accumulate, x.shape[0], *shape)  # fmt: skip
