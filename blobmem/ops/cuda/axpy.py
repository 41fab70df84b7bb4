"""Planes scaled and added; the gradients are `scale_backward_data`, `scale_backward_gamma` and a copy."""

from __future__ import annotations

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("axpy")


@op(family="cuda")
def axpy_forward(scale: CudaArray, x: CudaArray, y: CudaArray, out: CudaArray) -> None:
    """out = scale * x + y; scale (planes,), the others (planes, inner); out may be the same memory as y."""
    _KERNELS.over(x, "axpy", x.size, scale, x, y, out, x.size, *x.shape)
