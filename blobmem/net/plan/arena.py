"""From lifetimes, where in one arena each array lies, so that those that live at one time do not overlap.

This is dynamic storage allocation, which is NP-hard. What planners for nets do (Pisarchyk and Lee 2020, "Efficient
memory management for deep neural net inference") is done here in several orders: arrays one after another at the lowest
offset that is free, until an order reaches the largest load. If none does, a search goes on from those that end first:
for places below the largest load, and where it finds none below limits in between; or below a limit that is given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.rooms import loads

WORK = 12_000
"""So many pairs of arrays for each array a search for places below a limit looks at, from the order that ends first;
and a quarter of it from others. A number, not a time, so that plans repeat."""

STARTS = 3
"""From so many orders."""

LEAST, TRIES = 20_000_000, 10
"""Where the least limit is looked for, at least so many pairs are, for each of so many limits, or of fewer that take as
long together: about a second."""

FINE = 10_000
"""Limits are told from each other to such a part of the largest load."""

PAIRS = 30_000_000
"""Where more pairs of arrays live at one time, which take 8 bytes each way, the best order has to do."""


class Layout(NamedTuple):
    """Where arrays lie: the offset in bytes of each, in the lifetimes' order, and the bytes of the arena."""

    offsets: list[int]
    nbytes: int


def layout(lifetimes: Sequence[Lifetime], alignment: int = ALIGNMENT, enough: int = 0) -> Layout:
    """An arena for the arrays, with offsets at multiples of the alignment; as small as is found, or of `enough` bytes.

    A function of sizes and times alone, the same on every machine; the last few are remembered, for nets that go to
    and fro between batch sizes. ValueError for a size below 0, or a lifetime that ends before it begins.
    """
    for life in lifetimes:
        if life.nbytes < 0 or life.last < life.first:
            raise ValueError(f"no lifetime has {life.nbytes} bytes from {life.first} to {life.last}")
    used = [index for index, life in enumerate(lifetimes) if life.nbytes]
    offsets = [0] * len(lifetimes)
    if not used:
        return Layout(offsets, 0)
    lives = (lifetimes[index] for index in used)
    rectangles = tuple((-(-life.nbytes // alignment), life.first, life.last) for life in lives)
    for index, offset in zip(used, _remembered(rectangles, enough // alignment), strict=True):
        offsets[index] = offset * alignment
    return Layout(offsets, max(offsets[index] + lifetimes[index].nbytes for index in used))


@functools.lru_cache(16)
def _remembered(rectangles: tuple[tuple[int, int, int], ...], enough: int) -> list[int]:
    """The offsets of arrays of these sizes, first and last steps, in the unit of the sizes."""
    size, first, last = np.array(rectangles, np.int64).T.copy()
    offsets: list[int] = _place(first, last, size, enough).tolist()
    return offsets


def largest_load(first: np.ndarray, last: np.ndarray, size: np.ndarray) -> int:
    """The largest sum of sizes of arrays that live at one time: no arena is smaller."""
    return int(loads(first, last, size, int(last.max()) + 1).max())


def _place(first: np.ndarray, last: np.ndarray, size: np.ndarray, enough: int) -> np.ndarray:
    """The offsets, in the unit of the sizes."""
    from blobmem.net.plan import kernels  # its compiler takes a while to import

    load, found = largest_load(first, last, size), list[tuple[int, np.ndarray]]()
    for order in _orders(first, last, size):
        offsets = np.empty_like(size)
        total = kernels.put_all(order, first, last, size, offsets)
        if total <= max(load, enough):
            return offsets
        found.append((total, offsets))
    found.sort(key=itemgetter(0))
    (high, best), low, limit = found[0], load - 1, enough or load
    begin = _neighbours_begin(first, last)
    if limit < load or begin[-1] > 2 * PAIRS:
        return best
    starts, neighbours = [offsets for _, offsets in found[:STARTS]], (begin, kernels.neighbours(first, last, begin))
    work = WORK * len(size) if enough else max(WORK * len(size), LEAST)
    for _ in range(1 if enough else max(2, TRIES * LEAST // work)):
        if high - low <= max(1, load // FINE):
            break
        trial = _below(limit, size, neighbours, starts, work)
        if trial is None:
            low = limit
        else:
            high, best = int((trial + size).max()), trial
            starts = [best, *starts[:-1]]
        limit = (low + high) // 2
    return best


def _neighbours_begin(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Of each array, in what `kernels.neighbours` gives, where those that live when it does begin, and the last one's
    end."""
    begun = np.searchsorted(np.sort(first), last, "right")
    over = np.searchsorted(np.sort(last), first, "left")
    return np.concatenate([[0], np.cumsum(begun - over - 1)])


def _below(
    limit: int, size: np.ndarray, neighbours: tuple[np.ndarray, np.ndarray], starts: Sequence[np.ndarray], work: int
) -> np.ndarray | None:
    """Offsets with which all end by the limit; None if none are found with so much work."""
    from blobmem.net.plan import kernels

    for seed, start in enumerate(starts):
        offsets = start.copy()
        if kernels.put_below(limit, size, offsets, *neighbours, work if seed == 0 else work // 4, seed):
            return offsets
    return None


def _orders(first: np.ndarray, last: np.ndarray, size: np.ndarray) -> Iterator[np.ndarray]:
    """Orders in which to place arrays, what mostly does best first."""
    duration = last - first + 1
    keys: list[tuple[Any, ...]] = [
        (-duration, -size),  # nested lifetimes, as of a forward and its backward pass, lie above each other
        (-size * duration,),
        (-size, -duration),
        (-size, first),  # of arrays of one size this takes no more than their load
        (first, -last, -size),
        (last, first, -size),
    ]
    for key in keys:
        yield np.lexsort((first, *reversed(key))).astype(np.int64)
