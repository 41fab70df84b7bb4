"""Pooling over planes: x (images, channels, height, width), y the same with the plane that the windows make.

`kernel`, `stride` and `pad` are (height, width). The caller computes y's plane (rounding up); windows are clipped to x.
An average divides by the window's size, clipped to x with its padding, as in Caffe. A window that begins beyond x, as
the last may with a stride above the kernel, gives 0.

A mask has the place that each value came from. In int32 that is its index in x's plane, or -1 for a window with nothing
in it; in uint8, for windows of at most 255 elements, its index in the window before that is clipped, or 255.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.pool_kernels import (
    average,
    average_backward,
    largest,
    scatter,
    scatter_near,
    stochastic_test,
    stochastic_train,
)
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import op

Pair = tuple[int, int]


def _run(kernel: Callable[..., Any], x: np.ndarray, y: np.ndarray, *operands: Any) -> None:
    parallel_for(kernel, x.shape[0] * x.shape[1], *operands, *x.shape[2:], *y.shape[2:],
                 grain=1 + 16384 // max(1, x.shape[2] * x.shape[3]))  # fmt: skip


@op
def max_pool_forward(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, *, kernel: Pair, stride: Pair,
                     pad: Pair) -> None:  # fmt: skip
    """y = the largest of each window; mask (int32 or uint8, None: not wanted) = its place.

    Of equals it is the first. What is not a number counts as larger than any.
    """
    plane = mask.reshape(-1) if mask is not None else np.empty(0, np.int32)
    _run(largest, x, y, x.reshape(-1), y.reshape(-1), plane, mask is not None, *kernel, *stride, *pad)


@op
def max_pool_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, *, kernel: Pair, stride: Pair,
                      pad: Pair) -> None:  # fmt: skip
    """dx = the sum of dy over the windows whose value came from there; of stochastic pooling too."""
    arrays = dy.reshape(-1), mask.reshape(-1), dx.reshape(-1)
    if mask.dtype == np.uint8:
        _run(scatter_near, dx, dy, *arrays, *kernel, *stride, *pad)
    else:
        _run(scatter, dx, dy, *arrays, True)


@op
def ave_pool_forward(x: np.ndarray, y: np.ndarray, *, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """y = the mean of each window."""
    _run(average, x, y, x.reshape(-1), y.reshape(-1), *kernel, *stride, *pad)


@op
def ave_pool_backward(dy: np.ndarray, dx: np.ndarray, *, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """dx = the sum over windows of dy over their size."""
    _run(average_backward, dx, dy, dy.reshape(-1), dx.reshape(-1), True, *kernel, *stride, *pad)


@op
def stochastic_pool_forward(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, *, draws: Draws | None, kernel: Pair,
                            stride: Pair, pad: Pair) -> None:  # fmt: skip
    """Zeiler and Fergus 2013: y = one of each window, with probability in proportion to its value.

    mask as in `max_pool_forward`. Without draws (testing), y = the sum of squares over the sum, the value to expect.
    """
    if draws is None:
        _run(stochastic_test, x, y, x.reshape(-1), y.reshape(-1), *kernel, *stride, *pad)
    else:
        plane = mask.reshape(-1) if mask is not None else np.empty(0, np.int32)
        _run(stochastic_train, x, y, x.reshape(-1), y.reshape(-1), plane, mask is not None, draws.key(), 0,
             *kernel, *stride, *pad)  # fmt: skip
