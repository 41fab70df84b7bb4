"""Convolutions that nets of images begin with, by kernels of our own: of 3x3 taps, or of 7x7 two pixels apart, padded
by half of them, from images of three channels, as the file has them, to channels last.

On tensor cores, with what of float32 these take (`math="tf32"`), or in half precision; the same bits on every run.
cuDNN's plans want a fourth channel of zeros, or the images folded, and take several times as long.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda.conv_small import add_partial
from blobmem.ops.cuda.launch import Kernels

_WINDOWS = {3: ((1, 1), (1, 1), (1, 1), 1), 7: ((2, 2), (3, 3), (1, 1), 1)}  # by taps each way
_RUN = 64  # channels of y that a block looks after (RUN in conv_first.cuh)


class _Kind(NamedTuple):
    """Kernels for some of them.

    Attributes:
        source: which has them.
        ahead, back: their names; of that which keeps what it makes before it scales that, `ahead` with "_kept".
        threads, back_threads: of a block.
        band, chunk: how many lines of y, and numbers of these, a block makes at a time.
        blocks: that a card of 132 multiprocessors runs at a time.
        parts: of the gradients for the weights, at most.
        widest: the widest y.
    """

    source: Kernels
    ahead: str
    back: str
    threads: int
    back_threads: int
    band: int
    chunk: int
    blocks: int
    parts: int
    widest: int = 1 << 30


_FLOATS = _Kind(Kernels("conv_first"), "convolve_first", "weigh_first", 256, 192, 4, 144, 264, 396, 144)
_PIXELS = Kernels("conv_pixels")
_KINDS = {
    3: _Kind(_PIXELS, "convolve_3", "weigh_3", 128, 128, 2, 112, 528, 528),
    7: _Kind(_PIXELS, "convolve_7", "weigh_7", 128, 256, 2, 112, 528, 264),
}


def _kind(w: Any) -> _Kind:
    taps: int = w.shape[-1]
    return _FLOATS if taps == 7 and w.dtype == np.float32 else _KINDS[taps]


def fits(x: Any, w: Any, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernels take a convolution of x (images, 3, height, width), and the device multiplies as they do."""
    return bool(
        w.shape[1:] == (3, w.shape[-1], w.shape[-1]) and window[:4] == _WINDOWS.get(w.shape[-1])
        and w.shape[0] % _RUN == 0 and x.shape[3] % 4 == 0 and math.prod(x.shape) > 0
        and _high_and_across(x, w)[1] <= _kind(w).widest
        and hasattr(device, "on_tensor_cores") and device.on_tensor_cores(w.dtype)
    )  # fmt: skip


def forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, relu: bool, turned: bool,
            kept: CudaArray | None = None, gamma: CudaArray | None = None,
            beta: CudaArray | None = None) -> None:  # fmt: skip
    """y (images, height, width, outputs) = x convolved with w, plus b, and with `relu` max(0, .) of that.

    Weights that are `turned` have their channels last in memory. If it is given, `kept` gets x convolved with w, plus
    b: then y is made of what that holds, times gamma, plus beta, where those are given.
    """
    kind, (high, across) = _kind(w), _high_and_across(x, w)
    units = x.shape[0] * -(-high // kind.band) * -(-across // kind.chunk)
    grid = min(units, kind.blocks), w.shape[0] // _RUN, 1
    name, beside = (kind.ahead, ()) if kept is None else (f"{kind.ahead}_kept", (kept, gamma, beta))
    kind.source.run(y, name, grid, kind.threads, x, w, b, *beside, y, x.shape[0], _sizes(x, w), turned, relu)


def weights_bytes(x: Any, w: Any, most: int | None) -> int:
    """Workspace of `weights`, `most` at most: for the sums of parts."""
    parts = _parts(x, w, most)
    return 4 * parts * math.prod(w.shape) if parts > 1 else 0


def weights(x: CudaArray, dy: CudaArray, dw: CudaArray, ws: CudaArray | None, *, accumulate: bool,
            most: int | None) -> None:  # fmt: skip
    """dw (+)= the gradient for the weights. DeviceError if ws has less than `weights_bytes`."""
    parts, needed = _parts(x, dw, most), weights_bytes(x, dw, most)
    if needed and (ws is None or ws.nbytes < needed):
        held = 0 if ws is None else ws.nbytes
        raise DeviceError(f"a convolution needs {needed} bytes of workspace but was given {held}")
    partial, kind = ws if parts > 1 else None, _kind(dw)
    grid, sizes = (parts, dw.shape[0] // _RUN, 1), _sizes(x, dw)
    kind.source.run(dw, kind.back, grid, kind.back_threads, x, dy, dw, partial, x.shape[0], sizes, parts, accumulate)
    if partial is not None:
        add_partial(partial, dw, parts, accumulate)


def _high_and_across(x: Any, w: Any) -> tuple[int, int]:
    """y's height and width."""
    stride = _WINDOWS[w.shape[-1]][0][0]
    return (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1


def _sizes(x: Any, w: Any) -> tuple[int, ...]:
    """Dims of the sources."""
    high, across = _high_and_across(x, w)
    return x.shape[2], x.shape[3], high, across, w.shape[0]


def _parts(x: Any, w: Any, most: int | None) -> int:
    most_parts = _kind(w).parts
    fit = most_parts if most is None else most // (4 * math.prod(w.shape))
    return max(1, min(most_parts // (w.shape[0] // _RUN), x.shape[0] * _high_and_across(x, w)[0], fit))
