"""Items picked by their numbers, and their gradients added up again.

Items are rows (items, values). Indices are whole numbers, in an array of floats or integers.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import bad_index
from blobmem.ops.registry import op

_GRAIN = 32768


@kernel
def _judge(start, stop, index, items, bad):
    """bad[0] = the place of the first index that is no whole number from 0 to below `items`, or -1."""
    bad[0] = -1
    for i in range(index.size):
        value = index[i]
        if not (value >= 0 and value < items) or value != np.int64(value):
            bad[0] = i
            return


def check_indices(index: np.ndarray, items: int, layer: str) -> None:
    """Raise NetError naming the layer for the first index that is not one of an item."""
    bad = np.empty(1, np.int64)
    parallel_for(_judge, 1, index.reshape(-1), items, bad)
    place = int(bad[0])
    if place >= 0:
        raise bad_index(layer, items, place, float(index.reshape(-1)[place]))


@kernel
def _gather(start, stop, x, index, bias, with_bias, y, size):
    """Rows [start, stop) of y."""
    for n in range(start, stop):
        first = np.int64(index[n]) * size
        xs, ys = x[first : first + size], y[n * size : (n + 1) * size]
        for i in range(size):
            ys[i] = xs[i]
        if with_bias:
            for i in range(size):
                ys[i] += bias[i]


@op
def gather_forward(x: np.ndarray, index: np.ndarray, bias: np.ndarray | None, y: np.ndarray, *, layer: str) -> None:
    """y[n] = x[index[n]] + bias; x (items, values), index (n,), bias (values,) or None, y (n, values).

    Raises NetError naming `layer` for an index that is not one of an item, before anything is written.
    """
    check_indices(index, x.shape[0], layer)
    flat, size = x.reshape(-1), x.shape[1]
    added = flat if bias is None else bias
    parallel_for(_gather, index.size, flat, index, added, bias is not None, y.reshape(-1), size,
                 grain=1 + _GRAIN // max(1, size))  # fmt: skip


@kernel
def _scatter(start, stop, dy, index, dx, size, accumulate):
    """Rows [start, stop) of dx: each goes through all indices, so that no two threads write one row."""
    if not accumulate:
        dx[start * size : stop * size] = 0
    for n in range(index.size):
        item = np.int64(index[n])
        if start <= item < stop:
            dys, dxs = dy[n * size : (n + 1) * size], dx[item * size : (item + 1) * size]
            for i in range(size):
                dxs[i] += dys[i]


@op
def gather_backward(dy: np.ndarray, index: np.ndarray, dx: np.ndarray, *, accumulate: bool, layer: str) -> None:
    """dx[i] (+)= the sum of dy[n] over the n with index[n] = i. Raises as `gather_forward` does."""
    check_indices(index, dx.shape[0], layer)
    size = dx.shape[1]
    parallel_for(_scatter, dx.shape[0], dy.reshape(-1), index, dx.reshape(-1), size, accumulate,
                 grain=1 + _GRAIN // max(1, size))  # fmt: skip


@kernel
def _nonzero(start, stop, x, indices):
    """All of it; the indices' end, were there fewer than there is room for, becomes 0."""
    count = 0
    for i in range(x.size):
        if x[i] != 0 and count < indices.size:
            indices[count] = i
            count += 1
    indices[count:] = 0


@op
def nonzero_indices(x: np.ndarray, indices: np.ndarray) -> None:
    """indices (int32) = where x is not 0, in order; their number is the caller's."""
    parallel_for(_nonzero, 1, x, indices)
