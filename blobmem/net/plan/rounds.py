"""Which arrays are made anew in rounds, as often as it takes, where a pass has room for few of them at a time.

The pass is walked through step by step. While more is in use than there is room for, an array is let go: that which is
made again in least time for its bytes and the time until it is needed next, which is known. What a step of backward
needs and is gone is made just before it, in a round, with all that has to be made for it; what a round makes by the way
stays as long as there is room. So does what was evicted and has come back, just before it is needed or, where there is
room, while the link has time.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.memory import SyncedMemory
from blobmem.net.plan.again import NORMS, Round
from blobmem.net.plan.choice import ANEW, LATE, Kind, Pass

if TYPE_CHECKING:
    from blobmem.net.plan.walk import Tables

POWERS = (0.5, 1.0)
"""Of the time until an array is needed next, by which its bytes count as freed: walks that are compared at first."""

WALKS, FOR_EACH, TURNS = 16000, 64, 8
"""How many other walks each search tries, fewer where these are so many for each kind of array; and in how many turns,
each on from the best of the one before and as warm at first, which end with one in which none finds a better one."""

ARRAYS, LEAST = 1_000_000, 2000
"""No more walks than have so many arrays in all, as those through many take long, but so many even then."""

REVALUED = (0.0, 0.3, 0.5, 0.6)
"""Of searches that run beside each other, which part of their walks differs by what arrays are worth. They know nothing
of each other: what walks say of a plan is about what it comes to, and of several kinds one is better than it seems."""

WARM = 0.005
"""About which part of its time longer a walk may take at first, and be gone on from."""


class Setting(NamedTuple):
    """By what walks differ.

    Attributes:
        away: the kinds of arrays that are evicted, all slices of one together.
        power: of the time until an array is needed next, by which its bytes count as freed.
        worth: how many times as much as by that it is worth to keep arrays of a kind; once if that is not there.
    """

    away: frozenset[Kind] = frozenset()
    power: float = POWERS[0]
    worth: Mapping[Kind, float] = MappingProxyType({})


class Walked(NamedTuple):
    """The rounds of a pass.

    Attributes:
        rounds: in their order.
        away: what is evicted beside.
        ms: what the calls in them take, and how long copies are waited for as they come back.
        over: how many bytes are too much.
        setting: by which they were found.
    """

    rounds: list[Round]
    away: Collection[SyncedMemory]
    ms: float
    over: int
    setting: Setting


def walked(whole: Pass, room: int, walks: int = WALKS, begun: Sequence[Setting] = ()) -> list[Walked]:
    """The rounds with which no step has more than `room` bytes in use, as far as that can be, of several searches; what
    seems best comes first.

    Evicted is what there is no room to make, and what spares time; it is searched for by so many walks each. They go on
    from what others have `begun`, if that is given.
    """
    numbered = _Numbered(whole)
    search = _Search(numbered, room)
    first, count = [search.first(each) for each in begun or [Setting(power=power) for power in POWERS]], len(REVALUED)
    most = max(LEAST, ARRAYS // max(1, len(numbered.arrays)))
    walks = min(walks, most, FOR_EACH * len(whole.alike)) // TURNS

    def improved(best: _Found, seed: int) -> _Found:
        return search.improved(best, walks, REVALUED[seed % count], seed)

    best = [first[at % len(first)] for at in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for turn in range(TURNS):
            before, best = best, [*pool.map(improved, best, range(turn * count, (turn + 1) * count))]
            if [each.rank for each in best] == [each.rank for each in before]:
                break
    ranked = {each.rank: each for each in (*first, *best)}
    return [search.walked(ranked[rank]) for rank in sorted(ranked)]


def glance(whole: Pass, room: int) -> tuple[int, float]:
    """How many bytes too much the first walks need, and the ms of the pass by them, if not too much."""
    search = _Search(_Numbered(whole), room)
    over, ms = min(search.first(Setting(power=power)).rank for power in POWERS)
    return over, whole.clock[-1] + ms


Rows = tuple[np.ndarray, np.ndarray]
"""What is behind each other, and where each begins."""

_HELD = -1
"""In the kind of what is held, instead of the operand."""


class _Numbered:
    """A pass with its memories by numbers, as walks want them.

    Attributes:
        whole: the pass.
        arrays: those that may be made anew, and what is held, at their numbers.
        reads: the steps of backward that read each.
        kinds: the kind of each.
        tables: of walks.
    """

    def __init__(self, whole: Pass) -> None:
        self.whole, uses = whole, whole.again.uses
        self.reads = {
            memory: [whole.turn + bisect_right(whole.starts[1], at) - 1 for at in uses.read[memory]]
            for memory, array in whole.arrays.items()
            if ANEW in array.start
        }
        self.reads.update((memory, []) for memory in whole.held)
        self.arrays = [*self.reads]
        self._number = {memory: at for at, memory in enumerate(self.arrays)}
        forward = whole.again.uses.forward
        held = [forward[uses.last_write(memory)] for memory in whole.held]
        kinds = [whole.kind[memory] for memory in self.arrays[: len(self.arrays) - len(held)]]
        self.kinds = [*kinds, *((each.layer, str(each.op), _HELD) for each in held)]
        self.tables = self._tables()

    def number(self, memory: SyncedMemory) -> int:
        """Its number, which it gets if it has none."""
        return self._number.setdefault(memory, len(self._number))

    def _tables(self) -> Tables:
        from blobmem.net.plan import walk  # its compiler takes a while to import

        whole, forward, last = self.whole, self.whole.again.uses.forward, self.whole.again.uses.last_write
        fixed, size, start, end, needed = self._by_step()
        final = defaultdict[int, list[int]](list)
        for at, memory in enumerate(self.arrays):
            final[last(memory)].append(at)
        calls = range(len(forward))
        take, take_of = behind_each_other(map(self._taken, calls), 5)
        write, write_of = behind_each_other(map(self._written, calls), 3)
        late = [each in whole.arrays and LATE in whole.arrays[each].start for each in self.arrays]
        return walk.Tables(
            whole.turn, whole.begins, fixed, whole.born, *start, *end, *needed,
            *behind_each_other(self.reads.values()), np.array(size, np.int64),
            np.array([*map(whole.times.copy_ms, size)], np.float64), np.array([*map(last, self.arrays)], np.int64),
            np.array(late, np.bool_), *behind_each_other(final.get(at, ()) for at in calls), take, take_of, write,
            write_of, *self._used(take), np.repeat(np.arange(len(forward)), np.diff(take_of)),
            np.array([*map(whole.again.may_take_place, calls)], np.bool_), np.array(whole.unit, np.int64),
            np.array(whole.least, np.float64), np.array(whole.scratch, np.int64),
            np.array([at in whole.joined for at in calls], np.bool_), len(self._number),
        )  # fmt: skip

    def _by_step(self) -> tuple[np.ndarray, list[int], Rows, Rows, Rows]:
        """Bytes beside the arrays in each step, the bytes of these; and rows of what starts, ends, and is needed."""
        whole, fixed, size = self.whole, self.whole.load.copy(), list[int]()
        start, end, needed = (defaultdict[int, list[int]](list) for _ in range(3))
        for at, (memory, read) in enumerate(self.reads.items()):
            if memory in whole.held:
                nbytes, begin = whole.held[memory]
            else:
                nbytes, begin = whole.arrays[memory].size, whole.arrays[memory].start[ANEW]
                fixed[begin : read[-1] + 1] -= nbytes
                end[read[-1]].append(at)
            start[begin].append(at)
            size.append(nbytes)
            for step in read:
                needed[step].append(at)
        steps = range(len(fixed))
        begins, ends, needs = (behind_each_other(each.get(at, ()) for at in steps) for each in (start, end, needed))
        return fixed, size, begins, ends, needs

    def _used(self, take: np.ndarray) -> Rows:
        """Of each array, and behind these each call, the rows of what is taken by which it may be needed."""
        arrays, use = len(self.arrays), defaultdict[int, list[int]](list)
        for row, (source, maker, _, same, _) in enumerate(take.tolist()):
            nodes = {each for each in (source, same) if 0 <= each < arrays}
            for node in nodes | ({arrays + maker} if maker >= 0 else set()):
                use[node].append(row)
        return behind_each_other(use.get(at, ()) for at in range(arrays + len(self.whole.inputs)))

    def _taken(self, at: int) -> list[tuple[int, int, bool, int, bool]]:
        """What a call of forward reads, as the tables have it."""
        from blobmem.net.plan.walk import NONE  # its compiler takes a while to import

        last = self.whole.again.uses.last_write
        return [
            (self.number(source), made, stays, NONE if same is None else self.number(same), last(source) == made)
            for source, made, stays, same, _ in self.whole.inputs[at]
        ]

    def _written(self, at: int) -> list[tuple[int, int, bool]]:
        """What it writes, as the tables have it; what a norm keeps may be its top."""
        norm = self.whole.again.uses.forward[at].op in NORMS
        return [(self.number(memory), nbytes, optional or norm) for memory, nbytes, optional in self.whole.writes[at]]


def behind_each_other(lists: Iterable[Sequence[Any]], *columns: int) -> Rows:
    """What lists have, in so many columns, and where each begins, and the last one ends."""
    found = [*lists]
    places = np.cumsum([0, *map(len, found)], dtype=np.int64)
    return np.array([*chain.from_iterable(found)], np.int64).reshape(-1, *columns), places


class _Found(NamedTuple):
    """What comes of a walk.

    Attributes:
        setting: of it.
        ms, over: as `Walked` has them.
        spared: of what could have been evicted, by its number, the milliseconds of calls that would not have run again.
        short: what has to be evicted for want of room to make it, or something of it.
    """

    setting: Setting
    ms: float
    over: int
    spared: np.ndarray
    short: np.ndarray

    @property
    def rank(self) -> tuple[int, float]:
        """What is better has less."""
        return self.over, self.ms


class _Search:
    """Walks, each by something else than one before."""

    def __init__(self, numbered: _Numbered, room: int) -> None:
        self._numbered, self._whole, self._room = numbered, numbered.whole, room

    def first(self, setting: Setting) -> _Found:
        """The walk by a setting, with evicted what has to be beside that."""
        while True:
            found = self._walk(setting)
            short = {self._whole.kind[self._numbered.arrays[at]] for at in np.flatnonzero(found.short)}
            if short <= setting.away:
                return found
            setting = setting._replace(away=setting.away | short)

    def improved(self, best: _Found, walks: int, revalued: float, seed: int) -> _Found:
        """The best of so many walks more than one, by draws from the seed: simulated annealing (Kirkpatrick, Gelatt and
        Vecchi, Science 220, 1983), in which such a part of the steps is by what arrays are worth."""
        draws, here = random.Random(seed), best
        for at in range(walks):
            if best.ms == 0:
                break
            setting = self._revalued(draws, here) if draws.random() < revalued else self._changed(draws, here)
            if setting == here.setting:
                continue
            found, warm = self._walk(setting), WARM * best.ms * (1 - at / walks)
            best = min(best, found, key=lambda each: each.rank)
            if found.rank <= (here.over, here.ms + warm * draws.expovariate(1.0)):
                here = found
        return best

    def walked(self, found: _Found) -> Walked:
        """The rounds of such a walk."""
        numbered = self._numbered
        turn, arrays = self._whole.turn, len(numbered.arrays)
        seen = np.zeros((len(self._whole.load) - turn, 3, arrays), np.bool_)
        self._walk(found.setting, seen)
        result = list[Round]()
        for at in np.flatnonzero(seen[:, 0].any(axis=1)):
            gone, made = ([numbered.arrays[each] for each in np.flatnonzero(seen[at, which])] for which in (1, 2))
            target = next(each for each in gone if turn + at in numbered.reads[each])
            result.append(Round(target, numbered.reads[target].index(turn + int(at)), {*made}, {*gone}))
        return Walked(result, [*self._sent(found.setting.away)[0]], found.ms, found.over, found.setting)

    def _walk(self, setting: Setting, rounds: np.ndarray | None = None) -> _Found:
        from blobmem.net.plan import walk  # its compiler takes a while to import

        numbered, count = self._numbered, len(self._numbered.arrays)
        away, ms = self._sent(setting.away)
        leaves = np.array([away.get(memory, walk.NONE) for memory in numbered.arrays], np.int64)
        worth = np.array([setting.worth.get(kind, 1.0) for kind in numbered.kinds])
        spared, short = np.zeros(count), np.zeros(count, np.bool_)
        rounds = np.zeros((0, 3, count), np.bool_) if rounds is None else rounds
        again, over = walk.walk(
            numbered.tables, self._room, setting.power, worth, leaves, self._whole.brought, rounds, spared, short
        )
        late = max(0.0, ms - self._whole.clock[self._whole.turn])
        return _Found(setting, again + late, over, spared, short)

    def _sent(self, kinds: Iterable[Kind]) -> tuple[dict[SyncedMemory, int], float]:
        """Of what is evicted the step by which each has been copied away, and the ms at which all have."""
        whole, result, done = self._whole, dict[SyncedMemory, int](), 0.0
        every = [each for kind in kinds for each in whole.alike[kind] if LATE in whole.arrays[each].start]
        for memory in sorted(every, key=lambda each: (whole.arrays[each].start[LATE], whole.number[each])):
            array = whole.arrays[memory]
            done = max(done, whole.clock[array.start[LATE]]) + whole.times.copy_ms(array.size)
            result[memory] = min(bisect_left(whole.clock, done), whole.turn)
        return result, done

    def _changed(self, draws: random.Random, here: _Found) -> Setting:
        """Evicted is something else that would spare time, or not something that is."""
        spared, kinds = self._spared(draws, here), here.setting.away
        which, more, less = draws.random(), list[Kind](), list[Kind]()
        if spared and which < _ADDS:
            more = draws.choices([*spared], weights=[*spared.values()], k=draws.choice(_CHANGES))
        if kinds and which > 1 - _LEAVES:
            less = draws.sample(sorted(kinds), k=1)
        return here.setting._replace(away=(kinds | {*more}) - {*less})

    def _spared(self, draws: random.Random, here: _Found) -> dict[Kind, float]:
        """What it would spare to evict others, for their bytes or for a lower power of these."""
        whole, spared = self._whole, defaultdict[Kind, float](float)
        for at in np.flatnonzero(here.spared > 0):
            kind = whole.kind[self._numbered.arrays[at]]
            if kind not in here.setting.away:
                spared[kind] += float(here.spared[at])
        power = draws.choice(_BYTES)
        return {kind: ms / self._bytes(kind) ** power for kind, ms in sorted(spared.items())}

    def _bytes(self, kind: Kind) -> int:
        return sum(self._whole.arrays[memory].size for memory in self._whole.alike[kind])

    def _revalued(self, draws: random.Random, here: _Found) -> Setting:
        """Some arrays are worth more or less, or all by another power."""
        setting = here.setting
        if draws.random() < _OTHER_POWER:
            low, high = _POWERS
            return setting._replace(power=min(high, max(low, setting.power * draws.choice(_STEPS))))
        worth = {**setting.worth}
        for _ in range(draws.choice(_CHANGES)):
            kind = draws.choice(self._numbered.kinds)
            worth[kind] = worth.get(kind, 1.0) * draws.choice(_TIMES)
        return setting._replace(worth=worth)


_ADDS, _LEAVES = 0.6, 0.55
"""The parts of changes that evict more, and that evict something less; some do both."""

_CHANGES = (1, 1, 2, 4)
"""How many kinds of arrays more are evicted, or worth something else, at a time."""

_OTHER_POWER, _POWERS, _STEPS = 0.15, (0.1, 2.0), (0.7, 0.85, 1.2, 1.4)
"""How often the power changes instead, between which, and how many times as much it is then."""

_TIMES = (0.25, 0.5, 2.0, 4.0)
"""How many times as much arrays are worth at a time."""

_BYTES = (0.0, 0.5, 1.0)
"""Powers of an array's bytes for which it spares so much."""
