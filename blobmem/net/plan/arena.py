"""From lifetimes, where in one arena each array lies, so that those that live at one time do not overlap.

This is dynamic storage allocation, which is NP-hard. What planners for nets do (Pisarchyk and Lee 2020, "Efficient
memory management for deep neural net inference") is done here in several orders: arrays one after another at the lowest
offset that is free, until an order reaches the largest load; if none does, a local search over orders of the large ones
looks for one behind which the small ones find room, and at last one over orders of all goes on from the best. Every
packing can be had by some order, its own from the lowest offset up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.rooms import loads

WORK = 200_000_000
"""Comparisons of two arrays that a layout may take, after which no other order is begun: about a second. A number, not
a time, so that plans repeat."""

LARGE = (40, 100)
"""What has more than such a part of the bytes of an arena is large."""

WITHIN = (100, 400)
"""The same where a given number of bytes will do."""

FULL = 0.999
"""What is small, and lives where more than such a part of these is in use, is put first then."""

BEST = 3
"""With so many orders, those that end first, a search for places within them goes on."""


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
    """The offsets, in the unit of the sizes; where `enough` will do, others are not looked for once they end by that,
    nor for so long."""
    from blobmem.net.plan import kernels  # its compiler takes a while to import

    goal, work = max(largest_load(first, last, size), enough), WORK // (8 if enough else 1)
    around, least = (_orders_around_large if enough else _orders_of_large)(first, last, size, goal), kernels.NO_LIMIT
    found = list[tuple[int, np.ndarray, np.ndarray]]()
    for order in chain(_orders(first, last, size), around):
        offsets = np.empty_like(size)
        total, done = kernels.put_all(order, first, last, size, offsets, kernels.NO_LIMIT if enough else least - 1)
        if total < least or enough:
            least = min(least, total)
            found.append((total, order, offsets))
        work -= done
        if least <= goal or work <= 0:
            return min(found, key=itemgetter(0))[-1]
    best, *others = sorted(found, key=itemgetter(0))
    for _, order, offsets in (best, *others[: BEST - 1 if enough else 0]):
        total = kernels.improve(order, first, last, size, offsets, goal, work // 2)
        best = min(best, (total, order, offsets), key=itemgetter(0))
        if total <= goal:
            break
    return best[-1]


def _orders_around_large(first: np.ndarray, last: np.ndarray, size: np.ndarray, goal: int) -> Iterator[np.ndarray]:
    """Orders in which large arrays come as a short search by themselves has found to be good, behind the small ones
    that live where nearly all is in use: there is a place for all others."""
    from blobmem.net.plan import kernels

    load = loads(first, last, size, int(last.max()) + 1)
    most = np.array([load[begin : end + 1].max() for begin, end in zip(first, last, strict=True)])
    rest = np.lexsort((first, -size, first - last, -most))
    for part in WITHIN:
        large, small = np.flatnonzero(size * part > goal), rest[size[rest] * part <= goal]
        if len(large) < 2:
            continue
        own, full = (first[large], last[large], size[large]), most[small] >= FULL * goal
        for order in islice(_orders(*own), 5):
            kernels.improve(order, *own, np.empty_like(own[2]), largest_load(*own), WORK // 64)
            yield np.concatenate([small[full], large[order], small[~full]])


def _orders_of_large(first: np.ndarray, last: np.ndarray, size: np.ndarray, goal: int) -> Iterator[np.ndarray]:
    """Orders in which the large arrays come first, as a search by themselves, which is quick, has found them to be
    good."""
    from blobmem.net.plan import kernels

    rest = np.lexsort((first, -size * (last - first + 1)))
    for part in LARGE:
        large = np.flatnonzero(size * part > goal)
        small = rest[size[rest] * part <= goal]
        if len(large) < 2:
            continue
        own = first[large], last[large], size[large]
        for order in islice(_orders(*own), 1, 4):
            kernels.improve(order, *own, np.empty_like(own[2]), goal, WORK // 8)
            yield np.concatenate([large[order], small])


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
