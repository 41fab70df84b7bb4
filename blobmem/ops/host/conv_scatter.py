"""The gradient for a convolution's data the other way round: a product per image, added to where the taps saw.

The passes of `conv_plan` multiply with the zeros around the output gradient, and use only part of a tile where channels
are few. This way has neither loss, but an addition for each element of the product.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.conv_direct import Shape, shape_of, span
from blobmem.ops.host.parallel import num_threads, parallel_for
from blobmem.ops.host.products import copy_run, pack_rows, run_tile
from blobmem.ops.host.tile import ADD, PANEL_VECTORS, ROWS, SET, add_part, lanes, lanes_of, panel_of

_PRODUCT_ELEMENTS = 1 << 17
_STEPS_AT_ONCE = 256
_ADDITION = 48  # steps of a tile's row that take as long as adding one of its results


def cheaper(channels: int, outs: int, kernel: Shape, source: Shape, out: Shape, stride: Shape) -> bool:
    """Whether this takes less time than passes, per group, by counting steps of tiles' rows."""
    taps, positions = math.prod(kernel), math.prod(out)
    passes = outs * math.prod(source) * taps / math.prod(stride) * (-(-channels // ROWS) * ROWS + _ADDITION / 8)
    return channels * taps * positions * (outs + _ADDITION) < passes


@part
def _add_back(cols, at, pitch, kernels, tap_rows, taps, y0, count, table, dx, plane, x_plane, s, p, d, x_size, y_size):
    """dx += a block's product, the results of `kernels` steps (channel, tap) at `count` rows of outputs from y0."""
    width = lanes(dx)
    for k in range(kernels):
        tap = k % (tap_rows * taps)
        shift = tap % taps * d - p
        low, high = span(shift, s, x_size, y_size)
        base, source = plane + k // (tap_rows * taps) * x_plane + shift, at + k * pitch
        for row in table[y0 : y0 + count, tap // taps]:
            if row >= 0 and s == 1:
                for j in range(low, high, width):
                    add_part(dx, base + row * x_size + j, cols, source + j, high - j)
            elif row >= 0:
                for j in range(low, high):
                    dx[base + row * x_size + j * s] += cols[source + j]
            source += y_size


@kernel
def _scatter(start, stop, scratch, dy, w, bias, with_bias, dx, groups, channels, outs, table, x_plane, taps, s, p, d,
             x_size, y_size, channels_at_once, rows_at_once, steps_at_once):  # fmt: skip
    """Items [start, stop): some channels of one group of one image."""
    rows, tap_rows = table.shape
    kernel_size = tap_rows * taps
    width = lanes(dy)
    panel = PANEL_VECTORS * width
    panels = (rows_at_once * y_size + panel - 1) // panel
    pitch = panels * panel
    tile = pitch * steps_at_once
    cols = tile + ROWS * steps_at_once
    one = start * 0 + 1
    parts = (channels + channels_at_once - 1) // channels_at_once
    for item in range(start, stop):
        c0, group = item % parts * channels_at_once, item // parts
        plane = (group * channels + c0) * x_plane
        kernels = min(channels_at_once, channels - c0) * kernel_size
        for c in range(kernels // kernel_size):
            value = bias[group % groups * channels + c0 + c] if with_bias else 0.0
            dx[plane + c * x_plane : plane + (c + 1) * x_plane] = value
        for y0 in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - y0)
            columns = count * y_size
            for m0 in range(0, outs, steps_at_once):
                n = min(steps_at_once, outs - m0)
                for j in range(0, columns, panel):
                    for m in range(n):
                        copy_run(scratch, j * n + m * panel, dy, ((group * outs + m0 + m) * rows + y0) * y_size + j,
                                 min(panel, columns - j))  # fmt: skip
                first = ((group % groups * outs + m0) * channels + c0) * kernel_size
                left = kernels % ROWS
                pack_rows(w, first + kernels - left, one, channels * kernel_size, left, n, scratch, tile)
                mode = ADD if m0 else SET
                for k in range(0, kernels, ROWS):
                    for j in range(0, columns, panel):
                        full = (min(panel, columns - j) + width - 1) // width
                        if k + ROWS <= kernels:
                            run_tile(full, w, first + k, one, channels * kernel_size, scratch, j * n, panel, scratch,
                                     cols + k * pitch + j, pitch, n, mode, scratch, tile)  # fmt: skip
                        else:
                            run_tile(full, scratch, tile, one, one * ROWS, scratch, j * n, panel, scratch,
                                     cols + k * pitch + j, pitch, n, mode, scratch, tile)  # fmt: skip
            _add_back(scratch, cols, pitch, kernels, tap_rows, taps, y0, count, table, dx, plane, x_plane, s, p, d,
                      x_size, y_size)  # fmt: skip


def scatter_backward_data(dy: np.ndarray, w: np.ndarray, b: np.ndarray | None, dx: np.ndarray, *, stride: Shape,
                          pad: Shape, dilation: Shape, group: int) -> None:  # fmt: skip
    """As `conv.conv_backward_data`, with no workspace; with `b`, as `conv.deconv_forward`."""
    shape = shape_of(dx, w, dy, stride, pad, dilation, group)
    channels, outs = shape[1:3]
    rows, y_size, taps = math.prod(dy.shape[2:-1]), dy.shape[-1], math.prod(w.shape[2:])
    images = dx.shape[0] * group
    channels_at_once = max(1, min(channels, 256 // taps, -(-channels * images // (2 * num_threads()))))
    rows_at_once = max(1, min(rows, _PRODUCT_ELEMENTS // (256 * y_size)))
    steps = min(outs, _STEPS_AT_ONCE)
    panel = panel_of(dx.itemsize)
    pitch = -(-rows_at_once * y_size // panel) * panel
    elements = pitch * (steps + channels_at_once * taps + ROWS) + ROWS * steps + lanes_of(dx.itemsize)
    parallel_for(_scatter, images * -(-channels // channels_at_once), dy.reshape(-1), w.reshape(-1),
                 w.reshape(-1) if b is None else b, b is not None, dx.reshape(-1), *shape, channels_at_once,
                 rows_at_once, steps, scratch_of=(elements, dx.dtype))  # fmt: skip
