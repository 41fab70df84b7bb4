"""When what is evicted begins to come back, and gives its bytes away: by a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from blobmem.devices.pages import round_up
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.evict import Candidate, loads, loads_without
from blobmem.net.plan.liveness import Use
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

HEAT = 2e-4
"""What part of a pass's time it may mostly take longer by what is tried at first."""


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


class Clock:
    """The steps of a pass by a clock. What leaves has its bytes until its copy is done and others want them. A step has
    the room that is granted, or as much more as it takes anyway.

    Args:
        drawn: of a pass in which all that leaves does so as soon as it can.
        times: of its calls.

    Attributes:
        steps: what it consists of.
        turn: how many of them are forward's.
        leaving: of each array that leaves, the step that copies it out, and the last that uses it.
    """

    def __init__(self, drawn: Draft, times: Times) -> None:
        self.steps, self.turn = [*chain.from_iterable(drawn.units)], len(drawn.units[0])
        calls = [step.calls[-1] for step in self.steps]
        self.leaving, sizes, takes, frees = self._arrays(drawn)
        leaves = defaultdict[int, list[int]](list)
        for array, (_, last) in enumerate(self.leaving):
            leaves[last].append(array)
        kinds = np.array([(None, *COPIES).index(each.op if each.op in COPIES else None) for each in calls])
        ms = np.array([times.ms(each) for each in calls])
        self._least = loads(drawn)
        self._rows = kinds, ms, takes, frees, *self._listed(leaves), *self._listed(copies_before(calls))
        self._leaving = np.array(sizes, np.int64), np.array([copy for copy, _ in self.leaving], np.int64)

    def _arrays(self, drawn: Draft) -> tuple[list[tuple[int, int]], list[int], np.ndarray, np.ndarray]:
        """What leaves, and the bytes of each; those that each step is the first to use, and those of the rest that are
        free behind it."""
        sent, leaving, sizes = defaultdict[Hashable, list[int]](list), list[tuple[int, int]](), list[int]()
        takes, frees = np.zeros((2, len(self.steps)), np.int64)
        for at, step in enumerate(self.steps):
            if step.calls[-1].op == "evict":
                sent[Use.place(step.calls[-1].operand(0))].append(at)
        for life in drawn.lives.arena:
            begun = None
            for own in drawn.lives.turns.get(life.key, [life]):
                first, nbytes = (own.first, own.nbytes) if begun is None else begun
                begun = first, max(nbytes, own.nbytes)
                copies = [at for at in sent[own.key] if own.first <= at <= own.last]
                if copies or own.last == life.last:
                    size, begun = round_up(begun[1], ALIGNMENT), None
                    takes[first] += size
                    if copies:
                        leaving.append((copies[-1], own.last))
                        sizes.append(size)
                    else:
                        frees[own.last] += size
        return leaving, sizes, takes, frees

    def _listed(self, found: Mapping[int, Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Where in the second array what was found of each step begins, with the end."""
        each = [found.get(at, ()) for at in range(len(self.steps))]
        return np.cumsum([0, *map(len, each)]), np.array([*chain.from_iterable(each)], np.int64)

    def run(self, room: int, to: np.ndarray | None = None) -> Ran:
        """The pass, with each step before another one, or where it is, and so much room."""
        from blobmem.net.plan import clockwork  # its compiler takes a while to import

        to = np.arange(len(self.steps)) if to is None else to
        return Ran(*clockwork.run(self._rows, self._leaving, self.turn, to, self._rooms(room), LINK / BOTH))

    def until(self, ran: Ran, slack: float) -> list[int]:
        """For each step of a pass as it ran in the order of the calls, up to which one what it uses has its bytes:
        what leaves, so many ms longer than it is on its way, if others do not want them."""
        begins, until = _begins(self.steps, ran.begin), [*range(len(self.steps))]
        for (at, last), gone in zip(self.leaving, ran.gone, strict=True):
            done = int(np.searchsorted(begins, ran.end[at] + slack))
            stop = self.turn if at < self.turn else len(self.steps)
            until[at] = max(last, min(done, int(gone), stop) - 1)
        return until

    def annealed(self, first: Mapping[int, int], to: np.ndarray, room: int, tries: int) -> np.ndarray:
        """Before which steps those go that may go before others, of each the first, for all to take least time, as is
        found from a beginning on with so many tries."""
        from blobmem.net.plan import clockwork

        firsts, moving = np.arange(len(self.steps)), np.array([*first], np.int64)
        firsts[moving] = [*first.values()]
        heat = HEAT * self.run(room, to).ms
        found: np.ndarray = clockwork.annealed(
            self._rows, self._leaving, self.turn, to, moving, firsts, self._rooms(room), LINK / BOTH, SLACK, tries,
            heat, 0,
        )  # fmt: skip
        return found

    def _rooms(self, room: int) -> np.ndarray:
        """Bytes that there are in each step."""
        return np.maximum(self._least, room)


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
