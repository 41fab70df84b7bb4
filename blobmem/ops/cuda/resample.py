"""Planes in another size: x (images, channels, height, width), y the same with the plane that the layer decides.

A mask that is no place counts as one that is nowhere; the device raises ValueError for it when it next waits.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda import planes
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.labels import bad_place
from blobmem.ops.registry import op

Pair = tuple[int, int]

_KERNELS = Kernels("resample")


def _run(to: CudaArray, name: str, *arguments: object) -> None:
    """A kernel over the elements of `to`."""
    planes.run(_KERNELS, to, name, to.shape[0] * to.shape[1], to.shape[2] * to.shape[3], *arguments)


def _points(x: CudaArray, y: CudaArray, crop: Pair) -> tuple[int | float, ...]:
    """What interpolation takes last: the part of x that is left, its first row and column, and how far apart in it the
    points of y are."""
    tall, wide = (size - sum(crop) for size in x.shape[2:])
    down, across = ((n - 1) / (m - 1) if m > 1 else 0.0 for n, m in zip((tall, wide), y.shape[2:], strict=True))
    return crop[0], tall, wide, down, across


@op(family="cuda")
def interp_forward(x: CudaArray, y: CudaArray, *, crop: Pair) -> None:
    """y = x between its points, linearly in both directions: the corners of y are those of x.

    `crop` is how many rows and columns of x do not count, (at the beginning, at the end); some have to be left.
    """
    _run(y, "interpolate", x, y, *x.shape[2:], y.shape[3], *_points(x, y, crop))


@op(family="cuda")
def interp_backward(dy: CudaArray, dx: CudaArray, *, crop: Pair) -> None:
    """dx = the sum of dy times the share that it took; 0 where cut off."""
    _run(dx, "interpolate_gradient", dy, dx, *dy.shape[2:], dx.shape[3], *_points(dx, dy, crop))


@op(family="cuda")
def nearest_forward(x: CudaArray, y: CudaArray, *, times: Pair, over: Pair) -> None:
    """y[row, column] = x[row * times // over, column * times // over], (vertically, horizontally)."""
    _run(y, "nearest", x, y, *x.shape[2:], y.shape[3], times[0], over[0], times[1], over[1])


@op(family="cuda")
def nearest_backward(dy: CudaArray, dx: CudaArray, *, times: Pair, over: Pair) -> None:
    """dx = the sum of dy over what was copied from there."""
    _run(dx, "nearest_gradient", dy, dx, *dy.shape[2:], dx.shape[3], times[0], over[0], times[1], over[1])


def _fault(mask: CudaArray, rows: int, columns: int) -> tuple[int, int]:
    """Where kernels tell of what is no place in a plane of rows x columns, and how they call it."""
    faults = mask.device.faults
    key = "unpool", mask.shape, rows, columns
    return faults.address, faults.code(key, functools.partial(bad_place, mask.shape, rows, columns))


def _marks(x: Any, mask: Any, y: Any) -> int:
    """Of four bytes each, for which elements that are halves have no room."""
    return 4 * y.size if is_half(y.dtype) else 0


@op(family="cuda", workspace=lambda *arrays, **_: _marks(*arrays))
def unpool_forward(x: CudaArray, mask: CudaArray, y: CudaArray, *, ws: CudaArray) -> None:
    """y = x where the mask of a max pooling says, 0 elsewhere (Badrinarayanan et al. 2015).

    mask: of x's shape, places in y's plane, or -1 for none. Of several elements at one place the last stays.
    """
    marks = ws.part(0, (4 * y.size,)) if is_half(y.dtype) else y
    marks.zero()
    size, (rows, columns) = prod(x.shape[2:]), y.shape[2:]
    whole = mask.dtype == np.int32
    planes.run(_KERNELS, x, "mark_places", x.shape[0] * x.shape[1], size, mask, whole, marks, rows * columns,
               *_fault(mask, rows, columns))  # fmt: skip
    _run(y, "put_marked", marks, x, y, size)


@op(family="cuda")
def unpool_backward(dy: CudaArray, mask: CudaArray, dx: CudaArray) -> None:
    """dx = dy where the mask says, also for those of several at one place that `unpool_forward` did not keep."""
    rows, columns = dy.shape[2:]
    _run(dx, "take_places", dy, mask, mask.dtype == np.int32, dx, rows * columns, *_fault(mask, rows, columns))
