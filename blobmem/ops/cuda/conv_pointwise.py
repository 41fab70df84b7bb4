"""Convolutions of one tap, channels last, that are normalised as they are made, by a kernel of our own: where memory
takes the time, and not the multiplications.

On tensor cores, with what of float32 these take (`math="tf32"`), or in half precision. cuDNN's plans want the weights
multiplied beforehand, and what is kept before the scale in a pass of its own.
"""

from __future__ import annotations

import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda.launch import THREADS, Kernels

_KERNELS = Kernels("conv_pointwise")
_HIGH, _ACROSS, _CHUNK = 128, 64, 64  # pixels and channels of y of a block, bytes of inputs at a time (in the source)
_BLOCKS = 264  # that a card of 132 multiprocessors runs at a time
_HALVES, _FLOATS = 60, 22  # additions and products for a byte that moves: with more, plans are faster on an H200


def fits(x: Any, w: Any, other: Any, kept: Any, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernel takes a convolution of x (images, spatial..., channels), and is the faster."""
    stride, pad, _, group, layout = window
    outputs, inputs, *taps = w.shape
    width = w.dtype.itemsize
    moved = width * (inputs + outputs * (1 + (other is not None) + (kept is not None)))  # of a pixel
    return bool(
        layout == "NHWC" and {*taps, *stride, group} == {1} and not any(pad) and math.prod(x.shape) > 0
        and inputs * width % _CHUNK == 0 and outputs % _ACROSS == 0
        and 2 * inputs * outputs <= moved * (_HALVES if is_half(w.dtype) else _FLOATS)
        and hasattr(device, "on_tensor_cores") and device.on_tensor_cores(w.dtype)
    )  # fmt: skip


def normalized(x: CudaArray, w: CudaArray, b: CudaArray | None, other: CudaArray | None, y: CudaArray,
               kept: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
               beta: CudaArray | None, *, relu: bool) -> None:  # fmt: skip
    """As `fused.conv_batch_norm_given`, where that `fits`."""
    outputs, inputs = w.shape[:2]
    pixels, runs = x.size // inputs, outputs // _ACROSS
    grid = min(max(1, _BLOCKS // runs), -(-pixels // _HIGH)) * runs
    arrays = x, w, b, other, y, kept, mean, inv_std, gamma, beta
    _KERNELS.run(y, "pointwise_given", grid, THREADS, *arrays, pixels, inputs, outputs, relu)
