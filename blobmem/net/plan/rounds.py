"""Which arrays are made anew in rounds, as often as it takes, where a pass has room for few of them at a time.

The pass is walked through step by step. While more is in use than there is room for, an array is let go: that which is
made again in least time for its bytes and the time until it is needed next, which is known. What a step of backward
needs and is gone is made just before it, in a round, with all that has to be made for it; what a round makes by the way
stays as long as there is room.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from blobmem.memory import SyncedMemory
from blobmem.net.plan.again import Round
from blobmem.net.plan.choice import ANEW, LATE, Pass
from blobmem.net.plan.heirs import IN_PLACE

POWERS = (0.5, 1.0)
"""Of the time until an array is needed next, by which its bytes count as freed: walks that are compared."""


PARTS = 6
"""In how many steps it is chosen what is evicted: each by what it spares beside those before."""


class Walked(NamedTuple):
    """The rounds of a pass.

    Attributes:
        rounds: in their order.
        away: what is evicted beside.
        ms: what the calls in them take, and the copies, if they are waited for.
        over: how many bytes are too much.
    """

    rounds: list[Round]
    away: Collection[SyncedMemory]
    ms: float
    over: int


def walked(whole: Pass, room: int) -> Walked:
    """The rounds with which no step has more than `room` bytes in use, as far as that can be.

    What there is no room to make is evicted; then what spares most calls that run again for its bytes, while the link
    has time for it.
    """
    found = list[Walked]()
    for power in POWERS:
        away: dict[SyncedMemory, int] = {}
        for part in range(1, PARTS + 1):
            walk = _Walk(whole, room, away, power)
            for step in range(len(whole.load)):
                walk.take(step)
            ms = walk.ms + sum(2 * whole.times.copy_ms(whole.arrays[memory].size) for memory in away)
            found.append(Walked(walk.rounds, [*away], ms, walk.over))
            if walk.short:
                away = _sent(whole, [*away, *walk.short]) or away
                continue
            sent = len(away)
            for memory in sorted(walk.spared, key=lambda memory: -walk.spared[memory] / whole.arrays[memory].size):
                away = _sent(whole, [*away, memory], part / PARTS * whole.clock[whole.turn]) or away
            if len(away) == sent:
                break
    return min(found, key=lambda each: (each.over, each.ms))


def _sent(whole: Pass, away: Collection[SyncedMemory], most: float = math.inf) -> dict[SyncedMemory, int] | None:
    """The step by which each has been copied away, None if copies take more than `most` ms, or, where that is a number,
    longer than forward."""
    result, done, clock = dict[SyncedMemory, int](), 0.0, whole.clock
    for memory in sorted(away, key=lambda memory: whole.arrays[memory].start[LATE]):
        array = whole.arrays[memory]
        done = max(done, clock[array.start[LATE]]) + whole.times.copy_ms(array.size)
        result[memory] = min(bisect_left(clock, done), whole.turn)
    copies = sum(whole.times.copy_ms(whole.arrays[memory].size) for memory in away)
    return result if most == math.inf or (copies <= most and done <= clock[whole.turn]) else None


class _Walk:
    """A pass that is walked through.

    Attributes:
        rounds, ms, over: so far, as `Walked` has them, without copies.
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
        self._needed = defaultdict[int, list[SyncedMemory]](list)  # by each step of backward
        for memory, steps in reads.items():
            for step in steps:
                self._needed[step].append(memory)
        self._there = dict[SyncedMemory, None]()
        self._gone = set[SyncedMemory]()
        self._leaves = defaultdict[int, list[SyncedMemory]](list)
        for memory, step in away.items():
            self._leaves[step].append(memory)

    def take(self, step: int) -> None:
        """The next step."""
        for memory in self._starts[step]:
            self._there[memory] = None
        for memory in self._leaves[step]:
            self._there.pop(memory, None)
        if step < self.whole.turn:
            self._fit(step, int(self._fixed[step]), ())
            return
        needed = {*self._needed[step]}
        if not needed <= {*self._there, *self._away}:
            self._round(step, needed)
        self._fit(step, int(self._fixed[step]) + self._back(needed), needed)
        for memory in self._ends[step]:
            if self._there.pop(memory, self) is not self:
                self._gone.add(memory)

    def _back(self, memories: Iterable[SyncedMemory]) -> int:
        """Bytes of those that come back."""
        return sum(self._size[memory] for memory in memories if memory in self._away)

    def _fit(self, step: int, other: int, pinned: Collection[SyncedMemory]) -> bool:
        """Let arrays go until there is room for so many other bytes, and say whether there is."""
        over = other + sum(map(self._size.__getitem__, self._there)) - self._room
        free = [memory for memory in self._there if memory not in pinned]
        uses, now = self._next(step) if over > 0 else {}, self.whole.clock[step]
        while over > 0 and free:
            least = min(free, key=lambda memory: self._worth(memory, uses[memory] - now))
            free.remove(least)
            del self._there[least]
            if least not in self._away:
                self._gone.add(least)
            over -= self._size[least]
        self.over = max(self.over, over)
        return over <= 0

    def _worth(self, memory: SyncedMemory, until: float) -> float:
        if memory in self._away:
            return math.inf  # its copy is waited for
        if until == math.inf:
            return 0.0
        return self._ms(self._runs([memory])) / (self._size[memory] * max(until, 1e-3) ** self._power)

    def _next(self, step: int) -> dict[SyncedMemory, float]:
        """When, in ms, each is needed next, to be read or to make another of it."""
        clock, result = self.whole.clock, dict[SyncedMemory, float]()
        for memory, steps in self._reads.items():
            at = bisect_left(steps, step)
            result[memory] = clock[steps[at]] if at < len(steps) else math.inf
        run: dict[int, float] = {}
        for at in reversed(range(len(self.whole.inputs))):
            when = run.get(at, math.inf)
            for memory in self._makes.get(at, ()):
                if memory in self._gone:
                    when = min(when, result[memory])
            if when == math.inf:
                continue
            for source, made, stays, same, _ in self.whole.inputs[at]:
                if source in result and self._maker[source] == made:
                    if source in self._gone and same is not None and same not in self._gone:
                        source = same
                    result[source] = min(result[source], when)
                elif not stays and same in result and same not in self._gone:
                    result[same] = min(result[same], when)
                elif not stays:
                    run[made] = min(run.get(made, math.inf), when)
        return result

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
        for at in order:
            each = whole.again.uses.forward[at]
            if each.op in IN_PLACE:
                for source in [source for source in held if last[source] == at and source in whole.reads[at]]:
                    del held[source]
            norm, finals = each.op == "batch_norm_forward", {*self._makes.get(at, ())}  # whose top may be what it keeps
            for memory, nbytes, optional in whole.writes[at]:
                if memory in finals and memory in gone:
                    continue
                if not (optional or norm) or last.get(memory, -1) > at:
                    held[memory] = nbytes
            for memory in finals:
                if memory in gone and (uses[memory] < math.inf or last.get(memory, -1) > at):
                    held.pop(memory, None)
                    self._there[memory] = None
                    self._gone.discard(memory)
                    made.add(memory)
            pinned = needed | {memory for memory, until in last.items() if until >= at}
            back = self._back(memory for memory, since in first.items() if since <= at <= last[memory])
            if not self._fit(step, other + sum(held.values()) + back + whole.scratch[at], pinned) and fits:
                fits = False
                instead = [memory for memory, runs in without.items() if at not in runs]
                self.short.update(sorted(instead, key=self._size.__getitem__)[:1])
            for memory in [memory for memory in held if last.get(memory, -1) <= at]:
                del held[memory]
        use = self._reads[targets[0]].index(step)
        self.rounds.append(Round(targets[0], use, made & self._there.keys(), gone))
