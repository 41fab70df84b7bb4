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
from blobmem.ops.registry import op

_KERNELS = Kernels("indices")
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


@op(family="cuda")
def gather_backward(dy: CudaArray, index: CudaArray, dx: CudaArray, *, accumulate: bool, layer: str) -> None:
    """dx[i] (+)= the sum of dy[n] over the n with index[n] = i."""
    items, size = dx.shape
    if not accumulate:
        dx.zero()
    columns = min(-(-size // (4 * THREADS)), _MOST_COLUMNS)
    _KERNELS.run(dx, _kernel("scatter", index, dx), (index.size, columns), THREADS, dy, index, dx, index.size, size,
                 items, *_fault(dx, layer, items))  # fmt: skip


@op(family="cuda")
def nonzero_indices(x: CudaArray, indices: CudaArray) -> None:
    """indices (int32) = where x is not 0, in order; their number is the caller's."""
    _KERNELS.run(x, "nonzero", 1, THREADS, x, x.size, indices, indices.size)
