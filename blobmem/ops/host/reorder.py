"""Axes of an array in another order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 65536
_MANY = 16


@op
def transpose(x: np.ndarray, y: np.ndarray, *, order: Sequence[int]) -> None:
    """y = x with axis order[i] as its axis i; x and y are different memory."""
    if y.ndim < 2 or y.size == 0:
        np.copyto(y, x.transpose(order))
        return
    # cut where there is enough for all threads
    axis = next((axis for axis, size in enumerate(y.shape) if size >= _MANY), 0)
    cut = y.swapaxes(0, axis), x.transpose(order).swapaxes(0, axis)
    parallel_for(_copy_part, y.shape[axis], *cut, grain=1 + _GRAIN * y.shape[axis] // y.size)


def _copy_part(start: int, stop: int, to: np.ndarray, source: np.ndarray) -> None:
    np.copyto(to[start:stop], source[start:stop])
