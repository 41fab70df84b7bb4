"""Rows of values reduced to one value each.

`operation` is SUM, ASUM (of absolute values), SUMSQ (of squares) or MEAN; the result is times `coeff`.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("reduction")
_KINDS = {"SUM": channels.PLAIN, "MEAN": channels.PLAIN, "ASUM": channels.ABSOLUTE, "SUMSQ": channels.SQUARE}


def _scale(operation: str, coeff: float, size: int) -> float:
    """What a sum is multiplied by."""
    return coeff / max(1, size) if operation == "MEAN" else float(coeff)


def _workspace(x: Any, *_: Any, **attributes: Any) -> int:
    return channels.workspace_bytes((1, *x.shape))


@op(family="cuda", workspace=_workspace)
def reduction_forward(x: CudaArray, y: CudaArray, *, operation: str, coeff: float, ws: CudaArray) -> None:
    """y[n] = what the operation makes of x[n]; x (rows, values), y (rows,)."""
    rows, size = x.shape
    kind, factor = _KINDS[operation], _scale(operation, coeff, size)
    channels.sum_per_channel((1, rows, size), x, None, y, ws, accumulate=False, kind=kind, factor=factor)


@op(family="cuda")
def reduction_backward(x: CudaArray | None, dy: CudaArray, dx: CudaArray, *, operation: str, coeff: float) -> None:
    """dx (rows, values) of `reduction_forward` from dy (rows,); x is None for SUM and MEAN, which do not need it."""
    rows, size = dx.shape
    kind, sizes = _KINDS[operation], (dx.size, rows, size, _scale(operation, coeff, size))
    if kind == channels.PLAIN:
        _KERNELS.over(dx, "spread", dx.size, dy, dx, *sizes)
    else:
        _KERNELS.over(dx, "spread_along", dx.size, x, dy, dx, *sizes, kind == channels.SQUARE)
