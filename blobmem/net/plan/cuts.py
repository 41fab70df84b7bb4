"""Which arrays a pass does without between forward and backward, and how, by a relaxation that looks at all of them at
once: what greedy choices (`plan.choice`) begin with.

Lagrange's: in place of a limit, bytes in use have a price in each step, and so have copies. By these prices an array
is kept, or evicted if that is cheaper, for so much, or else made anew, together with what its makers read; the least
sum of what is paid and of the time of calls that run again is a minimum cut. Prices go up in steps that have too much
in use, and down elsewhere (subgradients, with Polyak's steps). The cuts on that way that are least too much are mixes
to begin with. Left out is that what is made anew lives from the first call that needs it on, and what there is while
it is made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blobmem.memory import SyncedMemory
from blobmem.net.plan.choice import ANEW, AWAY, BUSY, Pass

STEPS = 80
"""How often prices change."""

FOUND = 3
"""How many cuts are given."""

PATIENCE = 5
"""After so many changes of prices that were no gain they change by half as much."""

HOPE = 2.0
"""How many times as much as the best so far Polyak's steps aim at."""

BEYOND = 10
"""How many times its price what is too much counts: greedy choices take it off."""

ASIDE = 0.02
"""What part of their time copies are reckoned to take where the link has time for them."""

UNITS, GB = 1e9, 1e9
"""Of a capacity of an edge, per ms; bytes have prices by the GB."""

ENDLESS, DEAREST = 1 << 60, 1e5
"""The capacity of an edge that no cut has, and the ms that an array is at most paid with: where nothing is enough,
prices grow without end."""


Without = dict[SyncedMemory, str]
"""Of what is not kept, whether it is made anew or evicted."""


class _Solved(NamedTuple):
    """A cut.

    Attributes:
        anew, away: of each array, whether it is made anew, or evicted.
        load: GB in use in each step.
        ms: that calls which run again take.
        copies: ms that copies out take.
        paid: what is paid, and these ms.
    """

    anew: np.ndarray
    away: np.ndarray
    load: np.ndarray
    ms: float
    copies: float
    paid: float


class Cuts:
    """The cuts of a pass.

    The network's nodes are arrays, calls of forward, what these run as one with, the source and the sink.
    An edge from an array to its maker is cut if the array is there, one from calls that run as one to the sink if they
    run again.
    """

    def __init__(self, whole: Pass) -> None:
        self._whole, self._memories = whole, [*whole.arrays]
        arrays = [*whole.arrays.values()]
        clock = np.array(whole.clock)
        self._sizes = np.array([each.size for each in arrays]) / GB
        self._first = np.array([each.first for each in arrays], np.int64)
        self._may = np.array([[way in each.start for each in arrays] for way in (ANEW, AWAY)], bool)
        self._start = np.array([[each.start.get(way, each.first) for each in arrays] for way in (ANEW, AWAY)], np.int64)
        self._copy_ms = np.array([whole.times.copy_ms(each.size) for each in arrays])
        comes = np.searchsorted(clock, clock[self._first] - self._copy_ms, side="right") - 1
        self._back = np.maximum(self._start[1], comes)
        self._load = whole.load / GB
        self._hold()
        self._edges()

    def _hold(self) -> None:
        """Add what is held to what is in use, until the last array that is made of it is needed."""
        whole, until = self._whole, dict[SyncedMemory, int]()
        for at in reversed(range(len(whole.inputs))):
            made = [memory for memory, *_ in whole.writes[at]]
            first = [whole.arrays[memory].first for memory in made if memory in whole.arrays]
            needed = max([*first, *(until.get(memory, 0) for memory in made)], default=0)
            for memory in whole.reads[at]:
                until[memory] = max(needed, until.get(memory, 0))
        for memory, (nbytes, start) in whole.held.items():
            self._load[start : until.get(memory, 0)] += nbytes / GB

    def _edges(self) -> None:
        """The network, with the capacities that depend on no prices; `self._priced` says which do, and of which arrays
        these are."""
        whole = self._whole
        number = {memory: at for at, memory in enumerate(self._memories)}
        arrays, calls = len(number), len(whole.inputs)
        units = arrays + calls  # where the nodes begin of what runs as one; those of calls are behind the arrays'
        source, sink = units + calls, units + calls + 1
        edges, priced = list[tuple[int, int, int]](), list[tuple[int, int]]()
        for memory, at in number.items():
            if self._may[0, at]:
                edges.append((source, at, ENDLESS))
                priced.append((len(edges), at))
                edges.append((at, arrays + whole.maker[memory], 0))
        for at, inputs in enumerate(whole.inputs):
            edges.append((arrays + at, units + whole.unit[at], ENDLESS))
            for each in inputs:
                gone = each.source in number and self._may[0, number[each.source]]
                if each.stays and not gone:
                    continue
                other = each.source if gone and each.known else each.same
                if other is not None and other in number:
                    to = number[other]
                elif each.known or other is not None:
                    continue
                else:
                    to = arrays + each.made
                edges.append((arrays + at, to, ENDLESS))
        ms = [max(whole.cost[at] for at in members) for members in whole.members.values()]
        self._units, self._units_ms = units + np.array([*whole.members], np.int64), np.array(ms)
        edges += [(int(unit), sink, int(each * UNITS)) for unit, each in zip(self._units, ms, strict=True)]
        self._tails, self._heads, self._capacities = np.array(edges, np.int64).reshape(-1, 3).T.copy()
        self._priced = np.array(priced, np.int64).reshape(-1, 2)
        self._nodes = sink + 1
        self._makers = np.array([arrays + whole.maker[memory] for memory in self._memories], np.int64)

    def found(self, room: int) -> list[Without]:
        """What a pass may do without for no step to have more than `room` bytes in use, the best first."""
        result = list[Without]()
        for each in self._solved(room):
            one = dict.fromkeys((self._memories[at] for at in np.flatnonzero(each.anew)), ANEW)
            one |= dict.fromkeys((self._memories[at] for at in np.flatnonzero(each.away)), AWAY)
            if one not in result:
                result.append(one)
        return result[:FOUND]

    def _solved(self, room: int) -> list[_Solved]:
        """The cuts by which no step seems to have more than `room` bytes in use, or least too much."""
        whole, limit = self._whole, room / GB
        turn_ms = whole.clock[whole.turn]
        prices, link, hope, best, since = np.zeros(len(self._load)), 0.0, 1.0, 0.0, 0
        base, solved = self._load_without(), list[_Solved]()
        for _ in range(STEPS):
            each = self._cut(prices, link)
            solved.append(each)
            bound = each.paid + float(prices @ (base - limit)) - link * turn_ms
            over, late = each.load - limit, each.copies - turn_ms
            over[(prices <= 0) & (over < 0)] = 0.0
            late = 0.0 if link <= 0 and late < 0 else late
            square = float(over @ over) + late**2
            if square == 0:
                break
            since = 0 if bound > best + 1e-3 else since + 1
            best = max(best, bound)
            if since == PATIENCE:
                hope, since = hope / 2, 0
            step = hope * (max(HOPE * best, 0.1 * turn_ms) - bound) / square
            prices, link = np.maximum(0, prices + step * over), max(0.0, link + step * late)
        worth = float(prices.sum())
        return sorted(solved, key=lambda each: self._ms(each, limit, worth, link))

    def _ms(self, solved: _Solved, limit: float, worth: float, link: float) -> float:
        """What a cut comes to, with what is too much at these prices."""
        late = max(0.0, solved.copies - self._whole.clock[self._whole.turn])
        return solved.ms + BEYOND * (worth * max(0.0, float(solved.load.max()) - limit) + link * late)

    def _load_without(self) -> np.ndarray:
        """GB in use in each step, with all made anew that can be, and the rest evicted."""
        anew = self._may[0]
        return self._load_with([(anew, self._start[0], self._first), (~anew, self._start[1], self._first)])

    def _load_with(self, gone: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
        """GB in use in each step, without some arrays from steps to before others."""
        change = np.zeros(len(self._load) + 1)
        for which, start, stop in gone:
            np.add.at(change, start[which], -self._sizes[which])
            np.add.at(change, stop[which], self._sizes[which])
        return self._load + np.cumsum(change)[:-1]

    def _cut(self, prices: np.ndarray, link: float) -> _Solved:
        """The minimum cut by the prices of a GB in each step, and of a ms of copies."""
        from blobmem.net.plan import kernels  # its compiler takes a while to import

        anew = self._may[0]
        until = np.concatenate([[0.0], np.cumsum(prices)])
        kept = self._sizes * (until[self._first] - until[np.where(anew, *self._start)])
        saved = self._sizes * np.maximum(0.0, until[self._back] - until[self._start[1]])
        away = np.where(self._may[1], kept - saved + (link / BUSY + ASIDE) * self._copy_ms, np.inf)
        paid, capacities = np.minimum(np.minimum(kept, away), DEAREST), self._capacities.copy()
        capacities[self._priced[:, 0]] = (paid[self._priced[:, 1]] * UNITS).astype(np.int64) + 1
        flow, level = kernels.max_flow(self._tails, self._heads, capacities, self._nodes)
        again = anew & (level[self._makers] >= 0)
        gone = ~again & (away < kept)
        load = self._load_with([(again, self._start[0], self._first), (gone, self._start[1], self._back)])
        ms = float(self._units_ms[level[self._units] >= 0].sum())
        beside = float(paid[~anew].sum())
        return _Solved(again, gone, load, ms, float(self._copy_ms[gone].sum()) / BUSY, flow / UNITS + beside)
