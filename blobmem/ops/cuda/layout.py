"""Arrays (images, channels, spatial...) with their channels last in memory, and back.

Ops that compute on either take a keyword `layout`: "NCHW", or "NHWC" with spatial operands (images, height, width,
channels).
"""

from __future__ import annotations

import functools
from math import prod

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import strided
from blobmem.ops.cuda.launch import Kernels

_KERNELS = Kernels("layout")

Shape = tuple[int, ...]

_ALIGNMENT = 512  # bytes


def aligned(nbytes: int) -> int:
    """Bytes up to where the next array in a workspace may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def channels_first(shape: Shape, layout: str) -> Shape:
    """The shape (images, channels, spatial...) of an array in a layout. ValueError for "NHWC" without four axes."""
    if layout == "NCHW":
        return shape
    if layout != "NHWC" or len(shape) != 4:
        raise ValueError(f"a layout is NCHW, or NHWC of four axes; not {layout} of {len(shape)}")
    return shape[0], shape[3], shape[1], shape[2]


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


def widen_channels(x: CudaArray, y: CudaArray) -> None:
    """y (rows..., channels) = x (rows..., fewer channels), zeros behind; y's channels are whole packs of 16 bytes."""
    _KERNELS.over(y, "widen", y.nbytes // 16, x, y, y.nbytes // 16, x.shape[-1], y.shape[-1], each=2)


def widen_planes(x: CudaArray, y: CudaArray) -> None:
    """y (images, spatial..., channels) = x (images, fewer channels, spatial...), zeros behind; y's channels are
    whole packs of 16 bytes."""
    _, channels, positions = _planar(x.shape)
    _KERNELS.over(y, "widen_planes", y.nbytes // 16, x, y, y.nbytes // 16, channels, y.shape[-1], positions, each=2)


def narrow_channels(x: CudaArray, y: CudaArray) -> None:
    """y (rows..., channels) = the first channels of x (rows..., more channels)."""
    _KERNELS.over(y, "narrow", y.size, x, y, y.size, x.shape[-1], y.shape[-1])
