"""Compiled: blocks of a matrix product, tile by tile."""

from __future__ import annotations

from blobmem.ops.host.compiled import part
from blobmem.ops.host.tile import (
    ADD,
    PANEL_VECTORS,
    ROWS,
    SET,
    copy_part,
    lanes,
    tile_1,
    tile_2,
    tile_3,
    transpose_vectors,
)


@part
def run_tile(vectors, a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so):
    """A tile of 1 to 3 vectors of columns; see `tile`."""
    if vectors == 3:
        tile_3(a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so)
    elif vectors == 2:
        tile_2(a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so)
    else:
        tile_1(a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so)


@part
def copy_run(to, to_offset, source, source_offset, count):
    """`count` elements from one flat array to another, in vectors; no element beyond them is touched."""
    width = lanes(to)
    for i in range(0, count, width):
        copy_part(to, to_offset + i, source, source_offset + i, count - i)


@part
def pack_rows(a, ao, ar, ak, rows, steps, to, to_offset):
    """Up to ROWS rows of A as a packed panel, to[k, r], filled up with zeros."""
    for k in range(steps):
        for r in range(ROWS):
            to[to_offset + k * ROWS + r] = a[ao + r * ar + k * ak] if r < rows else 0.0


@part
def transpose_rows(source, offset, row, rows, count, to, to_offset, to_row, full):
    """to[j, r] = source[r, j] for `count` columns j; lanes r from `rows` to `full` become zero.

    No element beyond the rows and columns is read.
    """
    width = lanes(source)
    whole_rows, whole = rows - rows % width, count - count % width
    for r in range(0, whole_rows, width):
        for j in range(0, whole, width):
            transpose_vectors(to, to_offset + j * to_row + r, to_row, source, offset + r * row + j, row)
    for r in range(full):
        for j in range(whole if r < whole_rows else 0, count):
            to[to_offset + j * to_row + r] = source[offset + r * row + j] if r < rows else 0.0


@part
def multiply_block(a, ao, a_tile, ar, ak, rest, rest_at, rows, b, b_panel, steps, columns, c, base, c_row, at, mode, s,
                   so):  # fmt: skip
    """C[r, at[j]] (+)= sum over k of A[r, k] * B[k, j] for all rows and one block of columns packed in panels.

    `a_tile` elements of A lie between tiles of rows, `b_panel` of B between panels. `rest`, from `rest_at`, is the last
    incomplete tile of A, packed, then its rows' values, then room for a tile of C: tiles whose columns do not lie
    together in C go through it. With few steps it is the writing that takes time, and goes row by row.
    """
    width = lanes(b)
    panel = PANEL_VECTORS * width
    values = rest_at + steps * ROWS
    spare = values + ROWS
    first = SET if mode == ADD else mode
    by_rows = steps < rows
    tiles, panels = (rows + ROWS - 1) // ROWS, (columns + panel - 1) // panel
    for i in range(tiles * panels):
        t, p = (i // panels, i % panels) if by_rows else (i % tiles, i // tiles)
        r0, j0, bo = t * ROWS, p * panel, p * b_panel
        n = min(panel, columns - j0)
        vectors = (n + width - 1) // width
        co = base + r0 * c_row
        if r0 + ROWS > rows:
            run_tile(vectors, rest, rest_at, i * 0 + 1, i * 0 + ROWS, b, bo, panel, rest, spare, panel, steps, first,
                     rest, values)  # fmt: skip
        elif n == vectors * width and at[j0 + n - 1] - at[j0] == n - 1:
            run_tile(vectors, a, ao + t * a_tile, ar, ak, b, bo, panel, c, co + at[j0], c_row, steps, mode, s, so + r0)
            continue
        else:
            run_tile(vectors, a, ao + t * a_tile, ar, ak, b, bo, panel, rest, spare, panel, steps, first, s, so + r0)
        for r in range(min(ROWS, rows - r0)):
            for j in range(n):
                value = rest[spare + r * panel + j]
                place = co + r * c_row + at[j0 + j]
                c[place] = c[place] + value if mode == ADD else value
