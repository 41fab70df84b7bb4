"""Convolutions, channels last, and what a batch norm wants of them as they are made, by kernels of our own: of one tap,
where memory takes the time, and not the multiplications; and, of halves, of 3x3 taps of 64 channels.

On tensor cores, with what of float32 these take (`math="tf32"`), or in half precision. cuDNN's plans want the weights
multiplied beforehand, what is kept before the scale in a pass of its own, and to write what only sums are taken of.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda import batch_norm
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.layout import aligned, turned_weights, weights_turn
from blobmem.ops.registry import ArraySpec

_POINTWISE, _NEAR = Kernels("conv_pointwise"), Kernels("conv_near")
_HIGH, _ACROSS, _CHUNK, _AHEAD = 128, 64, 64, 3  # pixels, channels, bytes of inputs at a time, chunks (in the source)
_SHARED = 101376  # bytes of a block
_PARTS = (2, 1)  # so many times _ACROSS channels of y may a block have
_FACTORS = 24  # bytes of a channel
_BLOCKS = 264  # that a card of 132 multiprocessors runs at a time
_HALVES, _FLOATS = 103, 22  # additions and products for a byte that moves: with more, plans are faster on an H200
_WINDOW = ("stride", "pad", "dilation", "group", "layout")
MOMENTS, SUMS = 24, 16  # bytes of a part of a channel
_INPUTS, _WIDEST = 64, 92  # of those of 3x3 taps, channels of x and the most columns of an image


def fits(x: Any, w: Any, arrays: int, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernels take a convolution of x (images, spatial..., channels), and are the faster where so many
    arrays of the size of y move otherwise."""
    stride, pad, dilation, group, layout = window
    outputs, inputs, *taps = w.shape
    width = w.dtype.itemsize
    moved = width * (inputs + outputs * arrays)  # of a pixel
    if layout != "NHWC" or {*stride, *dilation, group} != {1} or outputs % _ACROSS or not math.prod(x.shape):
        return False
    if not (hasattr(device, "on_tensor_cores") and device.on_tensor_cores(w.dtype)):
        return False
    if {*taps} != {1}:
        near = taps == [3, 3] and {*pad} == {1} and inputs == _INPUTS and x.shape[2] <= _WIDEST
        return near and device.in_warpgroups(w.dtype) and _with_zeros(x) < 1 << 31
    return bool(
        not any(pad) and inputs * width % _CHUNK == 0 and _shared(inputs * width, 1) <= _SHARED
        and 2 * inputs * outputs <= moved * (_HALVES if is_half(w.dtype) else _FLOATS)
    )  # fmt: skip


def takes(arrays: int, wider: int = 0) -> Any:
    """Whether the kernels do for an op's operands, of which x and w come first; and are the faster where y has so many
    times as many channels, or more."""

    def taken(x: ArraySpec, w: ArraySpec, *_: Any, device: Any, layout: str = "NCHW", **given: Any) -> bool:
        window = (*(given[name] for name in _WINDOW[:-1]), layout)
        outputs, inputs = w.shape[:2]
        return (_is_near(w) or outputs >= wider * inputs) and fits(x, w, arrays, window, device)

    return taken


def normalized(x: CudaArray, w: CudaArray, b: CudaArray | None, other: CudaArray | None, y: CudaArray,
               kept: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
               beta: CudaArray | None, *, relu: bool, turned: bool, ws: CudaArray | None) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_given`, where that `fits`."""
    w, _ = _turned(w, turned, ws)
    arrays = x, w, b, other, y, kept, mean, inv_std, gamma, beta
    _run("conv_given", x, w, arrays, (relu,), parts=_parts(w))


def moments(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray | None, moments: CudaArray, *, before: int,
            last: bool, turned: bool, ws: CudaArray) -> None:  # fmt: skip
    """As `fused.conv_moments`."""
    (w, ws), like = _turned(w, turned, ws), _folded(x, w)
    parts = batch_norm.parts_of(like, moments, _splits(x, w), ws)
    arrays = x, w, b, y, moments, parts.address
    _run("conv_moments", x, w, arrays, (parts.number, before, parts.kept), most=parts.number)
    batch_norm.join_moments(w, like, moments, parts, before=before, last=last)


def sums(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
         beta: CudaArray | None, dy: CudaArray, xhat: CudaArray | None, sums: CudaArray, *, relu: bool, first: bool,
         last: bool, turned: bool, ws: CudaArray) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_sums`."""
    (w, ws), like = _turned(w, turned, ws), _folded(x, w)
    parts = batch_norm.parts_of(like, sums, _splits(x, w), ws)
    arrays = x, w, b, mean, inv_std, gamma, beta, dy, xhat, sums, parts.address
    _run("conv_sums", x, w, arrays, (parts.number, relu, first, parts.kept), most=parts.number)
    batch_norm.join_sums(w, like, gamma, beta, sums, parts, relu=relu, first=first, last=last)


def gradient(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
             gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, dx: CudaArray, sums: CudaArray, *,
             relu: bool, count: int, turned: bool, ws: CudaArray | None) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_backward_given`."""
    w, _ = _turned(w, turned, ws)
    arrays = x, w, b, mean, inv_std, gamma, beta, dy, dx, sums
    _run("conv_gradient", x, w, arrays, (1 / count, relu), parts=_parts(w))


def room(bytes_of_part: int) -> Any:
    """Workspace of one of these, which has so many bytes for each part of a channel: behind weights that are turned."""

    def nbytes(x: ArraySpec, w: ArraySpec, *_: Any, turned: bool = False, **attributes: Any) -> int:
        return _turned_bytes(w, turned) + bytes_of_part * _splits(x, w) * w.shape[0]

    return nbytes


def _turned_bytes(w: Any, turned: bool) -> int:
    return 0 if turned or not weights_turn(w.shape, "NHWC") else aligned(w.nbytes)


def _turned(w: CudaArray, turned: bool, ws: Any) -> tuple[CudaArray, Any]:
    """The weights with channels last, and the rest of ws."""
    result, taken = (w, 0) if turned else turned_weights(w, ws, "NHWC")
    return result, ws.part(taken, (ws.nbytes - taken,), np.uint8) if taken else ws


def _run(kernel: str, x: CudaArray, w: CudaArray, arrays: tuple[Any, ...], numbers: tuple[Any, ...], *, parts: int = 1,
         most: int = _BLOCKS) -> None:  # fmt: skip
    """Run a kernel, a block for so many parts of y's channels and each of as many runs of pixels as run at a time, but
    no more than `most`."""
    outputs, inputs = w.shape[:2]
    near, grid = _is_near(w), min(_splits(x, w, parts), most) * (outputs // (parts * _ACROSS))
    sizes = x.shape[2:0:-1] if near else (0, 0)
    stages = 0 if near else _stages(inputs * w.dtype.itemsize, parts)
    given = *arrays, math.prod(x.shape) // inputs, inputs, outputs, *sizes, parts, stages, *numbers
    (_NEAR if near else _POINTWISE).run(w, kernel, grid, THREADS, *given)


def _is_near(w: Any) -> bool:
    return math.prod(w.shape[2:]) > 1


def _with_zeros(x: Any) -> int:
    """The pixels of images, with one more at the end of each line, and one more line."""
    images, height, width, _ = x.shape
    return int(images * (height + 1) * (width + 1))


def _folded(x: Any, w: Any) -> ArraySpec:
    """y as batch norms have it."""
    return ArraySpec((math.prod(x.shape) // w.shape[1], w.shape[0], 1), w.dtype)


def _parts(w: Any) -> int:
    """Of how many times _ACROSS channels a block has room for the weights."""
    outputs, line = w.shape[0], w.shape[1] * w.dtype.itemsize
    if _is_near(w):
        return 1
    return next(each for each in _PARTS if outputs % (each * _ACROSS) == 0 and _shared(line, each) <= _SHARED)


def _splits(x: Any, w: Any, parts: int = 1) -> int:
    """Of runs of pixels, as many as run at a time."""
    outputs, pixels = w.shape[0], _with_zeros(x) if _is_near(w) else math.prod(x.shape) // w.shape[1]
    return min(max(1, _BLOCKS // (outputs // (parts * _ACROSS))), -(-pixels // _HIGH))


def _stages(line: int, parts: int) -> int:
    """Chunks of pixels that there are in shared memory, of lines of so many bytes: all of some pixels until the last
    channels are made of them, and those on their way."""
    return _AHEAD + (line // _CHUNK if parts > 1 else 1)


def _shared(line: int, parts: int) -> int:
    """Bytes of shared memory that a block of so many channels takes: weights, pixels and factors."""
    return parts * _ACROSS * (line + _FACTORS) + _stages(line, parts) * _HIGH * _CHUNK
