"""Iterations that are queued as the last one was, where nothing has happened to what they use.

What an access does to a memory depends on the state in which it finds it, and doing all accesses of an iteration once
more leaves each memory in the state in which the first time has left it. So where an iteration had no bytes copied, and
all is still as it has left it, the next one needs none of its accesses: it queues the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem import memory as memory_package
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import moves
from blobmem.memory.slot import Slot
from blobmem.memory.synced import shrinks
from blobmem.memory.travels import travels
from blobmem.memory.workspace import workspaces

if TYPE_CHECKING:
    from blobmem.net.schedule import Schedule
    from blobmem.net.whole import Whole

_MOST_WAIT = 64
_HELD = 2  # in succession, before a graph is made of all of one


class Run(NamedTuple):
    """Calls of a schedule that run by themselves."""

    schedule: Schedule
    start: int = 0
    stop: int | None = None


class Settled:
    """How an iteration has left what it uses, if the next one may be as it was."""

    def __init__(self) -> None:
        self._wait = self._left = 0  # iterations before it looks at one again, where the states do not stay
        self._held = 0  # iterations in succession that were as the one before
        self.forget()

    def forget(self) -> None:
        """Know of no iteration, nor keep alive what one used."""
        self._runs: Sequence[Run] = ()
        self._states: list[Any] = []
        self._coming: tuple[Sequence[Run], int, int] = (), -1, -1
        self._whole: Whole | None = None  # what they are queued as
        self._memories: list[SyncedMemory] = []
        self._slots: list[Slot] = []
        self._shared: list[SyncedMemory] = []

    def holds(self, runs: Sequence[Run]) -> bool:
        """Whether the coming iteration, of these runs on one device, may be queued as the last one was.

        If not, `end` is to be called when it has run.
        """
        if runs and runs == self._runs and not memory_package.debug and self._now() == self._states:
            self._wait = 0
            self._held += 1
            return True
        self._held, self._whole = 0, None
        if self._runs:
            self._left = self._wait = min(2 * self._wait + 1, _MOST_WAIT)
        if self._states and self._states[0] != moves():
            self.forget()
        self._runs, self._coming = (), (runs, travels(), moves())
        return False

    def whole(self, make: Callable[[Sequence[Sequence[Any]]], Whole]) -> Whole | None:
        """The iteration that `holds` was asked about, and was true of, as one graph; None where it is to be repeated in
        pieces.

        `make` gives that of the pieces of each run. It is kept for as long as these run the same, whatever happens in
        between.
        """
        if self._held <= _HELD and self._whole is None:
            last = self._runs[-1].schedule
            pieces = [s.pieces(start, stop) for s, start, stop in self._runs]
            if last.whole is not None and not last.whole.is_of(pieces):
                last.whole = None
            if last.whole is None and self._held == _HELD and last.device.graphs:
                last.whole = make(pieces)
            if last.whole is not None and last.whole.is_made:
                self._whole = last.whole
        return self._whole

    def end(self) -> None:
        """The iteration that `holds` was asked about has ended; nobody else has used any memory meanwhile."""
        (runs, *before), self._coming = self._coming, ((), -1, -1)  # else they would outlast their plan
        if self._left:
            self._left -= 1
        elif runs and before == [travels(), moves()] and all(s.repeats(start, stop) for s, start, stop in runs):
            self._collect(runs)
            self._runs = runs
            self._states = self._now()

    def _collect(self, runs: Sequence[Run]) -> None:
        used = set[SyncedMemory]().union(*(s.used(start, stop) for s, start, stop in runs))
        # slots are many, and have the epoch of their arena, which is looked at once
        self._slots = [memory for memory in used if isinstance(memory, Slot)]
        self._memories = [*{memory.place.memory if isinstance(memory, Slot) else memory for memory in used}]
        self._shared = [memory for memory in used if memory.shared]
        self._widest = max((run.schedule for run in runs), key=lambda schedule: schedule.streams)

    def _now(self) -> list[Any]:
        schedule = self._widest
        rooms = workspaces(schedule.device, schedule.streams)
        return [
            moves(),
            shrinks(),
            schedule.device.compute_stream(),
            rooms,
            [room.epoch for room in rooms],
            [memory.epoch for memory in self._memories],
            [slot.moved for slot in self._slots],
            [memory.writer for memory in self._shared],
        ]
