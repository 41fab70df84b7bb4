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
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.liveness import Lifetime

WORK = 200_000_000
"""Comparisons of two arrays that a layout may take, after which no other order is begun: about a second. A number, not
a time, so that plans repeat."""

LARGE = (40, 100)
"""What has more than such a part of the bytes of an arena is large."""


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
    times = np.concatenate([first, last + 1])
    order = np.argsort(times, kind="stable")
    changes, times = np.concatenate([size, -size])[order], times[order]
    sums = np.cumsum(changes)
    return int(sums[np.append(times[1:] != times[:-1], True)].max())


def _place(first: np.ndarray, last: np.ndarray, size: np.ndarray, enough: int) -> np.ndarray:
    """The offsets, in the unit of the sizes; where `enough` will do, others are not looked for once they end by that,
    nor for so long."""
    from blobmem.net.plan import kernels  # its compiler takes a while to import

    goal, work = max(largest_load(first, last, size), enough), WORK // (8 if enough else 1)
    best, best_order, offsets = kernels.NO_LIMIT, None, size
    for order in chain(_orders(first, last, size), _orders_of_large(first, last, size)):
        trial = np.empty_like(size)
        total, done = kernels.put_all(order, first, last, size, trial, best - 1)
        if total < best:
            best, best_order, offsets = total, order, trial
        work -= done
        if best <= goal or work <= 0:
            return offsets
    kernels.improve(best_order, first, last, size, offsets, goal, work // 2)
    return offsets


def _orders_of_large(first: np.ndarray, last: np.ndarray, size: np.ndarray) -> Iterator[np.ndarray]:
    """Orders in which the large arrays come first, as a search by themselves, which is quick, has found them to be
    good."""
    from blobmem.net.plan import kernels

    goal = largest_load(first, last, size)
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
