"""How the ops of recurrent layers go about it: runs of steps, scratch, grids.

All products but the one with the state are made for a run of steps at once. A run is long enough for them to fill a
card, and as long as there are steps only where what they give is kept anyway, so that scratch does not grow with steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.cuda.products import WORKSPACE

KERNELS = Kernels("recurrent")
Shape = tuple[int, ...]

_ROWS_AT_ONCE = 2048
_MOST_ROWS = 65535  # of a grid
_MOST_THREADS = 128  # of a block: a step has few elements, which many multiprocessors should share
_ALIGN = 512


def steps_at_once(steps: int, streams: int) -> int:
    """Steps in a run; sums of gradients depend on it, so it depends on the shapes alone."""
    return min(steps, max(1, _ROWS_AT_ONCE // max(1, streams)))


def runs(steps: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Each run: its first step and how many they are."""
    return ((first, min(at_once, steps - first)) for first in range(0, steps, at_once))


def room(like: Any, shapes: Sequence[Shape]) -> int:
    """Bytes that `carve` takes from a workspace, what products take included."""
    return WORKSPACE + sum(_bytes(shape, like.dtype.itemsize) for shape in shapes)


def carve(ws: CudaArray, like: CudaArray, shapes: Sequence[Shape]) -> Iterator[CudaArray]:
    """Arrays of these shapes, and of the dtype of `like`, in a workspace, after the bytes that products take."""
    at = WORKSPACE
    for shape in shapes:
        yield ws.part(at, shape, like.dtype)
        at += _bytes(shape, like.dtype.itemsize)


def _bytes(shape: Shape, itemsize: int) -> int:
    return -(-math.prod(shape) * itemsize // _ALIGN) * _ALIGN


def grid_of(rows: int, units: int) -> tuple[tuple[int, int], int]:
    """Grid and block of a kernel that uses FOR_UNITS."""
    block = min(_MOST_THREADS, -(-units // 32) * 32)
    return (-(-units // block), min(rows, _MOST_ROWS)), block


def over_units(name: str, like: CudaArray, *arguments: Any) -> None:
    """Run such a kernel for `like` (..., units): the arguments, and then its rows and units."""
    units = like.shape[-1]
    rows = like.size // units
    KERNELS.run(like, name, *grid_of(rows, units), *arguments, rows, units)


def rows(array: CudaArray) -> CudaArray:
    """(steps, streams, elements) as (steps * streams, elements)."""
    return array.reshape(-1, array.shape[-1])


def steps_of(array: CudaArray, first: int, count: int) -> CudaArray:
    """Steps [first, first + count) of (steps, ...)."""
    return array.part(first * step_bytes(array), (count, *array.shape[1:]))


def step_bytes(array: CudaArray) -> int:
    """Bytes of one step of (steps, ...)."""
    return array.nbytes // array.shape[0]
