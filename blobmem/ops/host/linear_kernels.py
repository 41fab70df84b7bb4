"""Compiled: the three products of an inner product, each in the order in which its large array lies in memory.

Every output is one thread's; sums are taken in blocks of steps that depend on the shapes alone.
"""

from __future__ import annotations

from blobmem.ops.host.channels import dot_of
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.products import multiply_block, pack_rows, run_tile, transpose_rows
from blobmem.ops.host.tile import ADD, PANEL_VECTORS, ROWS, SET, copy_vector, lanes


@kernel
def rows_with_rows(start, stop, scratch, a, x, bias, with_bias, out, rows, count, steps, rows_at_once, count_at_once,
                   steps_at_once):  # fmt: skip
    """out[j, i] = bias[i] + sum over k of a[i, k] * x[j, k]; a (rows, steps) is the large one, x (count, steps).

    Items [start, stop) are `rows_at_once` rows of a each.
    """
    width = lanes(a)
    panel = PANEL_VECTORS * width
    one = start * 0 + 1
    wide = (count_at_once + width - 1) // width * width
    sums = (count_at_once + panel - 1) // panel * panel * steps_at_once
    rest = sums + (rows_at_once + ROWS) * wide
    for item in range(start, stop):
        first = item * rows_at_once
        here = min(rows_at_once, rows - first)
        left = here % ROWS
        for j0 in range(0, count, count_at_once):
            columns = min(count_at_once, count - j0)
            for k0 in range(0, steps, steps_at_once):
                n = min(steps_at_once, steps - k0)
                mode = ADD if k0 else SET
                for p in range(0, columns, panel):
                    some = min(panel, columns - p)
                    full = (some + width - 1) // width
                    transpose_rows(x, (j0 + p) * steps + k0, steps, some, n, scratch, p * n, panel, full * width)
                if left:
                    pack_rows(a, (first + here - left) * steps + k0, steps, one, left, n, scratch, rest)
                for r in range(0, here, ROWS):
                    for p in range(0, columns, panel):
                        full = (min(panel, columns - p) + width - 1) // width
                        to = sums + r * wide + p
                        if r + ROWS <= here:
                            run_tile(full, a, (first + r) * steps + k0, steps, one, scratch, p * n, panel, scratch, to,
                                     wide, n, mode, scratch, rest)  # fmt: skip
                        else:
                            run_tile(full, scratch, rest, one, one * ROWS, scratch, p * n, panel, scratch, to, wide, n,
                                     mode, scratch, rest)  # fmt: skip
            for j in range(columns):
                for r in range(here):
                    value = scratch[sums + r * wide + j]
                    out[(j0 + j) * rows + first + r] = value + bias[first + r] if with_bias else value


@kernel
def rows_times_matrix(start, stop, scratch, a, b, out, rows, steps, columns, a_row, a_step, at, accumulate,
                      rows_at_once, columns_at_once, steps_at_once):  # fmt: skip
    """out[i, j] (+)= sum over k of A[i, k] * b[k, j]; b (steps, columns) and out (rows, columns) lie row by row.

    Items [start, stop) are blocks of `rows_at_once` times `columns_at_once` outputs. A is packed, read at any strides;
    `at` counts from 0.
    """
    width = lanes(a)
    panel = PANEL_VECTORS * width
    packed = (columns_at_once + panel - 1) // panel * panel * steps_at_once + width
    rest = packed + (rows_at_once // ROWS + 1) * ROWS * steps_at_once
    parts = (columns + columns_at_once - 1) // columns_at_once
    for item in range(start, stop):
        j0, first = item % parts * columns_at_once, item // parts * rows_at_once
        count, here = min(columns_at_once, columns - j0), min(rows_at_once, rows - first)
        for k0 in range(0, steps, steps_at_once):
            n = min(steps_at_once, steps - k0)
            for p in range(0, count, panel):
                some = min(panel, count - p)
                for k in range(n):
                    source, to = (k0 + k) * columns + j0 + p, p * n + k * panel
                    if source + panel <= b.size:
                        for v in range(0, some, width):
                            copy_vector(scratch, to + v, b, source + v)
                    else:
                        for v in range(some):
                            scratch[to + v] = b[source + v]
            for r in range(0, here, ROWS):
                to = packed + r * n if r + ROWS <= here else rest
                pack_rows(a, (first + r) * a_row + k0 * a_step, a_row, a_step, min(ROWS, here - r), n, scratch, to)
            multiply_block(scratch, packed, ROWS * n, start * 0 + 1, start * 0 + ROWS, scratch, rest, here, scratch,
                           n * panel, n, count, out, first * columns + j0, columns, at,
                           ADD if accumulate or k0 else SET, scratch, start * 0)  # fmt: skip


@kernel
def sum_rows(start, stop, scratch, x, rows, columns, columns_at_once, total, accumulate):
    """total[j] (+)= the sum over i of x[i, j], in double precision; items are `columns_at_once` columns each."""
    for item in range(start, stop):
        j0 = item * columns_at_once
        sums = scratch[: min(columns_at_once, columns - j0)]
        for j in range(sums.size):
            sums[j] = 0
        for i in range(rows):
            row = x[i * columns + j0 : i * columns + j0 + sums.size]
            for j in range(sums.size):
                sums[j] += row[j]
        for j in range(sums.size):
            total[j0 + j] = x.dtype.type(sums[j]) + (total[j0 + j] if accumulate else x.dtype.type(0))


@kernel
def spread_row(start, stop, y, row):
    """y[i] = row for rows [start, stop)."""
    for i in range(start, stop):
        for j in range(row.size):
            y[i * row.size + j] = row[j]


@kernel
def few_rows_with_rows(start, stop, a, x, bias, with_bias, out, rows, count, steps):
    """`rows_with_rows` for a few rows of x: rows [start, stop) of a, each read once."""
    for i in range(start, stop):
        row = a[i * steps : (i + 1) * steps]
        for j in range(count):
            value = dot_of(row, x[j * steps : (j + 1) * steps])
            out[j * rows + i] = value + bias[i] if with_bias else value
