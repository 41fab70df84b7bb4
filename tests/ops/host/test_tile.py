"""The vector instructions that products are made of, one by one."""

import numpy as np
import pytest

from blobmem.ops.host import tile
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.products import copy_run, run_tile, transpose_rows
from blobmem.ops.host.tile import ROWS, add_part, copy_part, copy_vector, lanes_of, panel_of


@kernel
def one_tile(vectors, a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so):
    run_tile(vectors, a, ao, ar, ak, b, bo, bk, c, co, cr, steps, mode, s, so)


@kernel
def moves(which, to, to_offset, source, source_offset, count):
    if which == 0:
        copy_vector(to, to_offset, source, source_offset)
    elif which == 1:
        copy_part(to, to_offset, source, source_offset, count)
    elif which == 2:
        add_part(to, to_offset, source, source_offset, count)
    else:
        copy_run(to, to_offset, source, source_offset, count)


@kernel
def transpose(source, offset, row, rows, count, to, to_offset, to_row, full):
    transpose_rows(source, offset, row, rows, count, to, to_offset, to_row, full)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("mode", [tile.SET, tile.ADD, tile.SET_WITH_ROWS])
def test_tile(vectors, mode, packed, dtype, close):
    rng = np.random.default_rng(0)
    steps, columns, c_row = 13, vectors * lanes_of(np.dtype(dtype).itemsize), 100
    a, b = rng.standard_normal((ROWS, steps)).astype(dtype), rng.standard_normal((steps, columns + 5)).astype(dtype)
    c, s = rng.standard_normal((ROWS, c_row)).astype(dtype), rng.standard_normal(ROWS + 1).astype(dtype)
    expected = c.astype(float)
    start = {tile.SET: 0, tile.ADD: c[:, 3 : 3 + columns].astype(float), tile.SET_WITH_ROWS: s[1:, None].astype(float)}
    expected[:, 3 : 3 + columns] = a.astype(float) @ b[:, 5:].astype(float) + start[mode]
    strides = (1, ROWS) if packed else (steps, 1)
    flat = np.concatenate([[np.nan], (a.T if packed else a).reshape(-1)]).astype(dtype)
    one_tile(vectors, flat, 1, *strides, b.reshape(-1), 5, columns + 5, c.reshape(-1), 3, c_row, steps, mode, s, 1)
    close(c, expected)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["vector", "part", "sum", "run"])
@pytest.mark.parametrize("count", [0, 1, 5, 16, 40])
def test_moves_touch_what_they_should(which, count, dtype):
    width = lanes_of(np.dtype(dtype).itemsize)
    count = {0: width, 1: min(count, width), 2: min(count, width), 3: count}[which]
    source = np.arange(100, dtype=dtype)
    to = np.full(100, -1, dtype)
    moves(which, to, 7, source, 3, count)
    expected = np.full(100, -1, dtype)
    expected[7 : 7 + count] = source[3 : 3 + count] + (expected[7 : 7 + count] if which == 2 else 0)
    np.testing.assert_array_equal(to, expected)


@pytest.mark.parametrize("rows, count", [(1, 1), (8, 8), (16, 16), (20, 37), (48, 5), (17, 100)])
def test_transpose(rows, count, dtype):
    width = lanes_of(np.dtype(dtype).itemsize)
    full = -(-rows // width) * width
    source = np.arange(2 + rows * 110, dtype=dtype)
    to = np.full(3 + count * (full + 4), -1, dtype)
    transpose(source, 2, 110, rows, count, to, 3, full + 4, full)
    got = to[3:].reshape(count, full + 4)
    np.testing.assert_array_equal(got[:, :rows], source[2:].reshape(rows, 110)[:, :count].T)
    assert (got[:, rows:full] == 0).all() and (got[:, full:] == -1).all() and (to[:3] == -1).all()


def test_shapes():
    assert lanes_of(4) == 2 * lanes_of(8) and panel_of(4) == 3 * lanes_of(4) and ROWS in (4, 8)
