"""How the ops of recurrent layers go about it: how many steps at a time, which thread has which units, what scratch.

The steps are taken in runs. All products but the one with the state are made for a whole run at once, which is long
enough for them to be as fast as for all steps, and short enough for what lies between them to stay in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem.ops.host.parallel import num_threads, parallel_for
from blobmem.ops.host.recurrent_kernels import pack_rows_of, pack_transposed
from blobmem.ops.host.recurrent_turns import looks_in_a_microsecond, turns_size
from blobmem.ops.host.tile import PANEL_VECTORS, ROWS, lanes_of, panel_of

Shape = tuple[int, ...]

_ROWS_AT_ONCE = 512
_WORTH_A_THREAD = 400_000  # operations in a step; with fewer, waiting for each other takes longer than it saves
_PATIENCE = 50.0  # microseconds, beyond twice the time that a slice takes
_OPERATIONS_IN_A_MICROSECOND = 40_000


def steps_at_once(steps: int, streams: int) -> int:
    """Steps in a run; sums of gradients depend on it, so it depends on the shapes alone."""
    return min(steps, max(1, _ROWS_AT_ONCE // streams))


def runs(steps: int, streams: int) -> Iterator[tuple[slice, int, int]]:
    """Each run: where it is along the steps, its first step and how many they are."""
    most = steps_at_once(steps, streams)
    for first in range(0, steps, most):
        count = min(most, steps - first)
        yield slice(first, first + count), first, count


class Crew(NamedTuple):
    """Who does a step: slices of units, one for each thread, cut into blocks; see `recurrent_kernels`."""

    slices: int
    blocks: int
    patience: int
    turns: np.ndarray
    scratch: tuple[int, Any]

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Run a kernel of steps."""
        self.turns.fill(0)
        parallel_for(kernel, self.slices, self.turns, self.slices, self.patience, *args, scratch_of=self.scratch)

    def pack(self, w: np.ndarray, packed: np.ndarray, gates: int, transposed: bool) -> None:
        """Pack weights (gates * units, units) for the product with the state, or with a gradient of the sums."""
        units = w.shape[1]
        if transposed:
            parallel_for(pack_transposed, self.blocks, w.reshape(-1), packed, gates, units, self.blocks)
        else:
            parallel_for(pack_rows_of, self.blocks, w.reshape(-1), packed, gates * units, units, self.blocks)


def crew(streams: int, units: int, gates: int, turns: np.ndarray, dtype: Any) -> Crew:
    """Who does the steps of that many streams, units and gates."""
    vectors = -(-units // lanes_of(dtype.itemsize))
    operations = 2 * _padded(streams) * gates * units * units
    slices = max(1, min(num_threads(), vectors, operations // _WORTH_A_THREAD))
    blocks = min(vectors, slices * -(-vectors // (PANEL_VECTORS * slices)))
    patience = 0
    if slices > 1:
        microseconds = _PATIENCE + 2 * operations / slices / _OPERATIONS_IN_A_MICROSECOND
        patience = int(microseconds * looks_in_a_microsecond())
    return Crew(slices, blocks, patience, turns, (gates * ROWS * panel_of(dtype.itemsize), dtype))


def _padded(streams: int) -> int:
    return -(-streams // ROWS) * ROWS


def packed_shape(units: int, gates: int, itemsize: int) -> Shape:
    """Of packed weights (gates * units, units)."""
    width = lanes_of(itemsize)
    return (gates * units * (-(-units // width) * width),)


def state_shape(streams: int, elements: int, itemsize: int) -> Shape:
    """Of the two states. Rows are apart by an odd number of vectors, or all of a tile would share a few cache sets."""
    width = lanes_of(itemsize)
    return (2, _padded(streams), (-(-elements // width) | 1) * width)


def room(like: Any, shapes: Sequence[Shape]) -> int:
    """Bytes that `carve` takes from a workspace."""
    return 8 * _turns(like) + sum(_bytes(shape, like.dtype.itemsize) for shape in shapes)


def carve(ws: np.ndarray | None, like: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
    """Arrays in a workspace: turns, then these shapes of the dtype of `like` (steps, streams, units), each from a
    multiple of 64 bytes on."""
    assert ws is not None  # what is carved is never empty
    at = 8 * _turns(like)
    arrays = [ws[:at].view(np.int64)]
    for shape in shapes:
        arrays.append(ws[at : at + math.prod(shape) * like.itemsize].view(like.dtype).reshape(shape))
        at += _bytes(shape, like.itemsize)
    return arrays


def _turns(like: Any) -> int:
    """Elements of `turns` for the most slices that there can be."""
    return turns_size(-(-like.shape[2] // lanes_of(like.dtype.itemsize)))


def _bytes(shape: Shape, itemsize: int) -> int:
    return -(-math.prod(shape) * itemsize // 64) * 64
