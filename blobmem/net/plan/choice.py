"""Which arrays a pass does without between forward and backward, where there is not room for all, and how: made anew by
calls that run again, or evicted.

Greedily: while some step has more in use than there is room for, what takes most off that (bytes over the room, over
all steps) for the time that it adds; or from all made anew that can be, while there is room, what costs most is kept or
evicted after all. What is made anew lives from the first call that needs it to the last that reads
it in backward, so that of a chain of arrays some are kept or evicted, from which those between are made at once. A
copy is reckoned at a part of its time, since the link could bring something else, and at all that copies take beyond
the time for which forward, or backward, computes meanwhile.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from blobmem.devices.pages import round_up
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.views import ALIGNMENT
from blobmem.net.fusion import groups
from blobmem.net.plan.again import NORMS, OPTIONAL, Again, by_one
from blobmem.net.plan.evict import Candidate, loads
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.places import Draft
from blobmem.net.plan.times import COPIES, Times
from blobmem.net.schedule import Unit

ROUNDS = 12
"""How often it is looked at what is in use while arrays are made, and more is done without where that is too much."""

BUSY = 0.85
"""What part of the time for which forward, or backward, computes copies may take: they wait for places, too."""

SMALL = 1 << 14
"""Arrays of less than such a part of all that is in use in the fullest step are left alone."""

ABOUT = 0.9
"""What is worth this much of what was found for the next best, when that was looked at last, is taken."""

LITTLE = 1 / 8
"""Such a part of the largest array that may be held is little."""

KEPT, ANEW, AWAY = "kept", "made anew", "evicted"
BACK, LATE = "evicted, and waited for as it comes back", "evicted, and waited for both ways"

WAYS = KEPT, ANEW, AWAY, BACK, LATE

_WAITS = {BACK: 1, LATE: 2}
"""How many copies are waited for."""

_COPIES = (AWAY, BACK, LATE)

Change = tuple[int, int, int]
"""From one step to before another, so many bytes more."""

Kind = tuple[int, str, int]
"""Of an array the layer, the op, and which operand that made it: of slices of one it is the same."""

Made = tuple[frozenset[int], frozenset[SyncedMemory]]
"""Of what is made anew the calls that do it, and the arrays that they need, or make by the way."""

_NOTHING: Made = frozenset(), frozenset()

_KEEP = MappingProxyType[SyncedMemory, str]({})
"""To begin with all arrays kept."""


class Array(NamedTuple):
    """An array that a pass may do without for a while.

    Attributes:
        size: its bytes in the arena.
        first: the step of backward that reads it first.
        start: by each way in which that may be, the first step that does without it.
    """

    size: int
    first: int
    start: dict[str, int]


class Choice(NamedTuple):
    """What is made anew, and what is evicted; what is held for that (`Again`); how many bytes are too much; and the
    milliseconds that it is reckoned to add."""

    anew: set[SyncedMemory]
    away: set[SyncedMemory]
    held: Collection[SyncedMemory]
    over: int
    ms: float


class _Input(NamedTuple):
    """What a call of forward reads.

    Attributes:
        source: the memory.
        made: the call that made it.
        stays: whether backward finds it there, if it is not made anew.
        same: what has the same numbers, and stays, if not that is made anew.
        known: whether it is one of those that may be done without, or held.
    """

    source: SyncedMemory
    made: int
    stays: bool
    same: SyncedMemory | None
    known: bool


class Pass:
    """A pass in which nothing is made anew, and nothing evicted.

    Args:
        again: of its calls.
        drawn: of its schedules.
        found: what may be evicted.
        times: of calls.

    Attributes:
        again: what may run again.
        times: of calls.
        load, born: bytes in use in each step, and those of them that were not before it.
        turn: the first step of backward.
        clock, begins: milliseconds before each step, and at the end.
        writes: of each call of forward what it writes, the bytes of that, and whether it need not.
        reads, inputs: of each call of forward, what it reads.
        unit: of each call of forward the first of those that it may run as one with.
        members: of such a first one, all of them.
        joined: such first ones with which the call before them, too, runs as one: what they, and those that they run as
            one with, take beside it is the first one's cost.
        cost: of each, the milliseconds that it adds; those of what may run as one are put down to the first.
        least: the same, where batch norms make their results alone, or what they keep.
        scratch: of each, bytes while it runs.
        brought: the steps of backward that bring evicted state; of each the bytes, and the milliseconds of a copy.
        starts: of forward and of backward, the call that each step begins with.
        arrays: what may be made anew or evicted.
        number, maker: of each, where it is in that order, and the call that makes it.
        kind, alike: of each its `Kind`, and those of each kind.
        copy, ready: of each, the milliseconds that a copy takes up (`BUSY`), and when that may begin.
        leaving: their numbers in the order of that.
        held: of arrays of which others can be made, and which backward does not need, those that are `LITTLE`, and of
            the others about the square root of their number: bytes of each, and the first step that does not need it.
            They are there as long as others are made of them, so that not all of these are made at once.
        bit: of each of the arrays and of what is held, a bit of its own.
        made: of each call of forward, which of the arrays it writes.
        looks: of each call of forward, the bits of what matters to how it is made to run again, its own among them.
    """

    def __init__(self, again: Again, drawn: Draft, found: Iterable[Candidate], times: Times) -> None:
        self.again, self.times, forward = again, times, again.uses.forward
        self.load = loads(drawn)
        self.born = np.zeros_like(self.load)
        for life in drawn.lives.arena:
            self.born[life.first] += life.nbytes
        self.turn = len(drawn.units[0])
        calls = [unit.calls[-1] for unit in chain(*drawn.units)]  # copies of state are beside them
        self.begins = np.cumsum([0.0, *(0.0 if each.op in COPIES else times.ms(each) for each in calls)])
        brings = [at for at, call in enumerate(calls) if at >= self.turn and call.op == "fetch"]
        sizes = [round_up(calls[at].operand(0).nbytes, ALIGNMENT) for at in brings]
        copies = [times.ms(calls[at]) for at in brings]
        self.brought = np.array(brings, np.int64), np.array(sizes, np.int64), np.array(copies, np.float64)
        self.clock: list[float] = self.begins.tolist()
        self.writes = [self._written(at) for at in range(len(forward))]
        # in the order of operands, not of a set, for plans to be the same in every process
        operands = ((each for each in call.present() if each.intent is Intent.READ) for call in forward)
        self.reads = [dict.fromkeys(each.memory for each in of_call) for of_call in operands]
        self.unit, self.cost, self.least, self.scratch = list[int](), list[float](), list[float](), list[int]()
        self.members: dict[int, range] = {}
        self.joined = set[int]()
        reads = ((at, source) for at, each in enumerate(self.reads) for source in each)
        self._takers = Counter(again.maker(source, at) for at, source in reads)
        before: Unit | None = None
        for unit in drawn.units[0]:
            self.members[unit.start] = range(unit.start, unit.stop)
            for at in self.members[unit.start]:
                self.unit.append(unit.start)
                each = again.call(unit.calls[-1] if at == unit.start else forward[at])
                self.cost.append(times.ms(each))
                self.least.append(times.ms(by_one(each)))
                self.scratch.append(unit.scratch)
            self._join(before, unit)
            before = unit
        self.starts = [[unit.start for unit in units] for units in drawn.units]
        last = {operand.memory: at for at, each in enumerate(forward) for operand in each.present()}
        nbytes = {memory: size for written in self.writes for memory, size, _ in written}
        again.held = _held({memory: nbytes[memory] for memory in again.bridges()})
        self.held = {memory: (nbytes[memory], bisect_right(self.starts[0], last[memory])) for memory in again.held}
        own = (each for each in found if each.until == 0 and not each.late)
        self.arrays = self._arrays(drawn, {each.memory: each for each in own})
        self.number = {memory: at for at, memory in enumerate(self.arrays)}
        self.kind, self.alike = self._kinds()
        self.maker = {memory: again.maker(memory) for memory in self.arrays}
        alone = np.array([times.copy_ms(each.size) for each in self.arrays.values()])
        gone = np.array([each.start.get(AWAY, 0) for each in self.arrays.values()], np.int64)
        self.ready, self.copy = self.begins[gone] - alone, alone / BUSY
        self.leaving = np.argsort(self.ready, kind="stable")
        self.inputs = [self._inputs(at) for at in range(len(forward))]
        self.bit = {memory: 1 << at for at, memory in enumerate([*self.arrays, *self.held])}
        self.looks = [self._looks(at) for at in range(len(forward))]
        self.made = [[memory for memory, *_ in written if memory in self.arrays] for written in self.writes]

    def _join(self, before: Unit | None, unit: Unit) -> None:
        """Where a unit of forward runs again as one with the call before it, note what that takes more."""
        if before is None or len(before.calls) > 1 or self._takers[before.start] > 1:
            return
        first, *rest = (self.again.call(each) for each in (*before.calls, *(unit.calls[:-1] or unit.calls)))
        uses = self.again.uses
        if any(memory in uses.read and uses.last_write(memory) == before.start for memory in first.written_memories()):
            return
        group = groups([first, *rest], self.again.ops, self.again.free).get(0)
        if group is not None and group.stop > len(rest):
            self.joined.add(unit.start)
            for known, each in ((self.cost, group.call), (self.least, by_one(group.call))):
                known[unit.start] = max(0.0, self.times.ms(each) - self.times.ms(first))

    def _kinds(self) -> tuple[dict[SyncedMemory, Kind], dict[Kind, list[SyncedMemory]]]:
        forward, kind, alike = self.again.uses.forward, dict[SyncedMemory, Kind](), dict[Kind, list[SyncedMemory]]()
        for memory in self.arrays:
            maker = forward[self.again.maker(memory)]
            place = next(at for at, each in enumerate(maker.operands) if each is not None and each.memory is memory)
            kind[memory] = maker.layer, str(maker.op), place
            alike.setdefault(kind[memory], []).append(memory)
        return kind, alike

    def _written(self, at: int) -> list[tuple[SyncedMemory, int, bool]]:
        each = self.again.uses.forward[at]
        return [
            (operand.memory, self.again.nbytes(operand), OPTIONAL.get(str(each.op)) == place)
            for place, operand in enumerate(each.operands)
            if operand is not None and operand.intent is Intent.OVERWRITE
        ]

    def _arrays(self, drawn: Draft, found: Mapping[SyncedMemory, Candidate]) -> dict[SyncedMemory, Array]:
        uses, starts = self.again.uses, self.starts
        last = {operand.memory: at for at, each in enumerate(uses.forward) for operand in each.present()}
        own: Mapping[Hashable, Lifetime]
        own = {life.key: life for life in chain(drawn.lives.arena, *drawn.lives.turns.values())}
        read, offered = set[SyncedMemory]().union(*self.reads), {*self.again.offers}
        result = {}
        for memory in dict.fromkeys([*self.again.offers, *found]):
            places = [memory] if memory.reordered is None else [memory, memory.reordered.array]
            size = sum(round_up(own[place].nbytes, ALIGNMENT) for place in places if place in own)
            after, start = bisect_right(starts[0], last[memory]), dict[str, int]()
            if memory in offered:
                written = [optional for place, _, optional in self.writes[uses.last_write(memory)] if place is memory]
                start[ANEW] = after - (memory not in read and all(written))  # where it is not even made
            if memory in found:
                gone = bisect_left(self.clock, self.clock[after] + self.times.copy_ms(size))
                start[AWAY] = start[BACK] = gone
                start[LATE] = after
            first = self.turn + bisect_right(starts[1], uses.read[memory][0]) - 1
            start = {way: step for way, step in start.items() if step < first}
            if size * SMALL > self.load.max() and start:
                result[memory] = Array(size, first, start)
        return result

    def _inputs(self, at: int) -> list[_Input]:
        again, result = self.again, list[_Input]()
        for source in self.reads[at]:
            made, same = again.maker(source, at), again.same(source, at, {source})
            known = made == again.uses.last_write(source) and (source in self.arrays or source in self.held)
            other = None if same is None else same.memory
            result.append(_Input(source, made, again.kept(source, at, ()), other, known))
        if at in again.before:  # which has begun to fill what this goes on with
            before = again.before[at]
            filled = (memory for memory, *_ in self.writes[at] if again.maker(memory, at) == before)
            result += [_Input(memory, before, False, None, False) for memory in filled]
        return result

    def _looks(self, at: int) -> int:
        near = {memory for memory, *_ in self.writes[at]} | {*self.reads[at]}
        near.update(each.same for each in self.inputs[at] if each.same is not None)
        result = 0
        for memory in near:
            result |= self.bit.get(memory, 0)
        for other in self.members[self.unit[at]]:
            result |= self.bit_of(other)
        return result

    def bit_of(self, at: int) -> int:
        """The bit of a call of forward."""
        return 1 << len(self.arrays) + len(self.held) + at

    def chain(self, memory: SyncedMemory, wanted: set[SyncedMemory]) -> Made:
        """The calls that make it anew, where that is `wanted`; and the arrays that they need, or make by the way."""
        runs, needs, inputs = set[int](), set[SyncedMemory](), self.inputs
        waiting = [self.maker[memory]]
        while waiting:
            at = waiting.pop()
            if at in runs:
                continue
            runs.add(at)
            for other in self.made[at]:
                if other is not memory and other in wanted:
                    needs.add(other)
            for source, made, stays, same, known in inputs[at]:
                kept = stays and source not in wanted
                if not kept and same is not None and same not in wanted:
                    needs.add(same)
                elif known and source is not memory:
                    needs.add(source)
                elif not kept:
                    waiting.append(made)
        return frozenset(runs), frozenset(needs & self.bit.keys())

    def choose(
        self, room: int, price: float, sparing: bool = False, power: int = 1, begun: Mapping[SyncedMemory, str] = _KEEP
    ) -> Choice:
        """What to do without so that no step has more than `room` bytes in use, as far as that can be.

        `price` is the part of a copy's time that it is reckoned to take where the link has time for it. If `sparing`,
        it begins with all made anew that can be, in stretches from what is held, of which what there is room for is
        not: where one by one nothing helps but many, that finds them. Or it begins with what is `begun`, in what way
        each. What there is room for in the end is found by what it costs for its bytes to this power.
        """
        plans = list[Choice]()
        for first in (3, len(WAYS)):  # to wait for copies is for where there is no other way, or else for all
            state = _State(self, price, power)
            for memory, way in begun.items():
                state.settle(state.turn(memory, way))
            if sparing:
                for memory in [memory for memory, array in self.arrays.items() if ANEW in array.start]:
                    state.settle(state.turn(memory, ANEW))
                state.spared(room)
            for _ in range(ROUNDS):
                over = state.load + state.beside() - room
                if over.max() <= 0 or not any(
                    _reduce(state, over, WAYS[:ways]) for ways in range(first, len(WAYS) + 1)
                ):
                    break
            plans.append(state.spared(room))
            if plans[-1].over <= 0:
                break
        return min(plans, key=lambda each: each.over)


def _held(bridges: Mapping[SyncedMemory, int]) -> list[SyncedMemory]:
    """What is held (`Pass`) of what may be, of which the bytes are given."""
    little = LITTLE * max(bridges.values(), default=0)
    large = [memory for memory, nbytes in bridges.items() if nbytes > little]
    some = {*large[:: max(1, math.isqrt(len(large)))]}
    return [memory for memory, nbytes in bridges.items() if nbytes <= little or memory in some]


@dataclasses.dataclass(slots=True)
class _Trial:
    """How to take back what was tried of an array.

    Attributes:
        memory, was: which, and how it was done without.
        copying, coming: what was known of copies (`_State`).
        copies: milliseconds that they were reckoned to take, if they change.
        again: milliseconds that calls which run again take more.
        before, after: of what is made otherwise, the calls, and the arrays that they need.
        need, until: of what is needed from another step on, or up to another one, that step.
        looks: the bits (`Pass`) of what mattered to what it changes, where that is kept.
    """

    memory: SyncedMemory
    was: str
    copying: float | None
    coming: np.ndarray | None
    copies: float | None = None
    again: float = 0.0
    before: dict[SyncedMemory, Made] = dataclasses.field(default_factory=dict)
    after: dict[SyncedMemory, Made] = dataclasses.field(default_factory=dict)
    need: list[tuple[SyncedMemory, int]] = dataclasses.field(default_factory=list)
    until: list[tuple[SyncedMemory, int]] = dataclasses.field(default_factory=list)
    looks: int = 0


class _Known(NamedTuple):
    """What is known of doing without an array in another way, from when that was tried.

    Attributes:
        changes: of loads.
        ms: that calls which run again take more.
        copies: whether copies are others then, too, which take other times by now.
        looks: the bits (`Pass`) of what that depends on.
    """

    changes: list[Change]
    ms: float
    copies: bool
    looks: int


class _State:
    """What is done without so far, and what is tried.

    Attributes:
        way: how, of each array that is not kept.
        load: bytes in use in each step, with what is settled.
    """

    def __init__(self, whole: Pass, price: float, power: int) -> None:
        self.whole, self.load, self._price, self._power = whole, whole.load.copy(), price, power
        self.way: dict[SyncedMemory, str] = {}
        self._wanted = set[SyncedMemory]()
        self._late = self._aside = 0  # bytes of copies that are waited for, and of those that are not
        self._away = np.zeros(len(whole.arrays), np.int8)  # which are, 2 if waited for as they come back
        self._made: dict[SyncedMemory, Made] = {}
        self._need = {memory: each.first for memory, each in whole.arrays.items()}
        self._needs = np.array([*self._need.values()], np.int64)
        self._until = dict[SyncedMemory, int]()  # of what is held, the step before which it is needed
        self._users: dict[SyncedMemory, set[SyncedMemory]] = defaultdict(set)
        self._runners: dict[int, set[SyncedMemory]] = defaultdict(set)
        self._copying: float | None = None  # milliseconds, once found
        self._coming: np.ndarray | None = None  # arrays in the order in which they are needed, once found
        self._trial: _Trial
        self._known: dict[tuple[SyncedMemory, str], _Known] = {}  # of ways that were tried, while it holds

    def spared(self, room: int) -> Choice:
        """What is done without, but for what there is room for after all."""
        _spare(self, self.load + self.beside() - room, self._power)
        over = int((self.load + self.beside()).max()) - room
        anew = {memory for memory, way in self.way.items() if way is ANEW}
        run = {self.whole.unit[at] for at, made in self._runners.items() if made}
        ms = self._ms(run) + self._copies() - self._price * self.whole.times.copy_ms(self._aside)
        return Choice(anew, self.way.keys() - anew, self.whole.again.held, over, ms)

    def cost(self, memory: SyncedMemory) -> float:
        """About the milliseconds that it takes to do without it."""
        if self.way[memory] is not ANEW:
            copy = self.whole.times.copy_ms(self.whole.arrays[memory].size)
            return copy * {AWAY: self._price, BACK: 1, LATE: 2}[self.way[memory]]
        return sum(self.whole.cost[at] for at in self._made[memory][0])

    def known(self, memory: SyncedMemory, way: str) -> _Known | None:
        """What is known of doing without it in that way, or of keeping it."""
        return self._known.get((memory, way))

    def turn(self, memory: SyncedMemory, way: str) -> list[Change]:
        """Try to do without it in that way, or to keep it: what that changes of loads. `settle` or `back` follows."""
        was, size = self.way.get(memory, KEPT), self.whole.arrays[memory].size
        trial = self._trial = _Trial(memory, was, self._copying, self._coming)
        if was in _COPIES or way in _COPIES:
            trial.copies = trial.copying = self._copies()
            trial.coming = self._coming
        changes = [] if was is KEPT else [(*self._while(memory), size)]
        self._take(memory, was, way)
        if ANEW in (was, way):
            self._chain(trial)
            trial.again = self._replace(trial.before, trial.after)
            self._move(trial, changes)
        if way is not KEPT:
            changes.append((*self._while(memory), -size))
        if ANEW in (was, way):
            self._known[memory, way] = _Known(changes, trial.again, trial.copies is not None, self._looks(trial))
        return changes

    def ms(self) -> float:
        """Milliseconds that what is tried adds."""
        copies = self._trial.copies
        return self._trial.again + (0.0 if copies is None else self._copies() - copies)

    def settle(self, changes: Iterable[Change]) -> None:
        """Leave it so."""
        for start, stop, more in changes:
            self.load[start:stop] += more
        changed = self._changed(self._trial)
        self._known = {key: each for key, each in self._known.items() if not each.looks & changed}

    def _looks(self, trial: _Trial) -> int:
        """The bits of what mattered to what a trial changes."""
        whole = self.whole
        looks = trial.looks | whole.bit[trial.memory] | whole.bit_of(whole.maker[trial.memory])
        for memory, (runs, _) in chain(trial.before.items(), trial.after.items()):
            looks |= whole.bit[memory]
            for at in runs:
                looks |= whole.looks[at]
        return looks

    def _changed(self, trial: _Trial) -> int:
        """The bits of what a trial has changed."""
        whole = self.whole
        changed = whole.bit[trial.memory]
        for memory, (runs, needs) in chain(trial.before.items(), trial.after.items()):
            changed |= whole.bit[memory]
            for other in needs:
                changed |= whole.bit[other]
            for at in runs:
                changed |= whole.bit_of(at)
        for memory, _ in chain(trial.need, trial.until):
            changed |= whole.bit[memory]
        return changed

    def back(self) -> None:
        """Leave it as it was before it was tried."""
        trial = self._trial
        self._take(trial.memory, self.way.get(trial.memory, KEPT), trial.was)
        if trial.before or trial.after:
            self._wanted ^= {trial.memory}
            self._replace(trial.after, trial.before)
        for memory, need in reversed(trial.need):
            self._set_need(memory, need)
        self._until.update(reversed(trial.until))
        self._copying, self._coming = trial.copying, trial.coming

    def _take(self, memory: SyncedMemory, was: str, way: str) -> None:
        size = self.whole.arrays[memory].size
        self.way.pop(memory, None)
        if way is not KEPT:
            self.way[memory] = way
        if was in _COPIES or way in _COPIES:
            self._late += size * (_WAITS.get(way, 0) - _WAITS.get(was, 0))
            self._aside += size * ((way is AWAY) - (was is AWAY))
            self._away[self.whole.number[memory]] = 2 if way is BACK else way is AWAY
            self._copying = None

    def _while(self, memory: SyncedMemory) -> tuple[int, int]:
        """From which step to before which the pass does without it."""
        array, way, stop = self.whole.arrays[memory], self.way[memory], self._need[memory]
        if way is AWAY:
            comes = self.whole.clock[stop] - self.whole.times.copy_ms(array.size)
            stop = bisect_right(self.whole.clock, comes) - 1
        return array.start[way], max(array.start[way], stop)

    def _copies(self) -> float:
        """Milliseconds that copies are reckoned to take."""
        from blobmem.net.plan import kernels  # its compiler takes a while to import

        if self._copying is None:
            whole = self.whole
            if self._coming is None:
                self._coming = np.argsort(self._needs, kind="stable")
            out, back = kernels.beyond_turn(
                self._away, whole.copy, whole.leaving, whole.ready, self._coming, whole.begins[self._needs],
                whole.clock[whole.turn],
            )  # fmt: skip
            usual = whole.times.copy_ms(self._late) + self._price * whole.times.copy_ms(self._aside)
            self._copying = usual + out + back
        return self._copying

    def _chain(self, trial: _Trial) -> None:
        """Make the array anew from now on, or no longer, as its way is: find how it and others are made then."""
        memory = trial.memory
        # of the others, it may come by the way as they are made, or they be made from it where it is kept
        others = self._users[memory] | self._runners[self.whole.maker[memory]]
        trial.before = {each: self._made[each] for each in {*others, memory} if each in self._made}
        self._wanted ^= {memory}
        wanted = (each for each in {*trial.before, memory} if each in self._wanted)
        trial.after = {each: self.whole.chain(each, self._wanted) for each in wanted}

    def _replace(self, before: Mapping[SyncedMemory, Made], after: Mapping[SyncedMemory, Made]) -> float:
        """Have arrays made in another way: the milliseconds that this adds."""
        ran, run = (set[int]().union(*(runs for runs, _ in made.values())) for made in (before, after))
        units = {self.whole.unit[at] for at in ran ^ run}
        ms = -self._ms(units)
        for each in {**before, **after}:
            (had_run, had), (runs, needs) = before.get(each, _NOTHING), after.get(each, _NOTHING)
            if had_run is not runs and had_run != runs:
                for at in had_run - runs:
                    self._runners[at].discard(each)
                for at in runs - had_run:
                    self._runners[at].add(each)
            if had is not needs and had != needs:
                for other in had - needs:
                    self._users[other].discard(each)
                for other in needs - had:
                    self._users[other].add(each)
            if each in after:
                self._made[each] = runs, needs
            else:
                del self._made[each]
        return ms + self._ms(units)

    def _ms(self, units: Iterable[int]) -> float:
        cost, members, runners, result = self.whole.cost, self.whole.members, self._runners, 0.0
        for unit in units:
            if unit in self.whole.joined and runners[unit]:
                result += cost[unit]
                continue
            most = 0.0
            for at in members[unit]:
                if cost[at] > most and runners[at]:
                    most = cost[at]
            result += most
        return result

    def _move(self, trial: _Trial, changes: list[Change]) -> None:
        """Find anew before which step these are needed, and then those that they are made of."""
        moved = set[SyncedMemory]()  # what others, or no longer these, are made of
        for each in {**trial.before, **trial.after}:
            moved |= trial.before.get(each, _NOTHING)[1] ^ trial.after.get(each, _NOTHING)[1]
        bit = self.whole.bit
        while moved:
            memory = moved.pop()
            trial.looks |= bit[memory]
            for user in self._users[memory]:
                trial.looks |= bit[user]
            if memory in self.whole.held:
                size, start = self.whole.held[memory]
                was = self._until.get(memory, start)
                now = max([start, *(1 + self._need[user] for user in self._users[memory])])
                if now != was:
                    trial.until.append((memory, was))
                    self._until[memory] = now
                    changes += [(start, was, -size), (start, now, size)]
                continue
            array = self.whole.arrays[memory]
            need = min([array.first, *(self._need[user] for user in self._users[memory])])
            was = self._need[memory]
            if need == was:
                continue
            without = memory in self.way and memory is not trial.memory
            if without:
                changes.append((*self._while(memory), array.size))
            trial.need.append((memory, was))
            self._set_need(memory, need)
            if without:
                changes.append((*self._while(memory), -array.size))
            moved |= self._made[memory][1] if memory in self._made else set()

    def _set_need(self, memory: SyncedMemory, step: int) -> None:
        self._need[memory] = self._needs[self.whole.number[memory]] = step
        self._copying = self._coming = None

    def beside(self) -> np.ndarray:
        """Bytes in use while arrays are made before a step, and of what others are made of later, beyond those that are
        in use in the step itself."""
        whole, result, ran = self.whole, np.zeros_like(self.load), dict[int, int]()
        made: dict[int, list[SyncedMemory]] = defaultdict(list)
        for memory in self._made:
            made[self._need[memory]].append(memory)
        for step, arrays in sorted(made.items()):
            runs = sorted({at for memory in arrays for at in self._made[memory][0]} - ran.keys())
            ran.update(dict.fromkeys(runs, step))
            there = sum(whole.arrays[memory].size for memory in arrays) + int(whole.born[step])
            result[step] = max(0, self._most(runs) - there)
        return result + self._waiting(ran)

    def _waiting(self, ran: Mapping[int, int]) -> np.ndarray:
        """Bytes of what is made in one step, and nobody reads but calls that run again before a later one; given of
        each of these the step."""
        whole, last = self.whole, dict[tuple[int, SyncedMemory], int]()
        for at, step in ran.items():
            for each in whole.inputs[at]:
                if each.source not in self._made and ran.get(each.made, step) < step:
                    key = each.made, each.source
                    last[key] = max(step, last.get(key, 0))
        change = np.zeros(len(self.load) + 1, self.load.dtype)
        for (at, memory), step in last.items():
            nbytes = next(nbytes for written, nbytes, _ in whole.writes[at] if written is memory)
            change[ran[at] + 1] += nbytes
            change[step + 1] -= nbytes
        return np.cumsum(change)[:-1]

    def _most(self, runs: Sequence[int]) -> int:
        """Bytes that calls which run again have at the most of what they make."""
        whole, made, most = self.whole, self._made, 0
        last, held = dict[SyncedMemory, int](), dict[SyncedMemory, int]()
        for at in runs:
            last.update(dict.fromkeys(whole.reads[at], at))
        for at in runs:
            if whole.again.may_take_place(at):
                for memory in whole.reads[at]:
                    if memory not in made and last[memory] == at:
                        held.pop(memory, None)
            norm = whole.again.uses.forward[at].op in NORMS  # whose top may be what it keeps
            for memory, nbytes, optional in whole.writes[at]:
                if not (optional or norm) or memory in made or last.get(memory, -1) > at:
                    held[memory] = nbytes
            most = max(most, sum(held.values()) + whole.scratch[at])
            for memory in [each for each in held if each not in made and last.get(each, -1) <= at]:
                del held[memory]
        return most


def _together(changes: Sequence[Change], over: np.ndarray) -> tuple[slice, np.ndarray]:
    """Where there are changes, and what will then be over."""
    if len(changes) == 1:
        ((start, stop, size),) = changes
        there = slice(start, stop)
        return there, over[there] + size
    low, high = min(each[0] for each in changes), max(each[1] for each in changes)
    result = over[low:high].copy()
    for start, stop, size in changes:
        result[start - low : stop - low] += size
    return slice(low, high), result


def _where_over(over: np.ndarray) -> range:
    """From the first step that is over to behind the last one."""
    steps = np.flatnonzero(over > 0)
    return range(int(steps[0]), int(steps[-1]) + 1) if len(steps) else range(0)


def _reduce(state: _State, over: np.ndarray, ways: Sequence[str]) -> bool:
    """Do without arrays, in these ways, until no step is over, or nothing helps; whether anything did."""
    arrays = state.whole.arrays.items()
    tries = [(memory, way) for memory, array in arrays for way in ways if way is KEPT or way in array.start]
    waiting = [(-math.inf, at) for at in range(len(tries))]
    found, where = False, _where_over(over)
    while waiting and where.stop:
        _, at = heapq.heappop(waiting)
        memory, way = tries[at]
        was = state.way.get(memory, KEPT)
        if was is way:
            continue
        known = state.known(memory, way)
        changes = state.turn(memory, way) if known is None else known.changes
        gain = 0.0
        if any(size < 0 and start < where.stop and stop > where.start for start, stop, size in changes):
            there, trial = _together(changes, over)
            gain = float(np.maximum(over[there], 0).sum() - np.maximum(trial, 0).sum())
        if gain > 0:
            if known is not None and known.copies:
                known, _ = None, state.turn(memory, way)
            worth = gain / max(state.ms() if known is None else known.ms, 1e-3)
            if not waiting or worth >= -ABOUT * waiting[0][0]:
                if known is not None:
                    state.turn(memory, way)
                found, over[there] = True, trial
                where = _where_over(over)
                state.settle(changes)
                continue
            heapq.heappush(waiting, (-worth, at))  # others may be worth more by now
        if known is None:
            state.back()
    return found


def _spare(state: _State, over: np.ndarray, power: int) -> None:
    """Keep after all what there is room for, or do without it in a better way, what costs most first, as a whole or
    for its bytes."""
    arrays = state.whole.arrays
    for memory in sorted(state.way, key=lambda each: state.cost(each) / arrays[each].size ** power, reverse=True):
        for way in (way for way in WAYS if way is KEPT or way in state.whole.arrays[memory].start):
            was = state.way[memory]
            if way is was:
                continue
            changes = state.turn(memory, way)
            there, trial = _together(changes, over)
            if np.all(trial <= np.maximum(over[there], 0)) and state.ms() < 0:
                over[there] = trial
                state.settle(changes)
                break
            state.back()
