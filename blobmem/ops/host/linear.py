"""Inner products: y (M, N) from x (M, K) and weights w (N, K), or (K, N) with `transpose`.

No workspace. The products are our own (`products`), because a matrix library first copies the whole of w, which for the
batches that nets are trained with takes longer than the product.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.linear_kernels import few_rows_with_rows, rows_times_matrix, rows_with_rows, spread_row, sum_rows
from blobmem.ops.host.parallel import num_threads, parallel_for
from blobmem.ops.host.tile import ROWS, lanes_of, panel_of
from blobmem.ops.registry import op

_FEW = 4
_COUNT_AT_ONCE = 384
_STEPS_AT_ONCE = 256
_PANEL_ELEMENTS = 1 << 16
_BLOCK_ELEMENTS = 3 << 15
_COLUMNS_AT_ONCE = 3072
_AT = np.arange(_COLUMNS_AT_ONCE, dtype=np.int64)


def _rows_at_once(rows: int, most: int) -> int:
    """Few enough that every thread gets some; sums do not depend on it."""
    share = -(-rows // (2 * num_threads()))
    return min(most, max(ROWS, -(-share // ROWS) * ROWS))


def _dot_rows(a: np.ndarray, x: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> None:
    """out = x a^T + bias: a (rows, steps) large, x (count, steps), out (count, rows)."""
    (rows, steps), count = a.shape, x.shape[0]
    if count <= _FEW:
        flat = a.reshape(-1)
        parallel_for(few_rows_with_rows, rows, flat, x.reshape(-1), flat if bias is None else bias, bias is not None,
                     out.reshape(-1), rows, count, steps, grain=1 + 65536 // max(1, steps))  # fmt: skip
        return
    width, panel = lanes_of(a.itemsize), panel_of(a.itemsize)
    count_at_once = min(count, _COUNT_AT_ONCE)
    padded = -(-count_at_once // panel) * panel
    at_once = min(steps, max(_STEPS_AT_ONCE, _PANEL_ELEMENTS // padded))
    rows_at_once = _rows_at_once(rows, 256)
    wide = -(-count_at_once // width) * width
    elements = padded * at_once + (rows_at_once + ROWS) * wide + ROWS * (at_once + 1) + panel
    flat = a.reshape(-1)
    parallel_for(rows_with_rows, -(-rows // rows_at_once), flat, x.reshape(-1), flat if bias is None else bias,
                 bias is not None, out.reshape(-1), rows, count, steps, rows_at_once, count_at_once, at_once,
                 scratch_of=(elements, a.dtype))  # fmt: skip


def _multiply(a: np.ndarray, strides: tuple[int, int], b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    """out (+)= A b, A being read in `a` at strides (row, step)."""
    rows, columns = out.shape
    steps = b.shape[0]
    if steps == 0 and not accumulate:
        out.fill(0)
    if steps == 0 or out.size == 0:
        return
    panel = panel_of(a.itemsize)
    # few rows leave the time to reading b: longer stretches of its rows at a time come faster
    at_once = min(steps, _STEPS_AT_ONCE if rows > 64 else _STEPS_AT_ONCE // 2)
    columns_at_once = min(columns, _COLUMNS_AT_ONCE, _BLOCK_ELEMENTS // at_once)
    parts = -(-columns // columns_at_once)
    rows_at_once = _rows_at_once(rows * parts, 256) if parts < 2 * num_threads() else 256
    rows_at_once = min(rows_at_once, -(-rows // ROWS) * ROWS)
    elements = (-(-columns_at_once // panel) * panel + rows_at_once + 2 * ROWS) * at_once + ROWS * (panel + 1) + panel
    parallel_for(rows_times_matrix, parts * -(-rows // rows_at_once), a.reshape(-1), b.reshape(-1), out.reshape(-1),
                 rows, steps, columns, *strides, _AT, accumulate, rows_at_once, columns_at_once, at_once,
                 scratch_of=(elements, a.dtype))  # fmt: skip


@op
def inner_product_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, y: np.ndarray, *,
                          transpose: bool) -> None:  # fmt: skip
    """y = x w^T + b (x w + b with `transpose`); b (N,) or None."""
    if not transpose:
        _dot_rows(w, x, b, y)
        return
    if b is not None:
        parallel_for(spread_row, y.shape[0], y.reshape(-1), b, grain=64)
    _multiply(x, (x.shape[1], 1), w, y, b is not None)


@op
def inner_product_backward_data(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, transpose: bool,
                                add: bool = False) -> None:  # fmt: skip
    """dx = dy w (dy w^T with `transpose`, where nothing is added), added to it with `add`."""
    if transpose:
        _dot_rows(w, dy, None, dx)
    else:
        _multiply(dy, (dy.shape[1], 1), w, dx, add)


@op
def inner_product_backward_weights(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *, transpose: bool,
                                   accumulate: bool) -> None:  # fmt: skip
    """dw (+)= dy^T x (x^T dy with `transpose`)."""
    rows, other = (x, dy) if transpose else (dy, x)
    _multiply(rows, (1, rows.shape[1]), other, dw, accumulate)


@op
def inner_product_backward_bias(dy: np.ndarray, db: np.ndarray, *, accumulate: bool) -> None:
    """db (+)= dy summed over its rows."""
    rows, columns = dy.shape
    columns_at_once = 512
    parallel_for(sum_rows, -(-columns // columns_at_once), dy.reshape(-1), rows, columns, columns_at_once,
                 db.reshape(-1), accumulate, grain=1 + 65536 // (columns_at_once * max(1, rows)),
                 scratch_of=(columns_at_once, np.float64))  # fmt: skip
