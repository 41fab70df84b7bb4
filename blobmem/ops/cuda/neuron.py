"""Functions of one element at a time, and the copies and fills that layers need besides.

x and y (dy and dx) may be the same memory. Arrays of one call have one size; shapes do not matter unless stated.
"""

from __future__ import annotations

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.eltwise import weighted_sum
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import ArraySpec, op

_KERNELS = Kernels("neuron")
_CODES = {np.dtype(name): code for code, name in enumerate(("uint8", "int32", "int64", "float32", "float64"))}
"""Of `convert`, for which halves are what its source is compiled for."""
_HALF = len(_CODES)


@op(family="cuda")
def relu_forward(x: CudaArray, y: CudaArray, *, slope: float) -> None:
    """y = x where positive, slope * x elsewhere."""
    _KERNELS.map("relu", (x, y), slope)


@op(family="cuda")
def relu_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, slope: float) -> None:
    """dx = dy where x is positive, slope * dy elsewhere; y serves as x when slope is not negative."""
    _KERNELS.map("relu_gradient", (x, dy, dx), slope)


@op(family="cuda")
def sigmoid_forward(x: CudaArray, y: CudaArray) -> None:
    """y = 1 / (1 + exp(-x)), computed as (1 + tanh(x / 2)) / 2, which cannot overflow."""
    _KERNELS.map("sigmoid", (x, y))


@op(family="cuda")
def sigmoid_backward(y: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = dy * y * (1 - y)."""
    _KERNELS.map("sigmoid_gradient", (y, dy, dx))


@op(family="cuda")
def tanh_forward(x: CudaArray, y: CudaArray) -> None:
    """y = tanh(x)."""
    _KERNELS.map("tangent", (x, y))


@op(family="cuda")
def tanh_backward(y: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = dy * (1 - y * y)."""
    _KERNELS.map("tangent_gradient", (y, dy, dx))


@op(family="cuda")
def power_forward(x: CudaArray, y: CudaArray, *, power: float, scale: float, shift: float) -> None:
    """y = (shift + scale * x) ** power."""
    _KERNELS.map("power", (x, y), power, scale, shift)


@op(family="cuda")
def power_backward(x: CudaArray, y: CudaArray, dy: CudaArray, dx: CudaArray, *, power: float, scale: float,
                   shift: float) -> None:  # fmt: skip
    """dx = dy * power * scale * (shift + scale * x) ** (power - 1); y is not looked at."""
    if power * scale == 0:
        dx.zero()
    else:
        _KERNELS.map("power_gradient", (x, dy, dx), power - 1, scale, shift, power * scale)


@op(family="cuda")
def dropout_forward(x: CudaArray, y: CudaArray, mask: CudaArray, *, ratio: float, draws: Draws) -> None:
    """mask = 1 with probability 1 - ratio, else 0; y = x * mask / (1 - ratio). mask is of uint8."""
    _KERNELS.map("dropout", (x, y, mask), int(ratio * 2**24), 1 / (1 - ratio), *draws.key().tolist())


@op(family="cuda")
def dropout_backward(dy: CudaArray, mask: CudaArray, dx: CudaArray, *, ratio: float) -> None:
    """dx = dy * mask / (1 - ratio)."""
    _KERNELS.map("dropout_gradient", (dy, mask, dx), 1 / (1 - ratio))


def _slopes(x: CudaArray, slope: CudaArray) -> tuple[int, int]:
    """(channels, inner) by which x's elements find their slope; channels are 1 where all share it."""
    return (x.shape[1], x.shape[2]) if slope.size > 1 else (1, x.size)


@op(family="cuda")
def prelu_forward(x: CudaArray, slope: CudaArray, y: CudaArray) -> None:
    """y = x where positive, slope[c] * x elsewhere; x (images, channels, inner), slope (channels,) or (1,)."""
    _KERNELS.over(x, "prelu", x.size, x, slope, y, x.size, *_slopes(x, slope))


@op(family="cuda")
def prelu_backward_data(x: CudaArray, slope: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = dy where x is positive, slope[c] * dy elsewhere."""
    _KERNELS.over(x, "prelu_gradient", x.size, x, slope, dy, dx, x.size, *_slopes(x, slope))


def _folded(x: CudaArray | ArraySpec, dslope: CudaArray | ArraySpec) -> channels.Folded:
    return (x.shape[0], x.shape[1], x.shape[2]) if dslope.size > 1 else (1, 1, x.size)


@op(family="cuda", workspace=lambda x, dy, dslope, **_: channels.workspace_bytes(_folded(x, dslope)))
def prelu_backward_slope(x: CudaArray, dy: CudaArray, dslope: CudaArray, *, accumulate: bool, ws: CudaArray) -> None:
    """dslope[c] (+)= the sum of dy * x where x is not positive; over all channels when dslope is (1,)."""
    channels.sum_per_channel(_folded(x, dslope), x, dy, dslope, ws, accumulate=accumulate, kind=channels.PRODUCT_BELOW)


@op(family="cuda")
def copy(x: CudaArray, y: CudaArray) -> None:
    """y = x, of whatever dtypes."""
    if x.dtype == y.dtype:
        y.copy_from(x)
    else:
        copy_out(x, y)


def copy_out(x: CudaArray, y: CudaArray) -> None:
    """`copy` by a kernel in any case: y may be page-locked memory of the host."""
    # kernels are compiled by a floating dtype; this one looks at the codes, and of halves at that of which it is
    like = next((a for a in (x, y) if is_half(a.dtype)), CudaArray(y.address, (), np.float32, y.device))
    codes = _CODES.get(x.dtype, _HALF), _CODES.get(y.dtype, _HALF)
    _KERNELS.over(like, "convert", x.size, x, y, x.size, *codes)


@op(family="cuda")
def fill(y: CudaArray, *, value: float) -> None:
    """y = value everywhere."""
    if value == 0:
        y.zero()
    else:
        _KERNELS.map("fill", (y,), value)


@op(family="cuda")
def sum_arrays(*arrays: CudaArray) -> None:
    """The last array becomes the sum of those before it; it may be any of them."""
    *xs, y = arrays
    if len(xs) == 1:
        y.copy_from(xs[0])
    else:
        weighted_sum(xs, (1.0,) * len(xs), y)
