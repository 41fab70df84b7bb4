"""When what is evicted begins to come back, and gives its bytes away: by a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from blobmem.devices.pages import round_up
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.evict import Candidate, loads, loads_without
from blobmem.net.plan.liveness import Use
from blobmem.net.plan.movable import Update
from blobmem.net.plan.places import Draft
from blobmem.net.plan.times import BOTH, COPIES, LINK, Times, copies_before, reckon
from blobmem.net.schedule import Unit

SLACK = 0.3
"""ms by which copies are done before their bytes are used, where there is room for that: calls then wait once for
several copies, and each wait that is not there saves a GPU microseconds between two kernels."""

MORE = 1.0
"""The same in passes of `MANY` steps."""

MANY = 1000
"""Of so many steps waits take a part of the time that is worth longer lives."""

SHORTER = 2
"""How often arrays go sooner for those beside them to have places."""


class Ran(NamedTuple):
    """A pass by the clock.

    Attributes:
        ms: what it takes.
        begin, end: when each step does, in ms.
        order: the steps, as they come.
        gone: of each array that leaves, before which of these others have its bytes; or how many there are.
    """

    ms: float
    begin: np.ndarray
    end: np.ndarray
    order: np.ndarray
    gone: np.ndarray


class _Array(NamedTuple):
    """So many bytes that are in use from one step to another, of which some are the last to use it; and the step that
    copies it out last, -1 if none does."""

    nbytes: int
    first: int
    last: int
    lasts: list[int]
    copy: int


class Clock:
    """The steps of a pass by a clock. What leaves has its bytes until its copy is done and others want them. A step has
    the room that is granted, or as much more as it takes anyway.

    Args:
        drawn: of a pass in which all that leaves does so as soon as it can.
        times: of its calls.
        updates: those that may run elsewhere.

    Attributes:
        steps: what it consists of.
        turn: how many of them are forward's.
        leaving: of each array that leaves, the step that copies it out, and the last that uses it.
    """

    def __init__(self, drawn: Draft, times: Times, updates: Sequence[Update] = ()) -> None:
        self.steps, self.turn = [*chain.from_iterable(drawn.units)], len(drawn.units[0])
        self.updates = updates
        calls = [step.calls[-1] for step in self.steps]
        arrays = sorted(self._arrays(drawn), key=lambda each: each.copy < 0)  # what leaves is first
        self.leaving = [(each.copy, each.last) for each in arrays if each.copy >= 0]
        takes, lasts = np.zeros(len(calls), np.int64), defaultdict[int, list[int]](list)
        for number, each in enumerate(arrays):
            takes[each.first] += each.nbytes
            for step in each.lasts:
                lasts[step].append(number)
        kinds = np.array([(None, *COPIES).index(each.op if each.op in COPIES else None) for each in calls])
        ms = np.array([times.ms(each) for each in calls])
        self._least = loads(drawn)
        self._rows = kinds, ms, takes, *self._listed(lasts), *self._listed(copies_before(calls))
        rows = np.array([(each.nbytes, len(each.lasts), each.copy) for each in arrays], np.int64).reshape(-1, 3)
        self._columns = tuple(column.copy() for column in rows.T)

    def _arrays(self, drawn: Draft) -> Iterator[_Array]:
        """What has bytes, of arrays that take over each other's those until one is copied out."""
        sent, users = defaultdict[Hashable, list[int]](list), self._users()
        for at, step in enumerate(self.steps):
            if step.calls[-1].op == "evict":
                sent[Use.place(step.calls[-1].operand(0))].append(at)
        for life in drawn.lives.arena:
            first, nbytes, used = -1, 0, list[tuple[int, bool]]()
            for own in drawn.lives.turns.get(life.key, [life]):
                first, nbytes = own.first if first < 0 else first, max(nbytes, own.nbytes)
                used += users.get(own.key, ())
                copies = [at for at in sent[own.key] if own.first <= at <= own.last]
                if copies or own.last == life.last:
                    lasts = {own.last}
                    if any(moves for _, moves in used):  # whichever then is the last
                        stays = [at for at, moves in used if not moves and first <= at]
                        lasts = {max(stays, default=first), *(at for at, moves in used if moves and first <= at)}
                    copy = copies[-1] if copies else -1
                    yield _Array(round_up(nbytes, ALIGNMENT), first, own.last, sorted(lasts), copy)
                    first, nbytes, used = -1, 0, []

    def _users(self) -> dict[Hashable, list[tuple[int, bool]]]:
        """Of what updates use that may run elsewhere, the steps that use it, and whether they go with these."""
        moving = {step for each in self.updates for step in (each.step, *each.others)}
        used = {place: list[tuple[int, bool]]() for at in moving for place in _places(self.steps[at])}
        for at, step in enumerate(self.steps) if moving else ():
            for place in _places(step):
                if place in used:
                    used[place].append((at, at in moving))
        return used

    def _listed(self, found: Mapping[int, Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Where in the second array what was found of each step begins, with the end."""
        each = [found.get(at, ()) for at in range(len(self.steps))]
        return np.cumsum([0, *map(len, each)]), np.array([*chain.from_iterable(each)], np.int64)

    def run(self, room: int, to: np.ndarray | None = None) -> Ran:
        """The pass, with each step before another one, or where it is, and so much room."""
        from blobmem.net.plan import clockwork  # its compiler takes a while to import

        to = np.arange(len(self.steps)) if to is None else to
        ran = Ran(*clockwork.run(self._rows, self._columns, self.turn, to, self._rooms(room), LINK / BOTH))
        return ran._replace(gone=ran.gone[: len(self.leaving)])

    def until(self, ran: Ran, slack: float) -> list[int]:
        """For each step of a pass as it ran in the order of the calls, up to which one what it uses has its bytes:
        what leaves, so many ms longer than it is on its way, if others do not want them."""
        begins, until = _begins(self.steps, ran.begin), [*range(len(self.steps))]
        for (at, last), gone in zip(self.leaving, ran.gone, strict=True):
            done = int(np.searchsorted(begins, ran.end[at] + slack))
            stop = self.turn if at < self.turn else len(self.steps)
            until[at] = max(last, min(done, int(gone), stop) - 1)
        return until

    def annealed(self, first: Mapping[int, int], to: np.ndarray, room: int, tries: int, heat: float) -> np.ndarray:
        """Before which steps those go that may go before others, of each the first, and updates, for all to take least
        time, as is found from a beginning on with so many tries, of which the first may mostly take longer by such a
        part."""
        from blobmem.net.plan import clockwork

        first = {at: at for each in self.updates for at in each.fetches} | {**first}
        firsts, brings = np.full((2, len(self.steps)), -1)
        firsts[[*first]] = [*first.values()]
        leasts, others = list[int](), dict[int, list[int]]()
        for number, each in enumerate(self.updates):
            leasts.append(max([each.least, *(first[at] for at in each.fetches)]))
            others[number] = sorted([*each.fetches, *each.others])
            brings[each.fetches] = number
        at = np.array([each.step for each in self.updates], np.int64)
        updates = at, np.array(leasts, np.int64), *self._listed(others), brings
        moving = np.concatenate([np.array([*first], np.int64), at])
        heat *= self.run(room, to).ms
        found: np.ndarray = clockwork.annealed(
            self._rows, self._columns, self.turn, to, moving, firsts, updates, self._rooms(room), LINK / BOTH, SLACK,
            tries, heat, 0,
        )  # fmt: skip
        return found

    def _rooms(self, room: int) -> np.ndarray:
        """Bytes that there are in each step, and behind them."""
        return np.append(np.maximum(self._least, room), room)


def ahead(chosen: Sequence[Candidate], load: np.ndarray, drawn: Draft, times: Times, room: int) -> dict[Candidate, int]:
    """The step before which each is brought back, so that it is there in time where there is room for it that early.

    Copies follow one another at the link's speed; what is needed first has the room.
    """
    load, steps, first = loads_without(chosen, load), list(chain.from_iterable(drawn.units)), len(drawn.units[0])
    begins = _begins(steps, reckon(drawn, times, bytes_free=True).begin)
    in_turn = sorted(chosen, key=lambda each: -each.back)[::-1]
    result = {each: each.back for each in in_turn}
    latest, least = dict[Candidate, float](), np.inf
    for each in reversed(in_turn):
        latest[each] = least = min(least, float(begins[each.back]) - _slack(steps)) - times.copy_ms(each.size)
    for each, step in result.items():
        while step > max(each.left + 1, first) and begins[step] > latest[each] and load[step - 1] + each.size <= room:
            step -= 1
            load[step] += each.size
        result[each] = step
    return result


def lingering(drawn: Draft, times: Times, room: int) -> Draft:
    """The same, with arrays that leave in their places until that is done, or others want their bytes where so much
    room is full: whatever has their bytes next need not wait. Where an arena of `enough` bytes is not found so, they
    stay no longer than it takes; then those go sooner that are there beside what ends beyond it; if that is no help all
    go at once, as they are."""
    clock = Clock(drawn, times)
    ran = clock.run(room)
    for slack in (_slack(clock.steps), 0.0):
        until = clock.until(ran, slack)
        found = drawn.lasting(until)
        if _has_places(found):
            return found
    for _ in range(SHORTER if _has_places(drawn) else 0):
        placed = zip(found.lives.arena, found.layout.offsets, strict=True)
        beyond = [life for life, offset in placed if offset + life.nbytes > drawn.enough]
        for at, last in clock.leaving:
            for life in beyond:
                if life.first <= until[at] and last < life.last:
                    until[at] = max(last, life.first - 1)
        found = drawn.lasting(until)
        if _has_places(found):
            return found
    return drawn


def _places(step: Unit) -> set[Hashable]:
    """Where what a step uses lies."""
    return {Use.place(operand) for each in step.calls for operand in each.present()}


def _has_places(drawn: Draft) -> bool:
    """Whether the arena is small enough."""
    return not drawn.enough or drawn.layout.nbytes <= drawn.enough


def _slack(steps: Sequence[Unit]) -> float:
    """By how many ms copies are done before bytes are used."""
    return MORE if len(steps) >= MANY else SLACK


def _begins(steps: Sequence[Unit], begin: np.ndarray) -> np.ndarray:
    """When what is in each of these places may begin: of copies, the last call before them."""
    copies = [step.calls[-1].op in COPIES for step in steps]
    return np.maximum.accumulate(np.where(copies, 0.0, begin))
