"""Rows brought to mean 0 and, if asked, to deviation 1."""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("mvn")


def _parts(rows: int, size: int) -> int:
    return channels.splits((1, rows, size))


def _workspace(x: Any, y: Any, *_: Any, **attributes: Any) -> int:
    """Two doubles for each part of a row, unless a block takes whole rows."""
    rows, size = y.shape
    parts = _parts(rows, size)
    return 16 * rows * parts if parts > 1 else 0


@op(family="cuda", workspace=_workspace)
def mvn_forward(x: CudaArray, y: CudaArray, *, normalize_variance: bool, eps: float, ws: CudaArray) -> None:
    """y = x - mean of its row, over the row's deviation + eps if asked; x and y (rows, values) may be one array."""
    if x.size == 0:
        return
    rows, size = x.shape
    parts = _parts(rows, size)
    if parts > 1:
        channels.part_moments((1, rows, size), x, parts, ws)
    threads = channels.threads((1, rows, size), parts)
    _KERNELS.run(x, "mvn", rows * parts, threads, x, y, ws, rows, size, parts, normalize_variance, eps)


def _backward_workspace(x: Any, dy: Any, *_: Any, **attributes: Any) -> int:
    return (1 if x is None else 2) * _workspace(x, dy)


@op(family="cuda", workspace=_backward_workspace)
def mvn_backward(x: CudaArray | None, dy: CudaArray, dx: CudaArray, *, normalize_variance: bool, eps: float,
                 ws: CudaArray) -> None:  # fmt: skip
    """dx of `mvn_forward` from its x (None unless the variance is normalized); dy and dx may be one array.

    With d = deviation and f = 1 / (d + eps): dx = f * (dy - mean(dy) - (x - mean) * f / d * mean((x - mean) * dy)), the
    last term 0 where d is.
    """
    if x is None or not normalize_variance:
        mvn_forward(dy, dx, normalize_variance=False, eps=eps, ws=ws)
        return
    if dy.size == 0:
        return
    rows, size = dy.shape
    parts, sums = _parts(rows, size), None
    if parts > 1:
        channels.part_moments((1, rows, size), x, parts, ws)
        sums = ws.address + 16 * rows * parts
        _KERNELS.run(dy, "mvn_gradient_sums", rows * parts, THREADS, x, dy, ws, sums, rows, size, parts)
    threads = channels.threads((1, rows, size), parts)
    _KERNELS.run(dy, "mvn_gradient", rows * parts, threads, x, dy, dx, ws, sums, rows, size, parts, eps)
