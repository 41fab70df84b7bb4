"""Element by element over several arrays of one shape. y may be the same memory as one of the inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.ops.host.blocks import in_blocks, spare
from blobmem.ops.registry import op


@op
def eltwise_sum(*arrays: Any, coeffs: tuple[float, ...]) -> None:
    """y = the sum of coeffs[i] * x[i]; y is the last array."""
    *xs, y = arrays

    def block(y: np.ndarray, *xs: np.ndarray) -> None:
        total, product = spare(y), spare(y, 1)
        np.multiply(xs[0], coeffs[0], out=total)
        for x, coeff in zip(xs[1:], coeffs[1:], strict=True):
            np.add(total, x if coeff == 1 else np.multiply(x, coeff, out=product), out=total)
        np.copyto(y, total)

    in_blocks(block, y, *xs)


@op
def eltwise_sum_backward(dy: np.ndarray, dx: np.ndarray, *, coeff: float) -> None:
    """dx = coeff * dy."""
    in_blocks(lambda dy, dx: np.multiply(dy, coeff, out=dx), dy, dx)


@op
def eltwise_prod(*arrays: Any) -> None:
    """y = the product of all x; y is the last array."""
    *xs, y = arrays

    def block(y: np.ndarray, *xs: np.ndarray) -> None:
        total = spare(y)
        np.copyto(total, xs[0])
        for x in xs[1:]:
            np.multiply(total, x, out=total)
        np.copyto(y, total)

    in_blocks(block, y, *xs)


@op
def eltwise_prod_backward(dy: np.ndarray, dx: np.ndarray, *others: Any) -> None:
    """dx = dy times the other inputs, right where an input is zero too."""

    def block(dy: np.ndarray, dx: np.ndarray, *others: np.ndarray) -> None:
        total = spare(dy)
        np.copyto(total, dy)
        for other in others:
            np.multiply(total, other, out=total)
        np.copyto(dx, total)

    in_blocks(block, dy, dx, *others)


@op
def eltwise_prod_backward_unstable(dy: np.ndarray, dx: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """dx = dy * y / x: fewer reads for many inputs, not a number where x is zero."""

    def block(dy: np.ndarray, dx: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        quotient = np.divide(y, x, out=spare(x))
        np.multiply(quotient, dy, out=dx)

    in_blocks(block, dy, dx, x, y)


@op
def eltwise_max(*arrays: Any) -> None:
    """y = the largest x, and mask (int32) = which that is, the first of equals; y and mask are the last two arrays."""
    *xs, y, mask = arrays

    def block(y: np.ndarray, mask: np.ndarray, *xs: np.ndarray) -> None:
        total = spare(y)
        above = spare(y, 1).view(np.bool_)[: y.size]
        np.copyto(total, xs[0])
        mask.fill(0)
        for index, x in enumerate(xs[1:], 1):
            np.greater(x, total, out=above)
            np.copyto(mask, index, where=above)
            np.copyto(total, x, where=above)
        np.copyto(y, total)

    in_blocks(block, y, mask, *xs)


@op
def eltwise_max_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, *, index: int) -> None:
    """dx = dy where input `index` was the largest, else 0."""

    def block(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray) -> None:
        mine = np.equal(mask, index, out=spare(dy).view(np.bool_)[: dy.size])
        np.multiply(dy, mine, out=dx)

    in_blocks(block, dy, mask, dx)
