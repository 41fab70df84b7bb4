"""Which arrays are made anew in rounds, as often as it takes, where a pass has room for few of them at a time.

The pass is walked through step by step. While more is in use than there is room for, an array is let go: that which is
made again in least time for its bytes and the time until it is needed next, which is known. What a step of backward
needs and is gone is made just before it, in a round, with all that has to be made for it; what a round makes by the way
stays as long as there is room. So does what was evicted and has come back, just before it is needed or, where there is
room, while the link has time.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory import SyncedMemory
from blobmem.net.plan.again import NORMS, Round
from blobmem.net.plan.choice import ANEW, LATE, Kind, Pass
from blobmem.net.plan.heirs import IN_PLACE

POWERS = (0.5, 1.0)
"""Of the time until an array is needed next, by which its bytes count as freed: walks that are compared."""

WALKS, FEW = 150, 200
"""How many other sets of evicted arrays are tried, where there are no more kinds of arrays than so many; of more kinds
fewer, as each walk takes longer."""

IDLE = 50
"""So many that are no better one after the other are the last."""


class Walked(NamedTuple):
    """The rounds of a pass.

    Attributes:
        rounds: in their order.
        away: what is evicted beside.
        ms: what the calls in them take, and how long copies are waited for as they come back.
        over: how many bytes are too much.
    """

    rounds: list[Round]
    away: Collection[SyncedMemory]
    ms: float
    over: int


def walked(whole: Pass, room: int, away: Collection[SyncedMemory] = (), walks: int = WALKS) -> Walked:
    """The rounds with which no step has more than `room` bytes in use, as far as that can be.

    What is `away` is evicted, and what there is no room to make; then others, while that takes less time.
    """
    kinds = frozenset(whole.kind[memory] for memory in away)
    found = [_Search(whole, room, power, kinds) for power in POWERS]
    return min(found, key=lambda each: _rank(each.best)).improved(walks)


def glance(whole: Pass, room: int) -> tuple[int, float]:
    """How many bytes too much the first walks need, and the ms of the pass by them, if not too much."""
    over, ms = min(_rank(_Search(whole, room, power, frozenset()).best) for power in POWERS)
    return over, whole.clock[-1] + ms


def _rank(found: Walked) -> tuple[int, float]:
    return found.over, found.ms


class _Search:
    """Walks with one of the `POWERS`, with more, fewer or other arrays evicted: all slices of one together.

    Attributes:
        best: the best so far.
    """

    def __init__(self, whole: Pass, room: int, power: float, kinds: frozenset[Kind]) -> None:
        self._whole, self._room, self._power, self._kinds = whole, room, power, kinds
        self._last, self.best = self._walk(kinds)
        while not self._last.short <= {*self.best.away}:
            self._kinds |= {whole.kind[memory] for memory in self._last.short}
            self._last, self.best = self._walk(self._kinds)

    def improved(self, walks: int) -> Walked:
        """The best of so many walks more, fewer in a large pass, each of which changes something of the best so far, by
        draws from a fixed seed."""
        draws, idle, seen = random.Random(0), 0, {self._kinds}
        for _ in range(int(walks * min(1.0, FEW / max(len(self._whole.alike), 1)) ** 2)):
            if self.best.ms == 0 or idle == IDLE:
                break
            kinds = self._changed(draws)
            if kinds in seen:
                continue
            seen.add(kinds)
            last, found = self._walk(kinds)
            idle = 0 if _rank(found) < _rank(self.best) else idle + 1
            if _rank(found) <= _rank(self.best):
                self._last, self.best, self._kinds = last, found, kinds
        return self.best

    def _walk(self, kinds: Iterable[Kind]) -> tuple[_Walk, Walked]:
        whole = self._whole
        arrays = [
            memory for kind in sorted(kinds) for memory in whole.alike[kind] if LATE in whole.arrays[memory].start
        ]
        away, ms = _sent(whole, arrays)
        walk = _Walk(whole, self._room, away, self._power)
        for step in range(len(whole.load)):
            walk.take(step)
        late = max(0.0, ms - whole.clock[whole.turn])
        return walk, Walked(walk.rounds, [*away], walk.ms + late, walk.over)

    def _changed(self, draws: random.Random) -> frozenset[Kind]:
        """What is evicted now, and something that would spare time, or without something."""
        spared = self._spared(draws)
        which, more, less = draws.random(), list[Kind](), list[Kind]()
        if spared and which < _ADDS:
            more = draws.choices([*spared], weights=[*spared.values()], k=draws.choice(_CHANGES))
        if self._kinds and which > 1 - _LEAVES:
            less = draws.sample(sorted(self._kinds), k=1)
        return (self._kinds | {*more}) - {*less}

    def _spared(self, draws: random.Random) -> dict[Kind, float]:
        """What it would spare to evict others, for their bytes or for a lower power of these."""
        whole, spared = self._whole, defaultdict[Kind, float](float)
        for memory, ms in self._last.spared.items():
            if whole.kind[memory] not in self._kinds and ms > 0:
                spared[whole.kind[memory]] += ms
        power = draws.choice(_BYTES)
        return {kind: ms / self._bytes(kind) ** power for kind, ms in sorted(spared.items())}

    def _bytes(self, kind: Kind) -> int:
        return sum(self._whole.arrays[memory].size for memory in self._whole.alike[kind])


_ADDS, _LEAVES = 0.6, 0.55
"""The parts of changes that evict more, and that evict something less; some do both."""

_CHANGES = (1, 1, 2, 4)
"""How many arrays more are evicted at a time."""

_BYTES = (0.0, 0.5, 1.0)
"""Powers of an array's bytes for which it spares so much."""


def _sent(whole: Pass, away: Collection[SyncedMemory]) -> tuple[dict[SyncedMemory, int], float]:
    """The step by which each has been copied away, and the ms at which all have."""
    result, done, clock = dict[SyncedMemory, int](), 0.0, whole.clock
    for memory in sorted(away, key=lambda memory: whole.arrays[memory].start[LATE]):
        array = whole.arrays[memory]
        done = max(done, clock[array.start[LATE]]) + whole.times.copy_ms(array.size)
        result[memory] = min(bisect_left(clock, done), whole.turn)
    return result, done


def _behind_each_other(lists: Iterable[Sequence[Any]], *columns: int) -> tuple[np.ndarray, np.ndarray]:
    """What lists have, in so many columns, and where each begins, and the last one ends."""
    found = [*lists]
    places = np.cumsum([0, *map(len, found)], dtype=np.int64)
    return np.array([*chain.from_iterable(found)], np.int64).reshape(-1, *columns), places


class _Walk:
    """A pass that is walked through.

    Attributes:
        rounds, ms, over: so far, as `Walked` has them.
        spared: of what could have been evicted, the milliseconds of calls that would not have run again.
        short: what has to be evicted for want of room to make it, or something of it.
    """

    def __init__(self, whole: Pass, room: int, away: Mapping[SyncedMemory, int], power: float) -> None:
        self.whole, self._room, self._away, self._power = whole, room, away, power
        self.spared, self.short = defaultdict[SyncedMemory, float](float), set[SyncedMemory]()
        self.rounds, self.ms, self.over = list[Round](), 0.0, 0
        uses, reads = whole.again.uses, dict[SyncedMemory, list[int]]()
        self._fixed, self._starts = whole.load.copy(), defaultdict[int, list[SyncedMemory]](list)
        self._ends = defaultdict[int, list[SyncedMemory]](list)
        for memory, array in whole.arrays.items():
            if ANEW in array.start:
                reads[memory] = [whole.turn + bisect_right(whole.starts[1], at) - 1 for at in uses.read[memory]]
                self._fixed[array.start[ANEW] : reads[memory][-1] + 1] -= array.size
                self._starts[array.start[ANEW]].append(memory)
                self._ends[reads[memory][-1]].append(memory)
        for memory, (_, start) in whole.held.items():
            self._starts[start].append(memory)
            reads[memory] = []
        self._reads = reads
        self._size = {memory: each.size for memory, each in whole.arrays.items()}
        self._size.update((memory, size) for memory, (size, _) in whole.held.items())
        self._maker = {memory: uses.last_write(memory) for memory in reads}
        self._makes = defaultdict[int, list[SyncedMemory]](list)
        for memory, at in self._maker.items():
            self._makes[at].append(memory)
        self._number: dict[SyncedMemory | None, int] = {memory: at for at, memory in enumerate(reads)}
        calls = range(len(whole.inputs))
        self._read = _behind_each_other(reads.values())
        self._written = _behind_each_other([self._number[each] for each in self._makes.get(at, ())] for at in calls)
        self._taken = _behind_each_other(map(self._rows, calls), 4)
        self._needed = defaultdict[int, list[SyncedMemory]](list)  # by each step of backward
        for memory, steps in reads.items():
            for step in steps:
                self._needed[step].append(memory)
        self._there, self._held = dict[SyncedMemory, None](), 0  # and bytes of it
        self._gone = set[SyncedMemory]()
        self._costs = dict[SyncedMemory, float]()  # ms in which each is made again, as long as none of these changes:
        self._rely = defaultdict[SyncedMemory, set[SyncedMemory]](set)  # on what is there and what is gone
        self._now, self._begins = 0.0, list[float]()  # of all that has run
        self._loads = np.empty(4 * len(whole.load), np.int64)  # what was in use meanwhile
        self._used = dict[SyncedMemory, int]()  # by which of these for the last time
        self._copies = list[tuple[float, float]]()  # back, from when to when
        self._leaves = defaultdict[int, list[SyncedMemory]](list)
        for memory, step in away.items():
            self._leaves[step].append(memory)

    def take(self, step: int) -> None:
        """The next step."""
        for memory in self._starts[step]:
            self._have(memory)
        for memory in self._leaves[step]:
            self._drop(memory)
        needed, ms = {*self._needed[step]}, self.whole.clock[step + 1] - self.whole.clock[step]
        if step >= self.whole.turn:
            if not needed <= {*self._there, *self._away}:
                self._round(step, needed)
            self._fetch(needed, step, int(self._fixed[step]), needed)
        self._run(step, int(self._fixed[step]), needed, ms)
        for memory in self._ends[step]:
            self._drop(memory)

    def _have(self, memory: SyncedMemory) -> None:
        if memory not in self._there:
            self._there[memory] = None
            self._held += self._size[memory]
            self._used[memory] = len(self._begins)

    def _drop(self, memory: SyncedMemory) -> None:
        """It is not there any more, nor was it since it was used last: it has been evicted, or is gone."""
        if self._there.pop(memory, self) is not self:
            self._held -= self._size[memory]
            self._loads[self._used[memory] + 1 : len(self._begins)] -= self._size[memory]
            if memory not in self._away:
                self._gone.add(memory)
                self._forget(memory)

    def _forget(self, memory: SyncedMemory) -> None:
        """It is gone, or there again, which others are made of."""
        for other in self._rely.pop(memory, ()):
            self._costs.pop(other, None)

    def _fetch(self, memories: Iterable[SyncedMemory], step: int, other: int, pinned: Collection[SyncedMemory]) -> None:
        """Have those that are evicted back, as late as will do and since when there is room, beside so many other bytes
        and what is pinned; else wait for them."""
        for memory in memories:
            if memory not in self._away or memory in self._there:
                continue
            size, end = self._size[memory], self._now
            self._fit(step, other + size, pinned)
            ms = self.whole.times.copy_ms(size)
            full = np.flatnonzero(self._loads[: len(self._begins)] + size > self._room)
            since = int(full[-1]) + 1 if full.size else 0
            earliest = self._begins[since] if since < len(self._begins) else self._now
            for begin, stop in reversed(self._copies):
                if end - ms < stop:
                    end = min(end, begin)
            if end - ms < earliest:
                end = max([earliest, *(stop for _, stop in self._copies)]) + ms
            insort(self._copies, (end - ms, end))
            self._loads[bisect_left(self._begins, end - ms) : len(self._begins)] += size
            self._have(memory)
            self.ms += max(0.0, end - self._now)
            self._now = max(self._now, end)

    def _run(self, step: int, other: int, pinned: Collection[SyncedMemory], ms: float) -> bool:
        """Let so many ms go by, with room for so many other bytes, and say whether there is."""
        fits = self._fit(step, other, pinned)
        at = len(self._begins)
        for memory in pinned:
            if memory in self._there:
                self._used[memory] = at
        if at == self._loads.size:
            self._loads = np.append(self._loads, self._loads)
        self._loads[at] = other + self._held
        self._begins.append(self._now)
        self._now += ms
        return fits

    def _fit(self, step: int, other: int, pinned: Collection[SyncedMemory]) -> bool:
        """Let arrays go until there is room for so many other bytes, and say whether there is."""
        over = other + self._held - self._room
        free = [memory for memory in self._there if memory not in pinned]
        uses, now = self._next(step) if over > 0 else {}, self.whole.clock[step]
        while over > 0 and free:
            least = min(free, key=lambda memory: self._worth(memory, uses[memory] - now))
            free.remove(least)
            self._drop(least)
            over -= self._size[least]
        self.over = max(self.over, over)
        return over <= 0

    def _worth(self, memory: SyncedMemory, until: float) -> float:
        if until == math.inf:
            return 0.0
        ms = self.whole.times.copy_ms(self._size[memory]) if memory in self._away else self._cost(memory)
        return ms / (self._size[memory] * max(until, 1e-3) ** self._power)

    def _cost(self, memory: SyncedMemory) -> float:
        """The ms in which it is made again of what is there."""
        found = self._costs.get(memory)
        if found is None:
            runs = self._runs([memory])
            found = self._costs[memory] = self._ms(runs)
            for at in runs:
                for source, _, _, same, _ in self.whole.inputs[at]:
                    self._rely[source].add(memory)
                    if same is not None:
                        self._rely[same].add(memory)
        return found

    def _next(self, step: int) -> dict[SyncedMemory, float]:
        """When, in ms, each is needed next, to be read or to make another of it."""
        from blobmem.net.plan import kernels  # its compiler takes a while to import

        gone = np.fromiter((memory in self._gone for memory in self._reads), bool, len(self._reads))
        times = kernels.next_uses(step, self.whole.begins, *self._read, gone, *self._written, *self._taken)
        return dict(zip(self._reads, times.tolist(), strict=True))

    def _rows(self, at: int) -> list[tuple[int, int, int, bool]]:
        """What a call of forward reads, as `kernels.next_uses` wants it."""
        number, maker = self._number, self._maker
        return [
            (number[source] if maker.get(source) == made else -1, number.get(same, -1), made, stays)
            for source, made, stays, same, _ in self.whole.inputs[at]
        ]

    def _runs(self, memories: Iterable[SyncedMemory]) -> set[int]:
        """The calls that make these of what is there."""
        runs, waiting = set[int](), [self._maker[memory] for memory in memories]
        while waiting:
            at = waiting.pop()
            if at not in runs:
                runs.add(at)
                waiting += self._sources(at)
        return runs

    def _sources(self, at: int) -> list[int]:
        """The calls whose outputs a call needs that are not there."""
        return [
            made
            for source, made, stays, same, _ in self.whole.inputs[at]
            if not (stays and source not in self._gone) and (same is None or same in self._gone)
        ]

    def _ms(self, runs: Iterable[int]) -> float:
        whole, units = self.whole, dict[int, float]()
        for at in runs:
            unit = whole.unit[at]
            units[unit] = max(units.get(unit, 0.0), whole.cost[at])
        return sum(units.values())

    def _round(self, step: int, needed: set[SyncedMemory]) -> None:
        """Make what a step needs and is gone."""
        whole, targets = self.whole, [memory for memory in self._needed[step] if memory in self._gone]
        gone, order = {*self._gone}, sorted(self._runs(targets))
        ms = self._ms(order)
        self.ms += ms
        without = dict[SyncedMemory, set[int]]()
        for memory in [memory for at in order for memory in self._makes.get(at, ())]:
            if memory in gone and memory in whole.arrays and LATE in whole.arrays[memory].start:
                self._gone.discard(memory)
                without[memory] = self._runs(each for each in targets if each is not memory)
                self.spared[memory] += ms - self._ms(without[memory])
                self._gone.add(memory)
        first, last = dict[SyncedMemory, int](), dict[SyncedMemory, int]()
        for at in order:
            for source, _, stays, same, _ in whole.inputs[at]:
                if not (stays and source not in gone) and same is not None and same not in gone:
                    source = same
                first.setdefault(source, at)
                last[source] = at
        uses, made, held = self._next(step), set[SyncedMemory](), dict[SyncedMemory, int]()
        other, fits = int(self._fixed[step] - whole.born[step]), True
        ran = set[int]()
        for at in order:
            each = whole.again.uses.forward[at]
            pinned = needed | {memory for memory, until in last.items() if until >= at}
            coming = [memory for memory, since in first.items() if since == at]
            self._fetch(coming, step, other + sum(held.values()), pinned)
            if each.op in IN_PLACE:
                for source in [source for source in held if last[source] == at and source in whole.reads[at]]:
                    del held[source]
            norm, finals = each.op in NORMS, {*self._makes.get(at, ())}  # whose top may be what it keeps
            for memory, nbytes, optional in whole.writes[at]:
                if memory in finals and memory in gone:
                    continue
                if not (optional or norm) or last.get(memory, -1) > at:
                    held[memory] = nbytes
            for memory in finals:
                if memory in gone and (uses[memory] < math.inf or last.get(memory, -1) > at):
                    held.pop(memory, None)
                    self._have(memory)
                    self._gone.discard(memory)
                    self._forget(memory)
                    made.add(memory)
            took = 0.0 if whole.unit[at] in ran else whole.cost[at]
            ran.add(whole.unit[at])
            if not self._run(step, other + sum(held.values()) + whole.scratch[at], pinned, took) and fits:
                fits = False
                instead = [memory for memory, runs in without.items() if at not in runs]
                self.short.update(sorted(instead, key=self._size.__getitem__)[:1])
            for memory in [memory for memory in held if last.get(memory, -1) <= at]:
                del held[memory]
        use = self._reads[targets[0]].index(step)
        self.rounds.append(Round(targets[0], use, made & self._there.keys(), gone))
