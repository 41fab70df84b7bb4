"""Convolutions of one tap, channels last, and what a batch norm wants of them as they are made, by kernels of our own:
where memory takes the time, and not the multiplications.

On tensor cores, with what of float32 these take (`math="tf32"`), or in half precision. cuDNN's plans want the weights
multiplied beforehand, what is kept before the scale in a pass of its own, and to write what only sums are taken of.
"""

from __future__ import annotations

import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda import batch_norm
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import ArraySpec

_KERNELS = Kernels("conv_pointwise")
_HIGH, _ACROSS, _CHUNK, _AHEAD = 128, 64, 64, 3  # pixels, channels, bytes of inputs at a time, chunks (in the source)
_SHARED = 101376  # bytes of a block
_PARTS = (2, 1)  # so many times _ACROSS channels of y may a block have
_FACTORS = 24  # bytes of a channel
_BLOCKS = 264  # that a card of 132 multiprocessors runs at a time
_HALVES, _FLOATS = 103, 22  # additions and products for a byte that moves: with more, plans are faster on an H200
_WINDOW = ("stride", "pad", "dilation", "group", "layout")
_MOMENTS, _SUMS = 24, 16  # bytes of a part of a channel


def fits(x: Any, w: Any, arrays: int, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernels take a convolution of x (images, spatial..., channels), and are the faster where so many
    arrays of the size of y move otherwise."""
    stride, pad, _, group, layout = window
    outputs, inputs, *taps = w.shape
    width = w.dtype.itemsize
    moved = width * (inputs + outputs * arrays)  # of a pixel
    return bool(
        layout == "NHWC" and {*taps, *stride, group} == {1} and not any(pad) and math.prod(x.shape) > 0
        and inputs * width % _CHUNK == 0 and outputs % _ACROSS == 0 and _shared(inputs * width, 1) <= _SHARED
        and 2 * inputs * outputs <= moved * (_HALVES if is_half(w.dtype) else _FLOATS)
        and hasattr(device, "on_tensor_cores") and device.on_tensor_cores(w.dtype)
    )  # fmt: skip


def takes(arrays: int) -> Any:
    """Whether the kernels do for an op's operands, of which x and w come first."""

    def taken(x: ArraySpec, w: ArraySpec, *_: Any, device: Any, layout: str = "NCHW", **given: Any) -> bool:
        window = (*(given[name] for name in _WINDOW[:-1]), layout)
        return fits(x, w, arrays, window, device)

    return taken


def normalized(x: CudaArray, w: CudaArray, b: CudaArray | None, other: CudaArray | None, y: CudaArray,
               kept: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
               beta: CudaArray | None, *, relu: bool) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_given`, where that `fits`."""
    arrays = x, w, b, other, y, kept, mean, inv_std, gamma, beta
    _run("pointwise_given", x, w, arrays, (relu,), parts=_parts(w))


def moments(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray | None, moments: CudaArray, *, before: int,
            last: bool, ws: CudaArray) -> None:  # fmt: skip
    """As `fused.conv_moments`."""
    like = _folded(x, w)
    parts = batch_norm.parts_of(like, moments, _splits(x, w), ws)
    arrays = x, w, b, y, moments, parts.address
    _run("pointwise_moments", x, w, arrays, (before, parts.kept), splits=parts.number)
    batch_norm.join_moments(w, like, moments, parts, before=before, last=last)


def sums(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
         beta: CudaArray | None, dy: CudaArray, xhat: CudaArray | None, sums: CudaArray, *, relu: bool, first: bool,
         last: bool, ws: CudaArray) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_sums`."""
    like = _folded(x, w)
    parts = batch_norm.parts_of(like, sums, _splits(x, w), ws)
    arrays = x, w, b, mean, inv_std, gamma, beta, dy, xhat, sums, parts.address
    _run("pointwise_sums", x, w, arrays, (relu, first, parts.kept), splits=parts.number)
    batch_norm.join_sums(w, like, gamma, beta, sums, parts, relu=relu, first=first, last=last)


def gradient(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
             gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, dx: CudaArray, sums: CudaArray, *,
             relu: bool, count: int) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_backward_given`."""
    arrays = x, w, b, mean, inv_std, gamma, beta, dy, dx, sums
    _run("pointwise_gradient", x, w, arrays, (1 / count, relu), parts=_parts(w))


def moments_bytes(x: ArraySpec, w: ArraySpec, *_: Any, **attributes: Any) -> int:
    """Workspace of `moments`."""
    return _MOMENTS * _splits(x, w) * w.shape[0]


def sums_bytes(x: ArraySpec, w: ArraySpec, *_: Any, **attributes: Any) -> int:
    """Workspace of `sums`."""
    return _SUMS * _splits(x, w) * w.shape[0]


def _run(kernel: str, x: CudaArray, w: CudaArray, arrays: tuple[Any, ...], numbers: tuple[Any, ...], *, parts: int = 1,
         splits: int = 0) -> None:  # fmt: skip
    """Run a kernel, a block for so many parts of y's channels and each of so many runs of pixels, or of as many as run
    at a time."""
    outputs, inputs = w.shape[:2]
    pixels, stages = math.prod(x.shape) // inputs, _stages(inputs * w.dtype.itemsize, parts)
    grid = (splits or _splits(x, w, parts)) * (outputs // (parts * _ACROSS))
    _KERNELS.run(w, kernel, grid, THREADS, *arrays, pixels, inputs, outputs, parts, stages, *numbers)


def _folded(x: Any, w: Any) -> ArraySpec:
    """y as batch norms have it."""
    return ArraySpec((math.prod(x.shape) // w.shape[1], w.shape[0], 1), w.dtype)


def _parts(w: Any) -> int:
    """Of how many times _ACROSS channels a block has room for the weights."""
    outputs, line = w.shape[0], w.shape[1] * w.dtype.itemsize
    return next(each for each in _PARTS if outputs % (each * _ACROSS) == 0 and _shared(line, each) <= _SHARED)


def _splits(x: Any, w: Any, parts: int = 1) -> int:
    """Of runs of pixels, as many as run at a time."""
    pixels, outputs, _ = _folded(x, w).shape
    return min(max(1, _BLOCKS // (outputs // (parts * _ACROSS))), -(-pixels // _HIGH))


def _stages(line: int, parts: int) -> int:
    """Chunks of pixels that there are in shared memory, of lines of so many bytes: all of some pixels until the last
    channels are made of them, and those on their way."""
    return _AHEAD + (line // _CHUNK if parts > 1 else 1)


def _shared(line: int, parts: int) -> int:
    """Bytes of shared memory that a block of so many channels takes: weights, pixels and factors."""
    return parts * _ACROSS * (line + _FACTORS) + _stages(line, parts) * _HIGH * _CHUNK
