"""Arrays joined and divided along an axis, cropped and repeated. They may be empty."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.sources import DIMS, dims
from blobmem.ops.cuda import strided
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.layout import channels_first, to_channels_last
from blobmem.ops.registry import op

_KERNELS = Kernels("tiles")
_WARP = 32
_INDEX = 2**31  # kernels count parts in 32 bits

Shape = tuple[int, ...]


@functools.lru_cache(4096)
def _part(shape: Shape, whole: int, axis: int, offset: int) -> tuple[tuple[int, int], Shape, Shape, int]:
    """(size, strides of the part, strides of the whole, the part's first element in it), `whole` long on the axis."""
    inner = prod(shape[axis + 1 :])
    size = prod(shape[:axis]), shape[axis] * inner
    return size, (size[1], 1), (whole * inner, 1), offset * inner


def _copy_part(part: CudaArray, whole: CudaArray, axis: int, offset: int, into: bool) -> None:
    """Between `part` and what `whole` has from `offset` on along the axis; `into`: from part to whole."""
    size, own, rows, at = _part(part.shape, whole.shape[axis], axis, offset)
    if into:
        strided.copy(part, whole, size, own, rows, 0, at)
    else:
        strided.copy(whole, part, size, rows, own, at, 0)


class _Joint(NamedTuple):
    """Rows in which parts lie side by side: elements (or packs), those of a row, how many rows are apart, and how far
    each part goes."""

    n: int
    length: int
    pitch: int
    stops: bytes


@functools.lru_cache(4096)
def _joint(parts: tuple[Shape, ...], axis: int, pack: int, pitch: int) -> _Joint | None:
    """The rows of parts along an axis, counted in packs, `pitch` elements apart; None where these do not fit, for too
    many, and for one row, whose parts are runs of memory."""
    rows, widths = prod(parts[0][:axis]), [prod(shape[axis:]) for shape in parts]
    n = rows * sum(widths) // pack
    if rows == 1 or max(n, pitch) >= _INDEX or any(width % pack for width in (pitch, *widths)):
        return None
    stops = list(accumulate(width // pack for width in widths))
    return _Joint(n, stops[-1], pitch // pack, dims(tuple(stops)))


def _copy_parts(parts: Sequence[CudaArray], whole: CudaArray, axis: int, join: bool) -> None:
    """Between `whole` and the parts that it is made of along the axis; `join`: from the parts."""
    offset = 0
    for first in range(0, len(parts), DIMS):
        some = parts[first : first + DIMS]
        _copy_some(some, whole, axis, offset, join)
        offset += sum(part.shape[axis] for part in some)


def _copy_some(parts: Sequence[CudaArray], whole: CudaArray, axis: int, offset: int, join: bool) -> None:
    """The same of some of the parts, the first of which is at `offset`: in one launch, if that can be."""
    name, inner = "join" if join else "divide", prod(whole.shape[axis + 1 :])
    if len(parts) > 1:
        addresses, shapes = tuple([part.address for part in parts]), tuple([part.shape for part in parts])
        begin, pitch = whole.address + offset * inner * whole.dtype.itemsize, whole.shape[axis] * inner
        is_aligned = not any(address % 16 for address in (begin, *addresses))
        packs = _joint(shapes, axis, 16 // whole.dtype.itemsize, pitch) if is_aligned else None
        joint = packs or _joint(shapes, axis, 1, pitch)
        if joint is not None:
            n, length, pitch, stops = joint
            name = name if packs is None else f"{name}_packs"
            _KERNELS.over(whole, name, n, begin, n, length, pitch, len(parts), dims(addresses), stops)
            return
    for part in parts:
        _copy_part(part, whole, axis, offset, join)
        offset += part.shape[axis]


@op(family="cuda")
def concat_forward(*arrays: CudaArray, axis: int) -> None:
    """The last array becomes those before it, one after another along the axis."""
    *xs, y = arrays
    _copy_parts(xs, y, axis, True)


@op(family="cuda")
def concat_backward(dy: CudaArray, dx: CudaArray, *, axis: int, offset: int) -> None:
    """dx = the part of dy from `offset` on, as long as dx is."""
    _copy_part(dx, dy, axis, offset, False)


@op(family="cuda")
def take_items(x: CudaArray, y: CudaArray, *, first: int, layout: str = "NCHW") -> None:
    """y = the items of x, its first axis, from `first` on, as many as y has; `layout` is y's, x has channels second."""
    if layout == "NCHW":
        _copy_part(y, x, 0, first, False)
    else:
        begin = first * prod(x.shape[1:]) * x.dtype.itemsize
        to_channels_last(x.part(begin, channels_first(y.shape, layout)), y)


@op(family="cuda")
def slice_forward(x: CudaArray, *ys: CudaArray, axis: int) -> None:
    """The ys become x, divided along the axis."""
    _copy_parts(ys, x, axis, False)


@op(family="cuda")
def slice_backward(*arrays: CudaArray, axis: int) -> None:
    """The last array, dx, becomes the dys before it, joined."""
    concat_forward(*arrays, axis=axis)


def _start(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    return sum(offset * step for offset, step in zip(offsets, strided.strides_of(shape), strict=True))


@op(family="cuda")
def crop_forward(x: CudaArray, y: CudaArray, *, offsets: tuple[int, ...]) -> None:
    """y = the part of x, of as many axes, that begins at `offsets`."""
    steps = strided.strides_of(x.shape), strided.strides_of(y.shape)
    strided.copy(x, y, y.shape, *steps, _start(x.shape, offsets), 0)


@op(family="cuda")
def crop_backward(dy: CudaArray, dx: CudaArray, *, offsets: tuple[int, ...]) -> None:
    """dx = dy at `offsets`, 0 around it."""
    if dx.shape != dy.shape:
        dx.zero()
    steps = strided.strides_of(dy.shape), strided.strides_of(dx.shape)
    strided.copy(dy, dx, dy.shape, *steps, 0, _start(dx.shape, offsets))


@op(family="cuda")
def tile_forward(x: CudaArray, y: CudaArray) -> None:
    """y[:, t] = x for all t; x (outer, inner), y (outer, tiles, inner)."""
    strided.copy(x, y, y.shape, (x.shape[1], 0, 1), strided.strides_of(y.shape))


@op(family="cuda")
def tile_backward(dy: CudaArray, dx: CudaArray) -> None:
    """dx = the sum of dy over its tiles, in double precision; shapes as in `tile_forward`."""
    _, tiles, inner = dy.shape
    if tiles >= _WARP and inner < _WARP:
        _KERNELS.run(dy, "sum_by_warps", -(-dx.size * _WARP // THREADS), THREADS, dy, dx, dx.size, tiles, inner)
    else:
        _KERNELS.over(dy, "sum_tiles", dx.size, dy, dx, dx.size, tiles, inner, each=1)
