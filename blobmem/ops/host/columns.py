"""Compiled: what a convolution's taps see, copied to where a product can read it (see `conv_plan` for the words)."""

from __future__ import annotations

from blobmem.ops.host.compiled import part
from blobmem.ops.host.conv_plan import (
    BAND_ROW,
    BLOCK_IMAGES,
    CHANNELS,
    DIRECT,
    ROW_STRIDE,
    SOURCE_CHANNEL,
    SOURCE_IMAGE,
    TAPS,
    WINDOW_AT,
    WINDOW_CHANNEL,
)
from blobmem.ops.host.tile import copy_vector, lanes


@part
def fill_band(source, g, block, base, c0, c1, images, rows, band, to):
    """Copy a block's window of channels [c0, c1); `base` is the group's first channel in the first image.

    Whole vectors are copied where the source has them; what they write too much, the zeros and the next row overwrite.
    """
    width = lanes(band)
    size, stride = g[BAND_ROW], g[ROW_STRIDE]
    for c in range(c0, c1):
        for i in range(g[BLOCK_IMAGES]):
            plane = base + i * g[SOURCE_IMAGE] + c * g[SOURCE_CHANNEL]
            for r in range(rows.shape[1]):
                low, count, at = rows[block, r, 0], rows[block, r, 1], plane + rows[block, r, 2]
                if i >= images:
                    count = 0
                for j in range(to, to + low):
                    band[j] = 0
                if stride != 1:
                    for j in range(count):
                        band[to + low + j] = source[at + j * stride]
                elif at + count + width <= source.size:
                    for j in range(0, count, width):
                        copy_vector(band, to + low + j, source, at + j)
                else:
                    for j in range(count):
                        band[to + low + j] = source[at + j]
                for j in range(to + low + count, to + size):
                    band[j] = 0
                to += size


@part
def look(source, g, blocks, block, group, i0, images, k0, k1, rows, band, band_at):
    """Make ready what steps [k0, k1) see of a block; returns where their window begins, counting from channel 0."""
    base = i0 * g[SOURCE_IMAGE] + group * g[CHANNELS] * g[SOURCE_CHANNEL]
    if g[DIRECT]:
        return base + blocks[block, WINDOW_AT]
    c0 = k0 // g[TAPS]
    fill_band(source, g, block, base, c0, (k1 - 1) // g[TAPS] + 1, images, rows, band, band_at)
    return band_at - c0 * g[WINDOW_CHANNEL]


@part
def copy_taps(window, base, step_at, k0, steps, pieces, first, end, columns, to, to_offset, to_row):
    """to[k, j] = what step k0 + k sees of the first `columns` columns of a panel, its pieces being [first, end).

    Whole vectors are copied unless that could reach beyond the window; what they write too much, the next overwrites.
    """
    reach = 0
    for k in range(k0, k0 + steps):
        reach = max(reach, step_at[k])
    exact = base + reach + pieces[0, end - 1] + lanes(to) > window.size
    for k in range(steps):
        source, row = base + step_at[k0 + k], to_offset + k * to_row
        if exact:
            for p in range(first, end):
                for j in range(min(pieces[2, p], columns - pieces[1, p])):
                    to[row + pieces[1, p] + j] = window[source + pieces[0, p] + j]
        else:
            for p in range(first, end):
                copy_vector(to, row + pieces[1, p], window, source + pieces[0, p])
