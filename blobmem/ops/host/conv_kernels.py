"""Compiled: the products of a convolution (see `conv_plan` for passes, blocks and steps)."""

from __future__ import annotations

from blobmem.ops.host.columns import copy_taps, look
from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.conv_plan import (
    BLOCK_IMAGES,
    BLOCKS_PER_IMAGE,
    COLUMNS,
    DIRECT,
    GROUPS,
    IMAGES,
    OUT_AT,
    OUT_CHANNEL,
    OUT_CHANNELS,
    OUT_IMAGE,
    POSITIONS,
    STEPS,
    STEPS_AT_ONCE,
)
from blobmem.ops.host.products import multiply_block, pack_rows, run_tile, transpose_rows
from blobmem.ops.host.tile import ADD, PANEL_VECTORS, ROWS, SET, SET_WITH_ROWS, lanes


@kernel
def columns_product(start, stop, scratch, source, a, a_group, a_tile, ar, ak, bias, with_bias, out, rows_at_once, g,
                    blocks, out_at, step_at, pieces, first_piece, band_rows):  # fmt: skip
    """Items [start, stop) of a pass: `rows_at_once` (whole tiles) outputs of one group of one block, over all steps.

    A group's A begins `a_group` elements after the one before.
    """
    at_once, total = g[STEPS_AT_ONCE], g[STEPS]
    panel = PANEL_VECTORS * lanes(source)
    panels = (g[COLUMNS] + panel - 1) // panel
    rest = panels * panel * at_once + lanes(source)
    band = rest + ROWS * (at_once + panel + 1)
    window = source if g[DIRECT] else scratch
    parts = (g[OUT_CHANNELS] + rows_at_once - 1) // rows_at_once
    for item in range(start, stop):
        first = item % parts * rows_at_once
        rows = min(rows_at_once, g[OUT_CHANNELS] - first)
        left = rows % ROWS
        group = item // parts % g[GROUPS]
        block = item // parts // g[GROUPS]
        i0 = block // g[BLOCKS_PER_IMAGE] * g[BLOCK_IMAGES]
        block %= g[BLOCKS_PER_IMAGE]
        images = min(g[BLOCK_IMAGES], g[IMAGES] - i0)
        columns = images * blocks[block, POSITIONS]
        channel = group * g[OUT_CHANNELS] + first
        base = i0 * g[OUT_IMAGE] + channel * g[OUT_CHANNEL] + blocks[block, OUT_AT]
        mode = SET_WITH_ROWS if with_bias else SET
        for k0 in range(0, total, at_once):
            n = min(at_once, total - k0)
            begin = look(source, g, blocks, block, group, i0, images, k0, k0 + n, band_rows, scratch, band)
            for p in range((columns + panel - 1) // panel):
                copy_taps(window, begin, step_at, k0, n, pieces, first_piece[p], first_piece[p + 1],
                          columns - p * panel, scratch, p * panel * n, panel)  # fmt: skip
            ao = group * a_group + first // ROWS * a_tile + k0 * ak
            if left:
                pack_rows(a, ao + rows // ROWS * a_tile, ar, ak, left, n, scratch, rest)
                for r in range(left):
                    scratch[rest + n * ROWS + r] = bias[channel + rows - left + r] if with_bias else 0.0
            multiply_block(a, ao, a_tile, ar, ak, scratch, rest, rows, scratch, n * panel, n, columns, out, base,
                           g[OUT_CHANNEL], out_at, mode, bias, channel)  # fmt: skip
            mode = ADD


@kernel
def pack_weights(start, stop, w, w_group, w_row, w_channel, tap_index, rows, channels, to):
    """Items [start, stop), tiles of all groups: weights as packed panels of A, steps in the order of `tap_index`."""
    taps = tap_index.size
    tiles = (rows + ROWS - 1) // ROWS
    for item in range(start, stop):
        first = item % tiles * ROWS
        base = item // tiles * w_group + first * w_row
        at = item * channels * taps * ROWS
        for c in range(channels):
            for t in range(taps):
                for r in range(ROWS):
                    inside = first + r < rows
                    to[at + r] = w[base + r * w_row + c * w_channel + tap_index[t]] if inside else 0.0
                at += ROWS


@kernel
def fill_channels(start, stop, y, positions, channels, values, with_values):
    """Planes [start, stop) of (images * channels, positions): one value per channel, or zero."""
    for i in range(start, stop):
        y[i * positions : (i + 1) * positions] = values[i % channels] if with_values else 0.0


@part
def turn_columns(dy, base, out_at, columns, row, rows, to, panel):
    """to[j, r] = dy[r, out_at[j]] for one panel of rows; columns that lie together are moved together."""
    full = (rows + lanes(dy) - 1) // lanes(dy) * lanes(dy)
    j = 0
    while j < columns:
        n = 1
        while j + n < columns and out_at[j + n] == out_at[j] + n:
            n += 1
        transpose_rows(dy, base + out_at[j], row, rows, n, to, j * panel, panel, full)
        j += n


@kernel
def weights_product(start, stop, scratch, source, dy, dw, accumulate, rows_at_once, g, blocks, out_at, step_at, pieces,
                    band_rows):  # fmt: skip
    """Items [start, stop) of the gradient for the weights: some steps of `rows_at_once` outputs of a group each.

    The transposed gradient, a row per step, is summed in scratch, block by block.
    """
    chunk, rows, total = g[STEPS_AT_ONCE], g[OUT_CHANNELS], g[STEPS]
    width = lanes(source)
    panel = PANEL_VECTORS * width
    pitch = (g[COLUMNS] + width - 1) // width * width + width
    chunk_rows = (chunk + ROWS - 1) // ROWS * ROWS
    wide = (rows_at_once + width - 1) // width * width
    seen = g[COLUMNS] * panel
    sums = seen + chunk_rows * pitch + width
    band = sums + chunk_rows * wide
    window = source if g[DIRECT] else scratch
    k_parts, row_parts = (total + chunk - 1) // chunk, (rows + rows_at_once - 1) // rows_at_once
    count = (g[IMAGES] + g[BLOCK_IMAGES] - 1) // g[BLOCK_IMAGES] * g[BLOCKS_PER_IMAGE]
    for item in range(start, stop):
        k0 = item % k_parts * chunk
        first = item // k_parts % row_parts * rows_at_once
        group = item // k_parts // row_parts
        n, here = min(chunk, total - k0), min(rows_at_once, rows - first)
        channel = group * rows + first
        for i in range(n * pitch, chunk_rows * pitch):
            scratch[seen + i] = 0
        for b in range(count):
            block, i0 = b % g[BLOCKS_PER_IMAGE], b // g[BLOCKS_PER_IMAGE] * g[BLOCK_IMAGES]
            images = min(g[BLOCK_IMAGES], g[IMAGES] - i0)
            columns = images * blocks[block, POSITIONS]
            begin = look(source, g, blocks, block, group, i0, images, k0, k0 + n, band_rows, scratch, band)
            copy_taps(window, begin, step_at, k0, n, pieces, k0 * 0, pieces.shape[1], columns, scratch, seen, pitch)
            base = i0 * g[OUT_IMAGE] + channel * g[OUT_CHANNEL] + blocks[block, OUT_AT]
            for r0 in range(0, here, panel):
                some = min(panel, here - r0)
                turn_columns(dy, base + r0 * g[OUT_CHANNEL], out_at, columns, g[OUT_CHANNEL], some, scratch, panel)
                for t in range(0, n, ROWS):
                    run_tile((some + width - 1) // width, scratch, seen + t * pitch, pitch, k0 * 0 + 1, scratch, k0 * 0,
                             panel, scratch, sums + t * wide + r0, wide, columns, ADD if b else SET, scratch,
                             k0 * 0)  # fmt: skip
        for r in range(here):
            to = (channel + r) * total + k0
            for k in range(n):
                value = scratch[sums + k * wide + r]
                dw[to + k] = dw[to + k] + value if accumulate else value
