"""Arrays copied between two layouts: what joining, dividing, cropping, repeating and transposing come down to."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.sources import dims
from blobmem.ops.cuda.launch import THREADS, Kernels

_KERNELS = Kernels("strided")
_AXES = 8  # of Dims
_INDEX = 2**31  # kernels count in 32 bits
_TILE = 64  # as in the source
_LEAST = 16  # elements along both axes below which a tile would be too empty

Shape = tuple[int, ...]


def strides_of(shape: Sequence[int]) -> Shape:
    """Elements between neighbours along each axis of a C-contiguous array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return tuple(strides)


class _Layout(NamedTuple):
    """Indices below `size`, and the elements between neighbours along each axis in x and in y."""

    size: Shape
    x: Shape
    y: Shape


@functools.lru_cache(4096)
def _joined(size: Shape, x: Shape, y: Shape) -> _Layout:
    """The same with as few axes as possible: those of 1 left out, those that lie as one joined."""
    axes: list[tuple[int, int, int]] = []
    for length, step_x, step_y in zip(size, x, y, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1] == step_x * length and axes[-1][2] == step_y * length:
            axes[-1] = (axes[-1][0] * length, step_x, step_y)
        else:
            axes.append((length, step_x, step_y))
    sizes, steps_x, steps_y = zip(*axes, strict=True) if axes else ((1,), (1,), (1,))
    return _Layout(sizes, steps_x, steps_y)


def _packed(layout: _Layout, pack: int) -> _Layout | None:
    """The layout of packs of `pack` elements, or None where they do not fit."""
    *outer_x, last_x = layout.x
    *outer_y, last_y = layout.y
    if (last_x, last_y) != (1, 1) or any(n % pack for n in (layout.size[-1], *outer_x, *outer_y)):
        return None
    size = (*layout.size[:-1], layout.size[-1] // pack)
    return _Layout(size, (*(n // pack for n in outer_x), 1), (*(n // pack for n in outer_y), 1))


class _Launch(NamedTuple):
    """A kernel over a layout: its name, the elements (or packs) that it counts, what it takes after them."""

    name: str
    n: int
    arguments: tuple


@functools.lru_cache(4096)
def _launch(size: Shape, x: Shape, y: Shape, pack: int) -> _Launch | None:
    """The kernel for a layout, in packs of `pack` elements where they fit; None for one run of memory, or too much."""
    layout = _joined(size, x, y)
    if layout.x == layout.y == (1,) or len(layout.size) > _AXES:
        return None
    packs = _packed(layout, pack) if pack > 1 else None
    chosen = layout if packs is None else packs
    count, n = len(chosen.size), math.prod(chosen.size)
    axes = next(axes for axes in (2, 3, _AXES) if axes >= count)
    sizes, steps_x, steps_y = (axes - count) * (1,) + chosen.size, *((axes - count) * (0,) + s for s in chosen[1:])
    arguments = (sizes[1], *steps_x, *steps_y) if axes == 2 else (dims(sizes), dims(steps_x), dims(steps_y))
    return _Launch(f"copy_{axes}" if packs is None else f"copy_packs_{axes}", n, arguments) if n < _INDEX else None


def copy(x: CudaArray, y: CudaArray, size: Shape, x_strides: Shape, y_strides: Shape, x_at: int = 0,
         y_at: int = 0) -> None:  # fmt: skip
    """y[y_at + sum of index * y_strides] = x[x_at + sum of index * x_strides] for all indices below `size`.

    A stride of x may be 0. `size` has its axes in y's order. x and y are different memory.
    """
    itemsize = x.dtype.itemsize
    source, target = x.address + x_at * itemsize, y.address + y_at * itemsize
    launch = _launch(size, x_strides, y_strides, 16 // itemsize if source % 16 == target % 16 == 0 else 1)
    if launch is not None:
        _KERNELS.over(x, launch.name, launch.n, source, target, launch.n, *launch.arguments)
        return
    if 0 in size:
        return
    layout = _joined(size, x_strides, y_strides)
    if layout.x == layout.y == (1,):
        x.device.copy_bytes(target, source, layout.size[0] * itemsize)
        return
    half, rest = layout.size[0] // 2, layout.size[1:]
    copy(x, y, (half, *rest), layout.x, layout.y, x_at, y_at)
    copy(x, y, (layout.size[0] - half, *rest), layout.x, layout.y, x_at + half * layout.x[0], y_at + half * layout.y[0])


def transposed(x: CudaArray, y: CudaArray, shape: Shape, order: Shape) -> None:
    """y = x of `shape` with axis order[i] as its axis i; both C-contiguous."""
    rearranged(x, y, *_transposition(shape, order))


def rearranged(x: CudaArray, y: CudaArray, size: Shape, x_strides: Shape, x_at: int = 0) -> None:
    """y, C-contiguous, [index] = x[x_at + sum of index * x_strides]; x's neighbours may be along any axis."""
    y_strides, tiles = _way(size, x_strides)
    if tiles is None:
        copy(x, y, size, x_strides, y_strides, x_at)
    else:
        grid, arguments = tiles
        _KERNELS.run(x, "turn", grid, THREADS, x.address + x_at * x.dtype.itemsize, y, *arguments)


@functools.lru_cache(4096)
def _transposition(shape: Shape, order: Shape) -> tuple[Shape, Shape]:
    """Size and strides for `rearranged`."""
    strides = strides_of(shape)
    return tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)


@functools.lru_cache(4096)
def _way(size: Shape, x_strides: Shape) -> tuple[Shape, tuple[int, tuple] | None]:
    """y's strides for `copy`, and what `_tiles` says."""
    y_strides = strides_of(size)
    return y_strides, None if 0 in size else _tiles(_joined(size, x_strides, y_strides))


def _tiles(layout: _Layout) -> tuple[int, tuple] | None:
    """Blocks and arguments of `turn`, or None where a plain copy is as good: it reads in runs, or axes are short."""
    last = len(layout.size) - 1
    if 1 not in layout.x[:last] or last > _AXES:
        return None
    a = layout.x.index(1)
    a_size, b_size = layout.size[a], layout.size[last]
    around = [axis for axis in range(last) if axis != a]
    size, x, y = ([steps[axis] for axis in around] for steps in layout)
    blocks = -(-a_size // _TILE) * -(-b_size // _TILE) * math.prod(size)
    if min(a_size, b_size) < _LEAST or blocks >= _INDEX:
        return None
    fill = _AXES - len(around)
    around_dims = dims((*[1] * fill, *size)), dims((*[0] * fill, *x)), dims((*[0] * fill, *y))
    return blocks, (a_size, b_size, layout.x[last], layout.y[a], *around_dims)
