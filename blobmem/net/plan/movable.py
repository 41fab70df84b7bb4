"""Updates of evicted state that may run elsewhere in backward, with what belongs to them.

An update moves with what copies its arrays out, and with what makes its gradient for it alone; what brings its arrays
comes before it, whenever there is time and room. Where it is late its gradient lasts longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from blobmem.memory import SyncedMemory
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.places import Draft
from blobmem.net.plan.state import content_of, copies_state
from blobmem.net.plan.times import COPIES
from blobmem.net.schedule import Unit
from blobmem.ops.call import memories


class Update(NamedTuple):
    """An update that may run elsewhere; all its steps are numbered from the first of forward on.

    Attributes:
        step: that it is.
        fetches: the steps that bring what it alone uses.
        others: those that make its gradient for it alone, and that copy out.
        least: the first step before which it may run.
    """

    step: int
    fetches: list[int]
    others: list[int]
    least: int


def movable(drawn: Draft) -> list[Update]:
    """The updates of a pass that may run anywhere behind a step; none that have to run in some order."""
    forward, backward = drawn.units
    ahead, found = len(forward), _Finder(backward, _lasting(drawn)).updates()
    return [
        Update(ahead + step, [ahead + at for at in fetches], [ahead + at for at in others], ahead + least)
        for step, fetches, others, least in found
    ]


def _lasting(drawn: Draft) -> set[SyncedMemory]:
    """Arrays of the arena that are in use in backward."""
    ahead, result = len(drawn.units[0]), set[SyncedMemory]()
    for life in drawn.lives.arena:
        own = drawn.lives.turns.get(life.key, [life])[-1]
        if isinstance(own.key, SyncedMemory) and own.last >= ahead:
            result.add(own.key)
    return result


class _Finder:
    """Finds what updates may run elsewhere, with all that belongs to them, by the steps of backward."""

    def __init__(self, units: Sequence[Unit], lasts: Collection[SyncedMemory]) -> None:
        self._units, self._lasts = units, lasts
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

    def updates(self) -> list[Update]:
        """Those that may, in order."""
        found = [self._found(at) for at, unit in enumerate(self._units) if unit.calls[0].op in UPDATES]
        bounded = ((each, self._between(each)) for each in found if each is not None)
        return [each._replace(least=least) for each, (least, most) in bounded if most == len(self._units)]

    def _found(self, at: int) -> Update | None:
        """The update that is this step; None if what it needs is not all its own, or there for it last."""
        unit, makes = self._units[at], list[int]()
        fetches, evicts = list[int](), list[int]()
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
                makes.append(users[0])
            elif goes and users[-2] != at:
                return None
            evicts += users[-1:] if goes else []
        return Update(at, fetches, [*makes, *evicts], 0) if fetches and evicts else None

    def _between(self, update: Update) -> tuple[int, int]:
        """The first step, and the last, before which an update may run for what others do."""
        own = {self._units[at].calls[0].operand(0).memory for at in update.fetches}
        steps = {*update.fetches, update.step, *update.others}
        runs = [at for at in steps if self._units[at].calls[0].op not in COPIES]
        others = set[int]()
        for memory in {*memories(chain.from_iterable(self._units[at].calls for at in runs))} - own:
            changes = not {*self._writers[memory]}.isdisjoint(runs)
            others.update(self._users[memory] if changes else self._writers[memory])
        for at in update.others:  # who brings the same bytes elsewhere has them as they were before
            if copies_state(self._units[at].calls[0]):
                others.update(self._who_copies(at))
        others -= steps
        return (
            max((at + 1 for at in others if at < update.step), default=0),
            min((at for at in others if at > update.step), default=len(self._units)),
        )

    def _who_copies(self, at: int) -> Iterable[int]:
        """The steps that copy any of the bytes that this one does."""
        home, start, nbytes = content_of(self._units[at].calls[0])
        return (other for other, first, stop in self._copies[home] if first < start + nbytes and start < stop)


def _makes_gradient(unit: Unit) -> bool:
    """Whether a step makes a piece of a gradient, which nothing else does."""
    return unit.stop - unit.start == 1 and unit.calls[0].op == "inner_product_backward_weights"
