"""Local response normalisation (Krizhevsky et al. 2012, section 3.3) of arrays (images, channels, height, width).

Across channels also, with `layout="NHWC"`, of arrays (images, height, width, channels).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.layout import channels_first
from blobmem.ops.registry import op

_KERNELS = Kernels("lrn")
_LAST = Kernels("lrn_last")
_TILE = 2048  # as in the source
_ENOUGH = 1 << 18  # threads that fill any card
_WIDEST = 4  # channels on either side that a thread keeps in registers
_SCRATCH = 8 << 20  # bytes, or one image's or plane's where those are more


def _folded(x: Any, layout: str) -> tuple[int, int, int]:
    """(outer, channels, positions) of an array."""
    images, channels, height, width = channels_first(x.shape, layout)
    return (images, channels, height * width) if layout == "NCHW" else (images * height * width, channels, 1)


def _runs(shape: tuple[int, int, int], half: int, whole: bool) -> tuple[int, int, int, int]:
    """(threads, channels, positions, channels that a thread walks) for a folded shape; `whole`: all of them."""
    outer, channels, positions = shape
    places = outer * positions
    # runs much longer than what they read of their neighbours
    most = 1 if whole else channels // (4 * half + 8)
    runs = max(1, min(most, -(-_ENOUGH // max(1, places))))
    run = max(1, -(-channels // runs))
    return places * -(-channels // run), channels, positions, run


def _by_rows(layout: str, channels: int, half: int) -> bool:
    """Whether blocks take whole rows of channels that come last."""
    return layout == "NHWC" and channels <= _TILE and half <= _WIDEST


def _rows(x: CudaArray, channels: int) -> tuple[int, int, int]:
    """(blocks, channels, elements that a block takes)."""
    part = _TILE // channels * channels
    return -(-x.size // part), channels, part


def _batches(x: Any, whole: int) -> Iterator[tuple[int, int]]:
    """(first element, count) of what is done at once: `whole` elements each belong together."""
    step = whole * max(1, _SCRATCH // max(1, whole * x.dtype.itemsize))
    return ((first, min(step, x.size - first)) for first in range(0, x.size, step))


def _scratch(x: Any, whole: int) -> int:
    return max((count for _, count in _batches(x, whole)), default=0) * int(x.dtype.itemsize)


@op(family="cuda")
def lrn_forward(x: CudaArray, y: CudaArray, *, local_size: int, alpha: float, beta: float, k: float,
                layout: str = "NCHW") -> None:  # fmt: skip
    """y = x * scale ** -beta; scale = k + alpha / local_size * the sum of x ** 2 over local_size channels around."""
    half, shape, factors = local_size // 2, _folded(x, layout), (k, alpha / local_size, beta)
    if x.size and _by_rows(layout, shape[1], half):
        blocks, *sizes = _rows(x, shape[1])
        _LAST.run(x, "lrn_last", blocks, THREADS, x, y, x.size, *sizes, half, *factors)
        return
    places = _runs(shape, half, False)
    _KERNELS.run(x, "lrn_across", -(-places[0] // THREADS), THREADS, x, y, *places, half, *factors)


def _wide_workspace(x: Any, *_: Any, local_size: int, layout: str = "NCHW", **attributes: Any) -> int:
    """The ratios of some images, where windows are too wide for registers."""
    shape = _folded(x, layout)
    wide = local_size // 2 > _WIDEST and x.size
    return _scratch(x, shape[1] * shape[2]) if wide else 0


@op(family="cuda", workspace=_wide_workspace)
def lrn_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, local_size: int, alpha: float, beta: float, k: float,
                 ws: CudaArray, layout: str = "NCHW") -> None:  # fmt: skip
    """dx = dy * scale ** -beta - 2 alpha beta / local_size * x * the sum of dy * y / scale over the channels around.

    scale and y are made anew, to the bits that `lrn_forward` had.
    """
    half, factor = local_size // 2, alpha / local_size
    slope = 2 * alpha * beta / local_size
    shape = _folded(x, layout)
    _, channels, positions = shape
    if x.size == 0:
        return
    if _by_rows(layout, channels, half):
        blocks, *sizes = _rows(x, channels)
        arguments = x, dy, dx, x.size, *sizes, half, k, factor, slope, beta
        _LAST.run(x, "lrn_last_gradient", blocks, THREADS, *arguments)
    elif half <= _WIDEST:
        places = _runs(shape, half, dx.address == dy.address)
        arguments = x, dy, dx, *places, half, k, factor, slope, beta
        _KERNELS.run(x, "lrn_across_gradient", -(-places[0] // THREADS), THREADS, *arguments)
    else:
        for first, n in _batches(x, channels * positions):
            numbers = first, n, channels, positions, half
            _KERNELS.over(x, "lrn_wide_ratios", n, x, dy, dx, ws, *numbers, k, factor, beta, each=1)
            _KERNELS.over(x, "lrn_wide_gradient", n, x, dx, ws, *numbers, slope, each=1)


@op(family="cuda")
def lrn_within_forward(x: CudaArray, y: CudaArray, *, local_size: int, alpha: float, beta: float) -> None:
    """y = x * scale ** -beta; scale = 1 + alpha * the mean of x ** 2 over local_size x local_size positions.

    The mean is that of average pooling: over the window clipped to the plane with its padding.
    """
    sizes = x.size, x.shape[2], x.shape[3], local_size // 2
    _KERNELS.over(x, "lrn_within", x.size, x, y, *sizes, alpha, beta, each=1)


def _within_workspace(x: Any, *_: Any, **attributes: Any) -> int:
    """The ratios of some planes."""
    return _scratch(x, x.shape[2] * x.shape[3]) if x.size else 0


@op(family="cuda", workspace=_within_workspace)
def lrn_within_backward(x: CudaArray, y: CudaArray, dy: CudaArray, dx: CudaArray, *, local_size: int, alpha: float,
                        beta: float, ws: CudaArray) -> None:  # fmt: skip
    """dx = dy * scale ** -beta - 2 alpha beta * x * the sum of dy * y / (scale * window) over the windows around.

    The scale is made anew, to the same bits.
    """
    if x.size == 0:
        return
    height, width = x.shape[2:]
    for first, n in _batches(x, height * width):
        sizes = first, n, height, width, local_size // 2
        _KERNELS.over(x, "lrn_within_ratios", n, x, y, dy, dx, ws, *sizes, alpha, beta, each=1)
        _KERNELS.over(x, "lrn_within_gradient", n, x, dx, ws, *sizes, 2 * alpha * beta, each=1)
