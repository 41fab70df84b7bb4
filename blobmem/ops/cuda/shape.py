"""Arrays joined and divided along an axis, cropped and repeated. They may be empty."""

from __future__ import annotations

from math import prod

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import strided
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("tiles")
_WARP = 32


def _copy_part(part: CudaArray, whole: CudaArray, axis: int, offset: int, into: bool) -> None:
    """Between `part` and what `whole` has from `offset` on along the axis; `into`: from part to whole."""
    inner = prod(part.shape[axis + 1 :])
    size, at = (prod(part.shape[:axis]), part.shape[axis] * inner), offset * inner
    rows, own = (whole.shape[axis] * inner, 1), (size[1], 1)
    if into:
        strided.copy(part, whole, size, own, rows, 0, at)
    else:
        strided.copy(whole, part, size, rows, own, at, 0)


@op(family="cuda")
def concat_forward(*arrays: CudaArray, axis: int) -> None:
    """The last array becomes those before it, one after another along the axis."""
    *xs, y = arrays
    offset = 0
    for x in xs:
        _copy_part(x, y, axis, offset, True)
        offset += x.shape[axis]


@op(family="cuda")
def concat_backward(dy: CudaArray, dx: CudaArray, *, axis: int, offset: int) -> None:
    """dx = the part of dy from `offset` on, as long as dx is."""
    _copy_part(dx, dy, axis, offset, False)


@op(family="cuda")
def slice_forward(x: CudaArray, *ys: CudaArray, axis: int) -> None:
    """The ys become x, divided along the axis."""
    offset = 0
    for y in ys:
        _copy_part(y, x, axis, offset, False)
        offset += y.shape[axis]


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
