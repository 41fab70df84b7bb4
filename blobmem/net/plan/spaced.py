"""Updates of evicted state go where in backward there is room for what they need, and the link has time for it.

An update moves with what brings its arrays and copies them out, and with what makes its gradient for it alone. Where to
is found by a clock: backward runs without these, and as soon as the link is free, and there will be room until it has
left, what is next comes. Where that is late, its gradient lasts longer; where there is no room for that, calls wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.pages import round_up
from blobmem.memory import SyncedMemory
from blobmem.memory.views import ALIGNMENT
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.evict import loads
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.state import content_of, copies_state
from blobmem.net.plan.times import COPIES, Times
from blobmem.net.plan.ways import Made
from blobmem.net.schedule import Unit
from blobmem.ops.call import memories

Moves = dict[int, int]
"""From where to before which call others go, among those of forward and behind them those of backward."""


class _Update(NamedTuple):
    """An update that may run elsewhere.

    Attributes:
        fetches, runs, evicts: the steps of backward that bring what it alone uses, that it is, and that copy out.
        least: the first step before which it may run.
        size, beside: bytes of what is brought, and of what else is there while it runs.
        held: what others have used before and is there until it has run; and of these what then leaves.
        in_ms, out_ms, ms: how long it comes, leaves, and runs.
    """

    fetches: list[int]
    runs: list[int]
    evicts: list[int]
    least: int
    size: int
    beside: int
    held: list[SyncedMemory]
    leaves: list[SyncedMemory]
    in_ms: float
    out_ms: float
    ms: float

    @property
    def steps(self) -> Iterable[int]:
        """All of these."""
        return chain(self.fetches, self.runs, self.evicts)


def spaced(made: Made, room: int, times: Times) -> Moves:
    """From where to before which call of backward updates of evicted state go, with what they need, so that no more
    than such a room is in use, and copies have time."""
    units, lasts = made.places.units[1], _lasting(made)
    updates = _Finder(units, lasts, times).updates()
    moving = {at for each in updates for at in each.steps}
    staying = [at for at in range(len(units)) if at not in moving]
    if not updates or not staying:
        return {}
    load, held = loads(made.places)[len(made.places.units[0]) :].copy(), dict[SyncedMemory, tuple[int, int]]()
    last = {memory: at for at in staying for memory in memories(units[at].calls)}
    for memory in {*memories(chain.from_iterable(units[at].calls for at in moving))} & lasts.keys():
        _, nbytes, begin, end = lasts[memory]
        if memory in last:
            begin = last[memory] + 1
            held[memory] = nbytes, bisect_left(staying, begin)
        load[begin : end + 1] -= nbytes
    clock = _Clock([units[at] for at in staying], load[staying], held, times, room)
    leasts = accumulate((bisect_left(staying, each.least) for each in updates), max)  # they run in order
    clock.run([each._replace(least=least) for each, least in zip(updates, leasts, strict=True)])
    turn, moves = len(made.forward), dict[int, int]()
    starts = [*(turn + units[at].start for at in staying), turn + units[-1].stop]
    for each, comes, runs in clock.placed:
        for steps, to in ((each.fetches, comes), ([*each.runs, *each.evicts], runs)):
            moves |= {turn + at: starts[to] for step in steps for at in range(units[step].start, units[step].stop)}
    return moves


def _lasting(made: Made) -> dict[SyncedMemory, Lifetime]:
    """When arrays of the arena are in use in backward, by its steps: not those whose bytes others take over."""
    ahead, found = len(made.places.units[0]), dict[SyncedMemory, Lifetime]()
    for life in made.places.lives.arena:
        own = made.places.lives.turns.get(life.key, [life])[-1]
        if isinstance(own.key, SyncedMemory) and own.last >= ahead:
            first = own.first + (own.key is not life.key)  # where it takes over those of another, both are there
            size = round_up(life.nbytes, ALIGNMENT)
            found[own.key] = Lifetime(own.key, size, max(0, first - ahead), own.last - ahead)
    return found


class _Finder:
    """Finds what updates may run elsewhere, with all that belongs to them."""

    def __init__(self, units: Sequence[Unit], lasts: dict[SyncedMemory, Lifetime], times: Times) -> None:
        self._units, self._lasts, self._times = units, lasts, times
        self._users = defaultdict[SyncedMemory, list[int]](list)
        self._writers = defaultdict[SyncedMemory, list[int]](list)
        self._copies = defaultdict[Any, list[tuple[int, int, int]]](list)  # of each home, by step, of which bytes
        for at, unit in enumerate(units):
            for memory in dict.fromkeys(memories(unit.calls)):
                self._users[memory].append(at)
            for memory in {memory for each in unit.calls for memory in each.written_memories()}:
                self._writers[memory].append(at)
            if copies_state(unit.calls[0]):
                home, start, nbytes = content_of(unit.calls[0])
                self._copies[home].append((at, start, start + nbytes))

    def updates(self) -> list[_Update]:
        """Those that may, in order."""
        made = [self._made(at) for at, unit in enumerate(self._units) if unit.calls[0].op in UPDATES]
        found = [each for each in made if each is not None]
        moving = {at for each in found for at in each.steps}
        bounded = ((each, self._between(each, moving)) for each in found)
        return [each._replace(least=least) for each, (least, most) in bounded if most == len(self._units)]

    def _made(self, at: int) -> _Update | None:
        """The update that is this step; None if what it needs is not all its own, or there for it last."""
        unit, runs = self._units[at], [at]
        fetches, evicts, held, leaves = list[int](), list[int](), list[SyncedMemory](), list[SyncedMemory]()
        gradients = {each.operand(0).memory for each in unit.calls}
        for memory in dict.fromkeys(memories(unit.calls)):
            if memory not in self._lasts:
                continue  # it is there before backward, and behind it
            users, first = self._users[memory], self._units[self._users[memory][0]]
            comes = first.calls[0].op == "fetch" and copies_state(first.calls[0])
            goes = comes and self._units[users[-1]].calls[0].op == "evict"
            if not comes and memory not in gradients:
                return None
            if comes and users[: len(users) - goes] == [users[0], at]:
                fetches.append(users[0])
            elif memory in gradients and users[1:] == [at] and _makes_gradient(first):
                runs.insert(0, users[0])
            elif goes and users[-2] != at:
                return None
            else:
                held.append(memory)
            evicts += users[-1:] if goes else []
            leaves += [memory] if goes and memory in held else []
        if not fetches or not evicts:
            return None
        beside = sum(self._units[each].scratch for each in runs)
        beside += sum(self._lasts[memory].nbytes for memory in gradients if memory not in held)
        size = sum(self._lasts[each].nbytes for each in self._brought(fetches))
        ms = (sum(self._times.ms(self._units[each].calls[-1]) for each in steps) for steps in (fetches, evicts, runs))
        return _Update(fetches, runs, evicts, 0, size, beside, held, leaves, *ms)

    def _brought(self, fetches: Iterable[int]) -> list[SyncedMemory]:
        return [self._units[at].calls[0].operand(0).memory for at in fetches]

    def _between(self, update: _Update, moving: set[int]) -> tuple[int, int]:
        """The first step, and the last, before which an update may run for what others do that stay."""
        own, others = {*self._brought(update.fetches)}, set[int]()
        for memory in {*memories(chain.from_iterable(self._units[each].calls for each in update.runs))} - own:
            changes = not {*self._writers[memory]}.isdisjoint(update.runs)
            others.update(self._users[memory] if changes else self._writers[memory])
        for each in update.evicts:  # who brings the same bytes elsewhere has them as they were before
            home, start, nbytes = content_of(self._units[each].calls[0])
            others.update(at for at, first, stop in self._copies[home] if first < start + nbytes and start < stop)
        others -= moving
        return (
            max((at + 1 for at in others if at < update.runs[-1]), default=0),
            min((at for at in others if at > update.runs[-1]), default=len(self._units)),
        )


def _makes_gradient(unit: Unit) -> bool:
    """Whether a step makes a piece of a gradient, which nothing else does."""
    return unit.stop - unit.start == 1 and unit.calls[0].op == "inner_product_backward_weights"


class _Clock:
    """Backward as it runs by the times of its calls, with updates put in.

    Args:
        units: the steps that stay where they are.
        load: bytes in use in each.
        held: what updates need of what these leave: bytes, and the step from which on none of them uses it.
        times: of calls.
        room: bytes that there are.

    Attributes:
        placed: updates, and the steps before which each comes, and runs.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        load: np.ndarray,
        held: dict[SyncedMemory, tuple[int, int]],
        times: Times,
        room: int,
    ) -> None:
        self._calls, self._load, self._held, self._times = [unit.calls[-1] for unit in units], load, held, times
        self._ms = [0.0 if each.op in COPIES else times.ms(each) for each in self._calls]
        self._begins = np.cumsum([0.0, *self._ms])
        self._room, self._now = room, 0.0
        self._free = dict.fromkeys(COPIES, 0.0)  # when the link is
        self._used = 0  # bytes of updates that have begun to come and not yet left, and of what is held
        self._coming, self._leaving = deque[tuple[_Update, int, float]](), deque[tuple[_Update, float]]()
        self._users = Counter[SyncedMemory]()
        self.placed: list[tuple[_Update, int, int]] = []

    def run(self, updates: Sequence[_Update]) -> None:
        """Put the updates in, in that order; none may run before those before it may."""
        waiting, end = deque(updates), len(self._calls)
        self._users.update(memory for each in updates for memory in each.held)
        begins, arrives = defaultdict[int, int](int), dict[SyncedMemory, float]()
        for nbytes, step in self._held.values():
            begins[step] += nbytes
        for step, call in enumerate(self._calls):
            self._used += begins[step]
            self._now = max([self._now, *(arrives.pop(each) for each in {*memories([call])} & arrives.keys())])
            self._make_room(step, waiting)
            if call.op in COPIES:
                self._free[call.op] = max(self._free[call.op], self._now) + self._times.ms(call)
                if call.op == "fetch":
                    arrives[call.operand(0).memory] = self._free[call.op]
                continue
            while waiting and self._may_come(waiting[0], step):
                self._come(waiting.popleft(), step)
            self._now += self._ms[step]
        while waiting or self._coming:
            if not self._coming:
                self._come(waiting.popleft(), end)
            self._run(end)

    def _make_room(self, step: int, waiting: deque[_Update]) -> None:
        """What has come is updated, and what has left is gone, before a step; if there is no room for that, it waits
        for what is to leave next."""
        while self._coming and self._is_there(step):
            self._run(step)
        while self._leaving and self._leaving[0][1] <= self._now:
            self._leave()
        while self._load[step] + self._used > self._room:
            if self._leaving:
                self._leave()
            elif self._coming and self._coming[0][0].least <= step:
                self._run(step)
            elif waiting and not self._coming and waiting[0].least <= step and waiting[0].held:
                self._come(waiting.popleft(), step)
            else:
                break

    def _is_there(self, step: int) -> bool:
        update, _, there = self._coming[0]
        return there <= self._now and update.least <= step

    def _may_come(self, update: _Update, step: int) -> bool:
        """Whether it may begin to come while a step runs, as there is room until it has left."""
        begin = max(self._free["fetch"], self._now)
        if begin >= self._now + self._ms[step]:
            return False
        last, clock = len(self._calls) - 1, self._begins - self._begins[step] + self._now
        runs = min(max(int(np.searchsorted(clock, begin + update.in_ms)), update.least), last)
        left = max(self._free["evict"], float(clock[runs])) + update.out_ms
        gone = min(max(int(np.searchsorted(clock, left)) - 1, runs), last)
        amid = self._load[max(0, runs - 1) : runs + 1].min() + update.beside
        return max(self._load[step : gone + 1].max(), amid) + self._used + update.size <= self._room

    def _come(self, update: _Update, step: int) -> None:
        self._free["fetch"] = max(self._free["fetch"], self._now) + update.in_ms
        self._used += update.size
        self._coming.append((update, step, self._free["fetch"]))

    def _run(self, step: int) -> None:
        update, comes, there = self._coming.popleft()
        self._now = max(self._now, there) + update.ms
        self._free["evict"] = max(self._free["evict"], self._now) + update.out_ms
        self._release({*update.held}.difference(update.leaves))
        self._leaving.append((update, self._free["evict"]))
        self.placed.append((update, comes, step))

    def _leave(self) -> None:
        update, left = self._leaving.popleft()
        self._now = max(self._now, left)
        self._used -= update.size
        self._release(update.leaves)

    def _release(self, held: Iterable[SyncedMemory]) -> None:
        """An update needs these no longer."""
        for memory in held:
            self._users[memory] -= 1
            self._used -= 0 if self._users[memory] else self._held[memory][0]
