"""Functions of one element at a time, and the copies and fills that layers need besides.

x and y (dy and dx) may be the same memory. Arrays of one call have one size; shapes do not matter unless stated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.ops.host.blocks import in_blocks, spare
from blobmem.ops.host.neuron_kernels import (
    DROP_BLOCKS,
    drop,
    drop_backward,
    prelu,
    prelu_backward,
    prelu_slope,
    relu,
    relu_gradient,
)
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import op

_GRAIN = 32768


@op
def relu_forward(x: np.ndarray, y: np.ndarray, *, slope: float) -> None:
    """y = x where positive, slope * x elsewhere."""
    parallel_for(relu, x.size, x.reshape(-1), y.reshape(-1), float(slope), grain=_GRAIN)


@op
def relu_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, slope: float) -> None:
    """dx = dy where x is positive, slope * dy elsewhere; y serves as x when slope is not negative."""
    parallel_for(relu_gradient, x.size, x.reshape(-1), dy.reshape(-1), dx.reshape(-1), float(slope), grain=_GRAIN)


@op
def sigmoid_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y = 1 / (1 + exp(-x)), computed as (1 + tanh(x / 2)) / 2, which cannot overflow."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        np.multiply(x, 0.5, out=y)
        np.tanh(y, out=y)
        np.multiply(y, 0.5, out=y)
        np.add(y, 0.5, out=y)

    in_blocks(block, x, y)


@op
def sigmoid_backward(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy * y * (1 - y)."""

    def block(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slope = np.subtract(1, y, out=spare(y))
        np.multiply(slope, y, out=slope)
        np.multiply(slope, dy, out=dx)

    in_blocks(block, y, dy, dx)


@op
def tanh_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y = tanh(x)."""
    in_blocks(lambda x, y: np.tanh(x, out=y), x, y)


@op
def tanh_backward(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy * (1 - y * y)."""

    def block(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slope = np.multiply(y, y, out=spare(y))
        np.subtract(1, slope, out=slope)
        np.multiply(slope, dy, out=dx)

    in_blocks(block, y, dy, dx)


def _power(x: np.ndarray, y: np.ndarray, power: float) -> None:
    """y = x ** power, the common powers without a logarithm."""
    if power == 0:
        y.fill(1)
    elif power == 1:
        np.copyto(y, x)
    elif power == 2:
        np.multiply(x, x, out=y)
    else:
        np.power(x, x.dtype.type(power), out=y)


@op
def power_forward(x: np.ndarray, y: np.ndarray, *, power: float, scale: float, shift: float) -> None:
    """y = (shift + scale * x) ** power."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        np.multiply(x, scale, out=y)
        np.add(y, shift, out=y)
        _power(y, y, power)

    in_blocks(block, x, y)


@op
def power_backward(x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, power: float, scale: float,
                   shift: float) -> None:  # fmt: skip
    """dx = dy * power * scale * (shift + scale * x) ** (power - 1); y is not looked at."""

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slope = np.multiply(x, scale, out=spare(x))
        np.add(slope, shift, out=slope)
        _power(slope, slope, power - 1)
        np.multiply(slope, power * scale, out=slope)
        np.multiply(slope, dy, out=dx)

    if power * scale == 0:
        fill(dx, value=0.0)
    else:
        in_blocks(block, x, dy, dx)


@op
def dropout_forward(x: np.ndarray, y: np.ndarray, mask: np.ndarray, *, ratio: float, draws: Draws) -> None:
    """mask = 1 with probability 1 - ratio, else 0; y = x * mask / (1 - ratio). mask is of uint8."""
    parallel_for(drop, -(-x.size // 4), x.reshape(-1), y.reshape(-1), mask.reshape(-1), np.uint32(ratio * 2**24),
                 x.dtype.type(1 / (1 - ratio)), draws.key(), grain=1024,
                 scratch_of=(4 * DROP_BLOCKS, np.uint32))  # fmt: skip


@op
def dropout_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, *, ratio: float) -> None:
    """dx = dy * mask / (1 - ratio)."""
    parallel_for(drop_backward, dy.size, dy.reshape(-1), mask.reshape(-1), dx.reshape(-1),
                 dy.dtype.type(1 / (1 - ratio)), grain=_GRAIN)  # fmt: skip


def _planes(x: np.ndarray, slope: np.ndarray) -> tuple[int, int, int, int]:
    """(planes, channels, inner, grain) of x (images, channels, inner); channels are 1 where all share a slope."""
    return x.shape[0] * x.shape[1], x.shape[1] if slope.size > 1 else 1, x.shape[2], 1 + _GRAIN // (1 + x.shape[2])


@op
def prelu_forward(x: np.ndarray, slope: np.ndarray, y: np.ndarray) -> None:
    """y = x where positive, slope[c] * x elsewhere; x (images, channels, inner), slope (channels,) or (1,)."""
    planes, channels, inner, grain = _planes(x, slope)
    parallel_for(prelu, planes, x.reshape(-1), slope, y.reshape(-1), channels, inner, grain=grain)


@op
def prelu_backward_data(x: np.ndarray, slope: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where x is positive, slope[c] * dy elsewhere."""
    planes, channels, inner, grain = _planes(x, slope)
    parallel_for(prelu_backward, planes, x.reshape(-1), slope, dy.reshape(-1), dx.reshape(-1), channels, inner,
                 grain=grain)  # fmt: skip


@op
def prelu_backward_slope(x: np.ndarray, dy: np.ndarray, dslope: np.ndarray, *, accumulate: bool) -> None:
    """dslope[c] (+)= the sum of dy * x where x is not positive; over all channels when dslope is (1,)."""
    outer, channels = (x.shape[0], x.shape[1]) if dslope.size > 1 else (x.shape[0] * x.shape[1], 1)
    parallel_for(prelu_slope, channels, x.reshape(-1), dy.reshape(-1), outer, channels, x.shape[2], dslope.reshape(-1),
                 accumulate, grain=1 + _GRAIN // (1 + outer * x.shape[2]))  # fmt: skip


@op
def copy(x: np.ndarray, y: np.ndarray) -> None:
    """y = x, of whatever dtypes."""
    in_blocks(lambda x, y: np.copyto(y, x, casting="unsafe"), x, y)


@op
def fill(y: np.ndarray, *, value: float) -> None:
    """y = value everywhere."""
    in_blocks(lambda y: y.fill(value), y)


@op
def sum_arrays(*arrays: Any) -> None:
    """The last array becomes the sum of those before it; it may be the first of them."""
    *xs, y = arrays

    def block(y: np.ndarray, first: np.ndarray, *others: np.ndarray) -> None:
        if not others:
            np.copyto(y, first)
            return
        np.add(first, others[0], out=y)
        for x in others[1:]:
            np.add(y, x, out=y)

    in_blocks(block, y, *xs)
