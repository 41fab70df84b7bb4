"""Arrays (images, channels, spatial...) with their channels last in memory, and back.

Ops that compute on either take a keyword `layout`: "NCHW", or "NHWC" with spatial operands (images, height, width,
channels), for some ops also (images, depth, height, width, channels).
"""

from __future__ import annotations

import functools
from math import prod

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda import strided
from blobmem.ops.cuda.launch import Kernels

_KERNELS = Kernels("layout")

Shape = tuple[int, ...]

_ALIGNMENT = 512  # bytes


def aligned(nbytes: int) -> int:
    """Bytes up to where the next array in a workspace may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def channels_first(shape: Shape, layout: str) -> Shape:
    """The shape (images, channels, spatial...) of an array in a layout. ValueError for "NHWC" without 4 or 5 axes."""
    if layout == "NCHW":
        return shape
    if layout != "NHWC" or len(shape) not in (4, 5):
        raise ValueError(f"a layout is NCHW, or NHWC of four or five axes; not {layout} of {len(shape)}")
    return shape[0], shape[-1], *shape[1:-1]


def in_layout(shape: Shape, layout: str) -> Shape:
    """The shape in a layout of an array (images, channels, spatial...)."""
    return shape if layout == "NCHW" else (shape[0], *shape[2:], shape[1])


@functools.lru_cache(4096)
def _planar(shape: Shape) -> tuple[int, int, int]:
    """(images, channels, positions) of an array (images, channels, spatial...)."""
    return shape[0], shape[1], prod(shape[2:])


@functools.lru_cache(4096)
def weights_turn(w: Shape, layout: str) -> bool:
    """Whether cuDNN's plans for a layout have weights of a shape in another order than the file."""
    return layout == "NHWC" and w[1] > 1 and prod(w[2:]) > 1


def to_channels_last(x: CudaArray, y: CudaArray) -> None:
    """y's memory = x (images, channels, spatial...) as (images, spatial..., channels). y has as many elements."""
    _turn(x, y, _planar(x.shape))


def to_channels_first(x: CudaArray, y: CudaArray) -> None:
    """y (images, channels, spatial...) = x's memory, which is (images, spatial..., channels)."""
    images, channels, positions = _planar(y.shape)
    _turn(x, y, (images, positions, channels))


def _turn(x: CudaArray, y: CudaArray, shape: tuple[int, int, int]) -> None:
    if x.dtype.itemsize == 1:
        _KERNELS.over(x.part(0, (0,), np.float32), "turn_bytes", x.size, x, y, x.size, *shape[1:])
    else:
        strided.transposed(x, y, shape, (0, 2, 1))


def weights_beside(w: CudaArray, ws: CudaArray | None) -> CudaArray:
    """An array like a convolution's weights, where ws begins. DeviceError if that is too small."""
    if ws is None or ws.nbytes < w.nbytes:
        held = 0 if ws is None else ws.nbytes
        raise DeviceError(f"a convolution's weights need {w.nbytes} bytes of workspace but were given {held}")
    return ws.part(0, w.shape, w.dtype)


def turned_weights(w: CudaArray, ws: CudaArray | None, layout: str) -> tuple[CudaArray, int]:
    """The weights as what runs in the layout wants them, and how many bytes of ws they take."""
    if not weights_turn(w.shape, layout):
        return w, 0
    turned = weights_beside(w, ws)
    to_channels_last(w, turned)
    return turned, aligned(w.nbytes)


def fold(x: CudaArray, y: CudaArray, square: Shape, pad: Shape, *, last: bool,
         columns: tuple[int, int] | None = None) -> None:  # fmt: skip
    """y (images, height, width, channels) = squares of pixels of x, (images, channels, height, width), with `last`
    (images, height, width, channels): of each of their pixels the channels and then zeros. Around x, too, are zeros,
    `pad` of them above and on the left.

    Squares lie side by side; or `columns` are those from one to the next, and those of one behind which it has zeros.
    Volumes are planes of all their rows. y's channels are whole packs of 16 bytes.
    """
    channels, *rows, width = (x.shape[-1], *x.shape[1:-1]) if last else x.shape[1:]
    shape = (channels, prod(rows), width, last, *(columns or 2 * square[1:]))
    packs = y.nbytes // 16
    _KERNELS.over(y, "fold", packs, x, y, packs, shape, _squares(y, square, pad), each=2)


def unfold(y: CudaArray, x: CudaArray, square: Shape, *, accumulate: bool) -> None:
    """x (images, channels, height, width) (+)= what `fold` without padding would make y of, squares side by side."""
    shape = (x.shape[1], prod(x.shape[2:-1]), x.shape[-1])
    _KERNELS.over(x, "unfold", x.size, y, x, x.size, shape, _squares(y, square, (0, 0)), accumulate, each=1)


def _squares(y: CudaArray, square: Shape, pad: Shape) -> Shape:
    return prod(y.shape[1:-2]), y.shape[-2], *square, *pad, y.shape[-1] // prod(square)
