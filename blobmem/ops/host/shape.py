"""Arrays joined and divided along an axis, cropped and repeated. They may be empty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blobmem.ops.host.blocks import in_blocks
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 65536
_TILE = 256


def _around(x: np.ndarray, axis: int) -> np.ndarray:
    """x as (outer, size, inner)."""
    return x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    """to = source, of one shape, cut along the longer of the first two axes."""
    axis = 0 if to.ndim < 2 or to.shape[0] >= to.shape[1] else 1
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
def take_items(x: np.ndarray, y: np.ndarray, *, first: int) -> None:
    """y = the items of x, its first axis, from `first` on, as many as y has."""
    _copy(y, x[first : first + len(y)])


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


def _part(x: np.ndarray, like: np.ndarray, offsets: tuple[int, ...]) -> np.ndarray:
    """x from `offsets` on, as large as `like`."""
    return x[tuple(slice(start, start + size) for start, size in zip(offsets, like.shape, strict=True))]


@op
def crop_forward(x: np.ndarray, y: np.ndarray, *, offsets: tuple[int, ...]) -> None:
    """y = the part of x, of as many axes, that begins at `offsets`."""
    _copy(y, _part(x, y, offsets))


@op
def crop_backward(dy: np.ndarray, dx: np.ndarray, *, offsets: tuple[int, ...]) -> None:
    """dx = dy at `offsets`, 0 around it."""
    in_blocks(lambda dx: dx.fill(0), dx)
    _copy(_part(dx, dy, offsets), dy)


@op
def tile_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y[:, t] = x for all t; x (outer, inner), y (outer, tiles, inner)."""
    _copy(y, np.broadcast_to(x[:, None], y.shape))


@kernel
def _sum_tiles(start, stop, scratch, dy, dx, tiles, inner):
    """Items [start, stop), up to _TILE values of an outer index each; scratch has their sums."""
    parts = (inner + _TILE - 1) // _TILE
    for item in range(start, stop):
        outer, first = item // parts, item % parts * _TILE
        sums = scratch[: min(_TILE, inner - first)]
        sums[:] = 0
        for t in range(tiles):
            at = (outer * tiles + t) * inner + first
            row = dy[at : at + sums.size]
            for i in range(sums.size):
                sums[i] += row[i]
        dxs = dx[outer * inner + first : outer * inner + first + sums.size]
        for i in range(sums.size):
            dxs[i] = sums[i]


@op
def tile_backward(dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = the sum of dy over its tiles, in double precision; shapes as in `tile_forward`."""
    outer, tiles, inner = dy.shape
    parallel_for(_sum_tiles, outer * -(-inner // _TILE), dy.reshape(-1), dx.reshape(-1), tiles, inner,
                 grain=1 + _GRAIN // max(1, tiles * min(inner, _TILE)), scratch_of=(_TILE, np.float64))  # fmt: skip
