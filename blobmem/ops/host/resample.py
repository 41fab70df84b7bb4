"""Planes in another size: x (images, channels, height, width), y the same with the plane that the layer decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.resample_kernels import (
    add_interpolated,
    add_nearest,
    copy_nearest,
    first_outside,
    interpolate,
    put,
    take,
)
from blobmem.ops.labels import bad_place
from blobmem.ops.registry import op

Pair = tuple[int, int]


def _run(kernel: Callable[..., Any], x: np.ndarray, y: np.ndarray, *operands: Any) -> None:
    planes = x.shape[0] * x.shape[1]
    grain = 1 + 8192 * planes // max(1, x.size, y.size)
    parallel_for(kernel, planes, *operands, *x.shape[2:], *y.shape[2:], grain=grain)


@op
def interp_forward(x: np.ndarray, y: np.ndarray, *, crop: Pair) -> None:
    """y = x between its points, linearly in both directions: the corners of y are those of x.

    `crop` is how many rows and columns of x do not count, (at the beginning, at the end); some have to be left.
    """
    _run(interpolate, x, y, x.reshape(-1), y.reshape(-1), crop)


@op
def interp_backward(dy: np.ndarray, dx: np.ndarray, *, crop: Pair) -> None:
    """dx = the sum of dy times the share that it took; 0 where cut off."""
    _run(add_interpolated, dx, dy, dy.reshape(-1), dx.reshape(-1), crop)


@op
def nearest_forward(x: np.ndarray, y: np.ndarray, *, times: Pair, over: Pair) -> None:
    """y[row, column] = x[row * times // over, column * times // over], (vertically, horizontally)."""
    _run(copy_nearest, x, y, x.reshape(-1), y.reshape(-1), times, over)


@op
def nearest_backward(dy: np.ndarray, dx: np.ndarray, *, times: Pair, over: Pair) -> None:
    """dx = the sum of dy over what was copied from there."""
    _run(add_nearest, dx, dy, dy.reshape(-1), dx.reshape(-1), times, over)


def _check(mask: np.ndarray, rows: int, columns: int) -> None:
    bad = first_outside(mask.reshape(-1), rows * columns)
    if bad >= 0:
        raise bad_place(mask.shape, rows, columns, bad, float(mask.reshape(-1)[bad]))


@op
def unpool_forward(x: np.ndarray, mask: np.ndarray, y: np.ndarray) -> None:
    """y = x where the mask of a max pooling says, 0 elsewhere (Badrinarayanan et al. 2015).

    mask: of x's shape, places in y's plane, or -1 for none. Raises ValueError for what is neither.
    """
    _check(mask, *y.shape[2:])
    _run(put, x, y, x.reshape(-1), mask.reshape(-1), y.reshape(-1))


@op
def unpool_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy where the mask says, also for those of several at one place that `unpool_forward` did not keep."""
    _check(mask, *dy.shape[2:])
    _run(take, dx, dy, dy.reshape(-1), mask.reshape(-1), dx.reshape(-1))
