"""The convolution that many nets of large images begin with, by kernels of our own: 7x7, stride 2, padding 3, from
images of three channels, as the file has them, to channels last.

On tensor cores, with what of float32 these take (`math="tf32"`); the same bits on every run. cuDNN's plans want a
fourth channel of zeros, or the images folded, and take several times as long.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda.conv_small import add_partial
from blobmem.ops.cuda.launch import Kernels

_KERNELS = Kernels("conv_first")
_WINDOW = ((2, 2), (3, 3), (1, 1), 1)
_RUN = 64  # outputs of a block (RUN in the source)
_BAND = 4  # lines of y that it makes at a time
_WIDEST = 144  # lines of y that it has room for
_BLOCKS = 264  # that a card of 132 multiprocessors runs at a time
_PARTS = 396  # of the gradients for the weights


def fits(x: Any, w: Any, window: tuple[Any, ...], device: Any) -> bool:
    """Whether the kernels take a convolution of x (images, 3, height, width), and the device multiplies as they do."""
    return bool(
        getattr(device, "tensor_cores", False) and w.dtype == np.float32
        and w.shape[1:] == (3, 7, 7) and w.shape[0] % _RUN == 0 and window[:4] == _WINDOW
        and x.shape[3] % 4 == 0 and 0 < _high_and_across(x)[1] <= _WIDEST and math.prod(x.shape) > 0
    )  # fmt: skip


def forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, relu: bool, turned: bool) -> None:
    """y (images, height, width, outputs) = x convolved with w, plus b, and with `relu` max(0, .) of that.

    Weights that are `turned` have their channels last in memory.
    """
    bands = x.shape[0] * -(-_high_and_across(x)[0] // _BAND)
    grid = min(bands, _BLOCKS), w.shape[0] // _RUN, 1
    _KERNELS.run(y, "convolve_first", grid, 256, x, w, b, y, x.shape[0], _sizes(x, w), turned, relu)


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
    grid = parts, dw.shape[0] // _RUN, 1
    _KERNELS.run(dw, "weigh_first", grid, 192, x, dy, dw, partial, x.shape[0], _sizes(x, dw), parts, accumulate)
    if partial is not None:
        add_partial(partial, dw, parts, accumulate)


def _high_and_across(x: Any) -> tuple[int, int]:
    """y's height and width."""
    return (x.shape[2] - 1) // 2 + 1, (x.shape[3] - 1) // 2 + 1


def _sizes(x: Any, w: Any) -> tuple[int, ...]:
    high, across = _high_and_across(x)
    return x.shape[2], x.shape[3], high, across, w.shape[0], -(-across // 16) * 32 + 8


def _parts(x: Any, w: Any, most: int | None) -> int:
    fit = _PARTS if most is None else most // (4 * math.prod(w.shape))
    return max(1, min(_PARTS // (w.shape[0] // _RUN), x.shape[0] * _high_and_across(x)[0], fit))
