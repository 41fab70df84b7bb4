"""Arrays joined and divided along an axis. They may be empty there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 65536


def _around(x: np.ndarray, axis: int) -> np.ndarray:
    """x as (outer, size, inner)."""
    return x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    """to = source, of one shape (outer, size, inner), cut along the longer of the first two axes."""
    axis = 0 if to.shape[0] >= to.shape[1] else 1
    parallel_for(_copy_part, to.shape[axis], to, source, axis, grain=1 + _GRAIN * to.shape[axis] // max(1, to.size))


def _copy_part(start: int, stop: int, to: np.ndarray, source: np.ndarray, axis: int) -> None:
    where = (slice(None),) * axis + (slice(start, stop),)
    np.copyto(to[where], source[where])


@op
def concat_forward(*arrays: Any, axis: int) -> None:
    """The last array becomes those before it, one after another along the axis."""
    *xs, y = arrays
    offset = 0
    for x in xs:
        part = _around(x, axis)
        _copy(_around(y, axis)[:, offset : offset + part.shape[1]], part)
        offset += part.shape[1]


@op
def concat_backward(dy: np.ndarray, dx: np.ndarray, *, axis: int, offset: int) -> None:
    """dx = the part of dy from `offset` on, as long as dx is."""
    part = _around(dx, axis)
    _copy(part, _around(dy, axis)[:, offset : offset + part.shape[1]])


@op
def slice_forward(x: np.ndarray, *ys: Any, axis: int) -> None:
    """The ys become x, divided along the axis."""
    offset = 0
    for y in ys:
        concat_backward(x, y, axis=axis, offset=offset)
        offset += y.shape[axis]


@op
def slice_backward(*arrays: Any, axis: int) -> None:
    """The last array, dx, becomes the dys before it, joined."""
    concat_forward(*arrays, axis=axis)
