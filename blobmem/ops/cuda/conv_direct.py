"""Convolutions by our own kernels: where cuDNN has no plan, to few outputs, and as a candidate where a group has a
single channel.

Operands and keywords as in `conv`; up to six spatial axes. With `most` only so many of the first elements of the result
are computed. Deterministic, no workspace, the weights in the file's order
whatever the layout.
"""

from __future__ import annotations

import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.layout import channels_first

Shape = tuple[int, ...]

MOST_AXES = 6

FEW = 4
"""So many outputs are few."""

_KERNELS = Kernels("conv_direct")
_MOST_BLOCKS = 2**20
_WARP = 32
_RUN = 8  # products that a thread of a gradient adds up at least, unless a warp has fewer


def _geometry(x: Shape, w: Shape, y: Shape, stride: Shape, pad: Shape, dilation: Shape, group: int,
              layout: str = "NCHW") -> tuple[str, tuple[Any, ...]]:  # fmt: skip
    """A kernel's ending, and what the kernels take after the arrays and sizes, for the convolution x -> y."""
    x, y = channels_first(x, layout), channels_first(y, layout)
    spatial = len(x) - 2
    if spatial > MOST_AXES:
        raise ValueError(f"a convolution over {spatial} spatial axes; on a CUDA device at most {MOST_AXES}")
    if max(math.prod(x[2:]), math.prod(y[2:])) >= 2**31:
        raise ValueError(f"a convolution from {x} to {y}; on a CUDA device a plane has below 2^31 elements")
    axes = 2 if spatial <= 2 else MOST_AXES

    def full(dims: Shape, absent: int) -> Shape:
        return (absent,) * (axes - spatial) + tuple(dims)

    dims = (full(x[2:], 1), full(y[2:], 1), full(w[2:], 1), full(stride, 1), full(pad, 0), full(dilation, 1))
    return f"_{axes}", (group, x[1] // group, y[1] // group, layout == "NHWC", *dims)


def direct_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, most: int | None = None,
                   **window: Any) -> None:  # fmt: skip
    """As `conv.conv_forward`. ValueError for more than six spatial axes."""
    ending, geometry = _geometry(x.shape, w.shape, y.shape, **window)
    n = _elements(y, most)
    _KERNELS.over(y, "forward" + ending, n, x, w, b, y, n, *geometry, each=1)


def direct_backward_data(dy: CudaArray, w: CudaArray, b: CudaArray | None, dx: CudaArray, most: int | None = None,
                         **window: Any) -> None:  # fmt: skip
    """As `conv.conv_backward_data`; with `b`, as `conv.deconv_forward`. ValueError for more than six spatial axes."""
    ending, geometry = _geometry(dx.shape, w.shape, dy.shape, **window)
    n = _elements(dx, most)
    _KERNELS.over(dx, "backward_data" + ending, n, dy, w, b, dx, n, *geometry, each=1)


def has_few_outputs(x: Any, w: Any, window: tuple[Any, ...]) -> bool:
    """Whether a convolution is a product by few rows of weights in halves, the channels last: so few that plans, which
    would add others of zeros in a workspace, take longer than reading x does. Given are arrays, or their specs, and
    stride, pad, dilation, group and layout."""
    stride, pad, _, group, layout = window
    (outputs, channels, *taps), packs = w.shape, 16 // w.dtype.itemsize
    plain = {*taps, *stride, group} == {1} and not any(pad) and layout == "NHWC"
    return plain and is_half(w.dtype) and outputs <= FEW and channels % packs == 0 and len(x.shape) > 2


def few_outputs_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, relu: bool = False) -> None:
    """As `conv.conv_forward` where there are `has_few_outputs`; with `relu` max(0, .) of that."""
    outputs, channels = w.shape[:2]
    positions = y.size // outputs
    _KERNELS.over(y, "few_outputs", positions, x, w, b, y, positions, channels, outputs, relu, each=1)


def direct_backward_weights(x: CudaArray, dy: CudaArray, dw: CudaArray, *, accumulate: bool, most: int | None = None,
                            **window: Any) -> None:  # fmt: skip
    """As `conv.conv_backward_weights`. ValueError for more than six spatial axes."""
    ending, geometry = _geometry(x.shape, dw.shape, dy.shape, **window)
    n = _elements(dw, most)
    products = dy.size // max(dw.shape[0], 1)  # of each weight
    warps = -(-products // (_WARP * _RUN))
    block = min(max(warps, 1) * _WARP, THREADS)
    _KERNELS.run(dw, "backward_weights" + ending, min(n, _MOST_BLOCKS), block, x, dy, dw, n, x.shape[0], *geometry,
                 accumulate)  # fmt: skip


def _elements(array: CudaArray, most: int | None) -> int:
    return array.size if most is None else min(array.size, most)


def add_bias(b: CudaArray, y: CudaArray, layout: str = "NCHW", relu: bool = False) -> None:
    """y += b per channel; with `relu` max(0, .) of that."""
    plane = 1 if layout == "NHWC" else math.prod(y.shape[2:])
    _KERNELS.over(y, "add_bias", y.size, b, y, y.size, b.size, plane, relu)


def add_sum(b: CudaArray | None, other: CudaArray, y: CudaArray, layout: str = "NCHW", relu: bool = False,
            most: int | None = None) -> None:  # fmt: skip
    """y += other, of its size, or for each of its tiles in y if it is (outer, inner) and y (outer, tiles, inner), and b
    per channel if there is one; with `relu` max(0, .) of that."""
    n, channels = _elements(y, most), channels_first(y.shape, layout)[1]
    plane = 1 if layout == "NHWC" else math.prod(y.shape[2:])
    if other.size == y.size:
        _KERNELS.over(y, "add_sum", n, b, other, y, n, channels, plane, relu)
    else:
        tiles = y.size // other.size
        _KERNELS.over(y, "add_tiles", n, b, other, y, n, channels, plane, tiles, other.shape[1], relu)


def add(x: CudaArray, y: CudaArray) -> None:
    """y += x, of one shape."""
    _KERNELS.over(y, "add", y.size, x, y, y.size)


def take_channels_last(x: CudaArray, dw: CudaArray, *, accumulate: bool) -> None:
    """dw (outputs, channels, spatial...) (+)= x, whose memory has the channels last."""
    taps = math.prod(dw.shape[2:])
    _KERNELS.over(dw, "take_channels_last", dw.size, x, dw, dw.size, dw.shape[1], taps, accumulate, each=1)


def furthest(x: CudaArray, y: CudaArray, out: CudaArray, n: int, w: Shape | None = None) -> None:
    """out = how far the first n elements of y are from x at most, and the largest of x in size.

    With w, weights of that shape are compared, in y with the channels last.
    """
    channels, taps = (1, 1) if w is None else (w[1], math.prod(w[2:]))
    _KERNELS.run(x, "furthest", 1, 1024, x, y, out, n, channels, taps, w is not None)


def noise(y: CudaArray, seed: int) -> None:
    """Fill an array with random numbers from -1 to 1."""
    _KERNELS.over(y, "noise", y.size, y, y.size, seed)
