"""Axes of an array in another order."""

from __future__ import annotations

from collections.abc import Sequence

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import strided
from blobmem.ops.registry import op


@op(family="cuda")
def transpose(x: CudaArray, y: CudaArray, *, order: Sequence[int]) -> None:
    """y = x with axis order[i] as its axis i; x and y are different memory."""
    strided.transposed(x, y, x.shape, tuple(order))
