"""Element by element over several arrays of one shape. y may be the same memory as one of the inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.ops.host.blocks import in_blocks, spare
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 32768


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
def multiply(x: np.ndarray, number: np.ndarray, y: np.ndarray, *, accumulate: bool = False) -> None:
    """y (+)= x times a number, an array of one."""

    def block(x: np.ndarray, y: np.ndarray) -> None:
        if accumulate:
            np.add(y, np.multiply(x, number, out=spare(y)), out=y)
        else:
            np.multiply(x, number, out=y)

    in_blocks(block, x, y)


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
    """y = the largest x, and mask (int32) = which that is; y and mask are the last two arrays.

    Of equal ones it is the first, except that the second wins against the first, as in Caffe.
    """
    *xs, y, mask = arrays

    def block(y: np.ndarray, mask: np.ndarray, *xs: np.ndarray) -> None:
        total, larger = spare(y), spare(y, 1).view(np.int32)[: y.size]
        np.copyto(total, xs[0])
        mask.fill(0)
        for index, x in enumerate(xs[1:], 1):
            (np.greater_equal if index == 1 else np.greater)(x, total, out=larger)
            np.multiply(larger, index, out=larger)
            np.maximum(mask, larger, out=mask)
            np.maximum(total, x, out=total)
        np.copyto(y, total)

    in_blocks(block, y, mask, *xs)


@kernel
def _select(start, stop, dy, mask, index, dx):
    """Elements [start, stop)."""
    dys, masks, dxs = dy[start:stop], mask[start:stop], dx[start:stop]
    for i in range(dxs.size):
        dxs[i] = dys[i] if masks[i] == index else 0


@op
def eltwise_max_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, *, index: int) -> None:
    """dx = dy where input `index` was the largest, else 0."""
    parallel_for(_select, dy.size, dy.reshape(-1), mask.reshape(-1), index, dx.reshape(-1), grain=_GRAIN)
