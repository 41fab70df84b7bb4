"""Convolutions that nets of images begin with, by kernels of our own: of 3x3 taps, or of 7x7 two pixels apart, padded by
half of them, from images of three channels, as the file has them, to channels last.

On tensor cores, with what of float32 these take (`math="tf32"`), or in half precision; the same bits on every run.
cuDNN's plans want a fourth channel of zeros, or the images folded, and take several times as long.
"""

from __future__ import annotations

import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda.conv_small import add_partial
from blobmem.ops.cuda.launch import Kernels

_KERNELS = Kernels("conv_first")
_WINDOWS = {3: ((1, 1), (1, 1), (1, 1), 1), 7: ((2, 2), (3, 3), (1, 1), 1)}  # by taps each way
_RUN = 64  # channels of y of which a block has the gradients (RUN in the source)
_THREADS, _BAND = 128, 2  # of a block, and lines of y that it makes at a time
_BLOCKS = 528  # that a card of 132 multiprocessors runs at a time
_PARTS = 528  # of the gradients for the weights


def fits(x: Any, w: Any, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernels take a convolution of x (images, 3, height, width), and the device multiplies as they do."""
    return bool(
        w.shape[1:] == (3, w.shape[-1], w.shape[-1]) and window[:4] == _WINDOWS.get(w.shape[-1])
        and w.shape[0] % _RUN == 0 and x.shape[3] % 4 == 0 and math.prod(x.shape) > 0
        and hasattr(device, "on_tensor_cores") and device.on_tensor_cores(w.dtype)
    )  # fmt: skip


def forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, relu: bool, turned: bool) -> None:
    """y (images, height, width, outputs) = x convolved with w, plus b, and with `relu` max(0, .) of that.

    Weights that are `turned` have their channels last in memory.
    """
    _, high, across, _ = y.shape
    taps, large = w.shape[-1], w.dtype.itemsize * w.shape[-1] > 16
    made, chunk = (32, 56) if large else (64, 112)  # MADE and CHUNK in the source
    units = x.shape[0] * -(-high // _BAND) * -(-across // chunk)
    grid = min(units, _BLOCKS), w.shape[0] // made, 1
    _KERNELS.run(y, f"convolve_{taps}", grid, _THREADS, x, w, b, y, x.shape[0], _sizes(x, w), turned, relu)


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
    partial = ws if parts > 1 else None
    grid, taps = (parts, dw.shape[0] // _RUN, 1), dw.shape[-1]
    _KERNELS.run(dw, f"weigh_{taps}", grid, _THREADS, x, dy, dw, partial, x.shape[0], _sizes(x, dw), parts, accumulate)
    if partial is not None:
        add_partial(partial, dw, parts, accumulate)


def _sizes(x: Any, w: Any) -> tuple[int, ...]:
    stride = _WINDOWS[w.shape[-1]][0][0]
    return x.shape[2], x.shape[3], (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1, w.shape[0]


def _parts(x: Any, w: Any, most: int | None) -> int:
    fit = _PARTS if most is None else most // (4 * math.prod(w.shape))
    return max(1, min(_PARTS // (w.shape[0] // _RUN), x.shape[0] * _sizes(x, w)[2], fit))
