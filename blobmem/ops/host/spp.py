"""Pooling over a pyramid of levels: x (images, channels, height, width), y (images, bins of all levels).

Of an image y has one level after another, each (channels, bins, bins). A level is (kernel, pad, bins): the window,
which moves by its own size, the zeros around the plane, both (height, width), and the windows per axis. The pooling
itself is that of `pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blobmem.ops.host import pool_kernels as kernels
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import op

Pair = tuple[int, int]
Levels = tuple[tuple[Pair, Pair, int], ...]

_NO_MASK = np.empty(0, np.int32)


def _run(function: Callable[..., None], x: np.ndarray, *operands: Any) -> None:
    parallel_for(function, x.shape[0] * x.shape[1], x, *operands, grain=1 + 16384 // max(1, x.shape[2] * x.shape[3]))


def _walk(start: int, stop: int, x: np.ndarray, levels: Levels) -> Iterator[tuple[int, slice, tuple, tuple, tuple]]:
    """Planes [start, stop) of (images * channels), image by image and level by level.

    Gives the image, where the level lies in its y, and what a kernel takes: the range of the image's planes, the
    window, and the sizes of the planes before and after.
    """
    _, channels, height, width = x.shape
    for image in range(start // channels, -(-stop // channels)):
        planes = max(start - image * channels, 0), min(stop - image * channels, channels)
        at = 0
        for kernel, pad, bins in levels:
            end = at + channels * bins * bins
            yield image, slice(at, end), planes, (*kernel, *kernel, *pad), (height, width, bins, bins)
            at = end


def _largest(start: int, stop: int, x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, levels: Levels) -> None:
    for image, part, planes, window, sizes in _walk(start, stop, x, levels):
        places = _NO_MASK if mask is None else mask[image, part]
        kernels.largest(*planes, x[image].reshape(-1), y[image, part], places, mask is not None, *window, *sizes)


@op
def spp_max_forward(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, *, levels: Levels) -> None:
    """y = the largest of each window; mask (int32, of y's shape; None: not wanted) = its index in the plane."""
    _run(_largest, x, y, mask, levels)


def _scatter(start: int, stop: int, dx: np.ndarray, dy: np.ndarray, mask: np.ndarray, levels: Levels) -> None:
    for image, part, planes, _, sizes in _walk(start, stop, dx, levels):
        kernels.scatter(*planes, dy[image, part], mask[image, part], dx[image].reshape(-1), part.start == 0, *sizes)


@op
def spp_max_backward(dy: np.ndarray, mask: np.ndarray, dx: np.ndarray, *, levels: Levels) -> None:
    """dx = the sum of dy over the windows of all levels whose value came from there; of stochastic pooling too."""
    _run(_scatter, dx, dy, mask, levels)


def _average(start: int, stop: int, x: np.ndarray, y: np.ndarray, levels: Levels) -> None:
    for image, part, planes, window, sizes in _walk(start, stop, x, levels):
        kernels.average(*planes, x[image].reshape(-1), y[image, part], *window, *sizes)


@op
def spp_ave_forward(x: np.ndarray, y: np.ndarray, *, levels: Levels) -> None:
    """y = the mean of each window."""
    _run(_average, x, y, levels)


def _average_backward(start: int, stop: int, dx: np.ndarray, dy: np.ndarray, levels: Levels) -> None:
    for image, part, planes, window, sizes in _walk(start, stop, dx, levels):
        kernels.average_backward(*planes, dy[image, part], dx[image].reshape(-1), part.start == 0, *window, *sizes)


@op
def spp_ave_backward(dy: np.ndarray, dx: np.ndarray, *, levels: Levels) -> None:
    """dx = the sum over the windows of all levels of dy over their size."""
    _run(_average_backward, dx, dy, levels)


def _stochastic(start: int, stop: int, x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, key: np.ndarray | None,
                levels: Levels) -> None:  # fmt: skip
    for image, part, planes, window, sizes in _walk(start, stop, x, levels):
        operands = x[image].reshape(-1), y[image, part]
        if key is None:
            kernels.stochastic_test(*planes, *operands, *window, *sizes)
        else:
            places = _NO_MASK if mask is None else mask[image, part]
            number = image * y.shape[1] + part.start
            kernels.stochastic_train(*planes, *operands, places, mask is not None, key, number, *window, *sizes)


@op
def spp_stochastic_forward(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None, *, draws: Draws | None,
                           levels: Levels) -> None:  # fmt: skip
    """y and mask as in `pool.stochastic_pool_forward`."""
    _run(_stochastic, x, y, mask, None if draws is None else draws.key(), levels)
