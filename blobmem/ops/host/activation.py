"""More functions of one element at a time, a cache-sized block after another.

x and y (dy and dx) may be the same memory, and have one size; shapes do not matter. What is not a number stays so,
except where y is a comparison.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.blocks import in_blocks, spare
from blobmem.ops.registry import op


def _flags(like: np.ndarray) -> np.ndarray:
    """Room for a truth value per element, in the second half of the calling thread's spare room."""
    return spare(like, 1).view(np.bool_)[: like.size]


@op
def absval_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y = |x|."""
    in_blocks(lambda x, y: np.abs(x, out=y), x, y)


@op
def absval_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy times the sign of x, which is 0 for 0."""

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        np.multiply(np.sign(x, out=spare(x)), dy, out=dx)

    in_blocks(block, x, dy, dx)


@op
def bnll_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y = log(1 + exp(x)), computed as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        rest = np.abs(x, out=spare(x))
        np.negative(rest, out=rest)
        np.exp(rest, out=rest)
        np.log1p(rest, out=rest)
        np.maximum(x, 0, out=y)
        np.add(y, rest, out=y)

    in_blocks(block, x, y)


@op
def bnll_backward(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy * (1 - exp(-y)), the slope being the sigmoid of x."""

    def block(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        less = np.negative(y, out=spare(y))
        np.expm1(less, out=less)
        np.negative(less, out=less)
        np.multiply(less, dy, out=dx)

    in_blocks(block, y, dy, dx)


@op
def clip_forward(x: np.ndarray, y: np.ndarray, *, low: float, high: float) -> None:
    """y = x where that lies in [low, high], else the nearer bound."""
    in_blocks(lambda x, y: np.clip(x, low, high, out=y), x, y)


@op
def clip_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, low: float, high: float) -> None:
    """dx = dy where x lies in [low, high], bounds included, else 0."""

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        inside = np.equal(x, np.clip(x, low, high, out=spare(x)), out=_flags(x))
        np.multiply(dy, inside, out=dx)

    in_blocks(block, x, dy, dx)


@op
def elu_forward(x: np.ndarray, y: np.ndarray, *, alpha: float) -> None:
    """y = x where positive, alpha * (exp(x) - 1) elsewhere; Clevert, Unterthiner and Hochreiter 2016."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        negative = np.minimum(x, 0, out=spare(x))
        np.expm1(negative, out=negative)
        np.multiply(negative, alpha, out=negative)
        np.maximum(x, 0, out=y)
        np.add(y, negative, out=y)

    in_blocks(block, x, y)


@op
def elu_backward(x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, alpha: float) -> None:
    """dx = dy where x is positive, dy * (alpha + y) elsewhere; y serves as x when alpha is not negative."""

    def block(x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slope = np.add(y, alpha, out=spare(y))
        np.copyto(slope, 1, where=np.greater(x, 0, out=_flags(x)))
        np.multiply(slope, dy, out=dx)

    in_blocks(block, x, y, dy, dx)


@op
def exp_forward(x: np.ndarray, y: np.ndarray, *, rate: float, offset: float) -> None:
    """y = exp(rate * x + offset)."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        np.multiply(x, rate, out=y)
        np.add(y, offset, out=y)
        np.exp(y, out=y)

    in_blocks(block, x, y)


@op
def exp_backward(y: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, rate: float, offset: float) -> None:
    """dx = dy * rate * y; the offset is in y."""

    def block(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        np.multiply(y, dy, out=dx)
        np.multiply(dx, rate, out=dx)

    in_blocks(block, y, dy, dx)


@op
def log_forward(x: np.ndarray, y: np.ndarray, *, scale: float, shift: float, factor: float) -> None:
    """y = factor * log(scale * x + shift), the logarithm being the natural one."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        np.multiply(x, scale, out=y)
        np.add(y, shift, out=y)
        np.log(y, out=y)
        np.multiply(y, factor, out=y)

    in_blocks(block, x, y)


@op
def log_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, scale: float, shift: float, factor: float) -> None:
    """dx = dy * factor * scale / (scale * x + shift)."""

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        base = np.multiply(x, scale, out=spare(x))
        np.add(base, shift, out=base)
        np.divide(factor * scale, base, out=base)
        np.multiply(base, dy, out=dx)

    in_blocks(block, x, dy, dx)


@op
def relu6_forward(x: np.ndarray, y: np.ndarray, *, slope: float) -> None:
    """y = min(x, 6) where x is positive, slope * x elsewhere; the slope is not negative."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        if slope == 0:
            np.clip(x, 0, 6, out=y)
            return
        leak = np.multiply(np.minimum(x, 0, out=spare(x)), slope, out=spare(x))
        np.clip(x, 0, 6, out=y)
        np.add(y, leak, out=y)

    in_blocks(block, x, y)


@op
def relu6_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, slope: float) -> None:
    """dx = dy where x lies between 0 and 6, 0 where it is 6 or more, slope * dy elsewhere; y serves as x.

    The slope is not negative.
    """

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        slopes, flags = spare(x), _flags(x)
        slopes.fill(slope)
        np.copyto(slopes, 1, where=np.greater(x, 0, out=flags))
        np.copyto(slopes, 0, where=np.greater_equal(x, 6, out=flags))
        np.multiply(slopes, dy, out=dx)

    in_blocks(block, x, dy, dx)


def _sigmoid(x: np.ndarray, beta: float) -> np.ndarray:
    """The sigmoid of beta * x, in spare room."""
    y = np.multiply(x, 0.5 * beta, out=spare(x))
    np.tanh(y, out=y)
    np.multiply(y, 0.5, out=y)
    return np.add(y, 0.5, out=y)


@op
def swish_forward(x: np.ndarray, y: np.ndarray, *, beta: float) -> None:
    """y = x * sigmoid(beta * x); Ramachandran, Zoph and Le 2017."""
    in_blocks(lambda x, y: np.multiply(x, _sigmoid(x, beta), out=y), x, y)


@op
def swish_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, beta: float) -> None:
    """dx = dy * s * (1 + beta * x * (1 - s)) with s = sigmoid(beta * x)."""

    def block(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
        sigmoid, slope = _sigmoid(x, beta), spare(x, 1)
        np.subtract(1, sigmoid, out=slope)
        np.multiply(slope, x, out=slope)
        np.multiply(slope, beta, out=slope)
        np.add(slope, 1, out=slope)
        np.multiply(slope, sigmoid, out=slope)
        np.multiply(slope, dy, out=dx)

    in_blocks(block, x, dy, dx)


@op
def threshold_forward(x: np.ndarray, y: np.ndarray, *, threshold: float) -> None:
    """y = 1 where x is above the threshold, else 0."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        np.copyto(y, np.greater(x, threshold, out=_flags(x)))

    in_blocks(block, x, y)
