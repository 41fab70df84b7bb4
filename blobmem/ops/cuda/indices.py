"""Items picked by their numbers, and their gradients added up again.

Items are rows (items, values). Indices are whole numbers, in an array of the items' dtype (of halves: float32) or of
int32. For an index
that is not one of an item the device raises NetError when it next waits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import exact
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.labels import bad_index
from blobmem.ops.registry import ArraySpec, op

_KERNELS = Kernels("indices")
_RUN, _CHUNK = 2048, 64  # as in the kernels: keys that a block sorts, and adds up the rows of
_MOST_COLUMNS = 65535  # of blocks, the limit of a grid's second axis
_INT32 = np.dtype(np.int32)


def _kernel(name: str, index: CudaArray, like: CudaArray) -> str:
    if index.dtype == exact(like.dtype):
        return name
    if index.dtype == _INT32:
        return f"{name}_int32"
    raise ValueError(f"indices of {like.dtype} items are {exact(like.dtype)} or int32, not {index.dtype}")


def _fault(x: CudaArray, layer: str, items: int) -> tuple[Any, int]:
    faults = x.device.faults
    return faults, faults.code(("index", layer, items), functools.partial(bad_index, layer, items))


@op(family="cuda")
def gather_forward(x: CudaArray, index: CudaArray, bias: CudaArray | None, y: CudaArray, *, layer: str) -> None:
    """y[n] = x[index[n]] + bias; x (items, values), index (n,), bias (values,) or None, y (n, values).

    y[n] = 0 for an index that is not one of an item.
    """
    items, size = x.shape
    _KERNELS.over(x, _kernel("gather", index, x), y.size, x, index, bias, y, index.size, size, items,
                  *_fault(x, layer, items))  # fmt: skip


def _keys_and_parts(dy: ArraySpec, index: ArraySpec, dx: ArraySpec, **_: Any) -> int:
    chunks = -(-index.size // _CHUNK)
    return 16 * index.size + 2 * chunks * dx.shape[1] * exact(dx.dtype).itemsize


@op(family="cuda", workspace=_keys_and_parts)
def gather_backward(dy: CudaArray, index: CudaArray, dx: CudaArray, *, accumulate: bool, layer: str,
                    ws: CudaArray) -> None:  # fmt: skip
    """dx[i] (+)= the sum of dy[n] over the n with index[n] = i."""
    (items, size), n = dx.shape, index.size
    if not accumulate:
        dx.zero()
    if not n:
        return
    run = min(_RUN, max(64, 1 << (n - 1).bit_length()))
    keys, other = (ws.part(8 * n * at, (8 * n,)) for at in range(2))
    _KERNELS.run(dx, _kernel("sort_places", index, dx), -(-n // run), run // 2, index, keys, n, items, run,
                 *_fault(dx, layer, items))  # fmt: skip
    while run < n:
        _KERNELS.over(dx, "merge_runs", n, keys, other, n, run, each=1)
        keys, other, run = other, keys, 2 * run
    parts, chunks = ws.part(16 * n, (ws.nbytes - 16 * n,)), -(-n // _CHUNK)
    threads = min(THREADS, -(-size // 32) * 32)
    grid = chunks, min(-(-size // threads), _MOST_COLUMNS)
    _KERNELS.run(dx, "sum_chunks", grid, threads, dy, keys, dx, parts, n, size, accumulate)
    if chunks > 1:
        _KERNELS.run(dx, "join_chunks", grid, threads, keys, dx, parts, n, size, accumulate)


@op(family="cuda")
def nonzero_indices(x: CudaArray, indices: CudaArray) -> None:
    """indices (int32) = where x is not 0, in order; their number is the caller's."""
    _KERNELS.run(x, "nonzero", 1, THREADS, x, x.size, indices, indices.size)
