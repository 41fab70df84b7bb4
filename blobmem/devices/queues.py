"""The simulated device's streams: queued work runs only when somebody waits for it, at the last possible moment.

A copy therefore reads its source when it is waited for, and code that forgets to wait sees wrong bytes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from blobmem.devices.base import Event, Stream
from blobmem.errors import DeviceError


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """One thing to do on a stream: `run`, over the allocations `touched`, once the event `after` (if any) is done."""

    run: Callable[[], Any]
    touched: tuple[object, ...] = ()
    after: SimulatedEvent | None = None


class SimulatedEvent(Event):
    """Done when its stream has finished `count` pieces of work."""

    __slots__ = ("count", "stream")

    def __init__(self, stream: SimulatedStream, count: int) -> None:
        self.stream, self.count = stream, count

    @property
    def done(self) -> bool:
        return self.stream.finished >= self.count

    def synchronize(self) -> None:
        if not self.done:
            with self.stream.lock:
                self.stream.finish(self.count)


class SimulatedStream(Stream):
    """A queue of work on a simulated device.

    Attributes:
        finished: how many pieces of work have run, ever.
        pending: how many are waiting.
    """

    def __init__(self, lock: threading.Lock, busy: dict[SimulatedStream, None]) -> None:
        self.lock = lock
        self.finished = 0
        self._busy = busy  # the device's streams with work, kept alive by it
        self._queue: deque[Work] = deque()

    @property
    def pending(self) -> int:
        return len(self._queue)

    def synchronize(self) -> None:
        with self.lock:
            self.finish()

    def record(self) -> SimulatedEvent:
        with self.lock:
            return SimulatedEvent(self, self.finished + len(self._queue))

    def wait(self, event: Event) -> None:
        if not isinstance(event, SimulatedEvent) or not event.stream.belongs_to(self.lock):
            raise DeviceError(f"simulated device: {event!r} is not an event of one of its streams")
        with self.lock:
            if not event.done:
                self.queue(Work(_nothing, after=event))

    # For the device, which holds the lock

    def belongs_to(self, lock: threading.Lock) -> bool:
        return self.lock is lock

    def queue(self, work: Work) -> None:
        self._queue.append(work)
        self._busy[self] = None

    def touches(self, allocation: object) -> bool:
        return any(allocation in work.touched for work in self._queue)

    def finish(self, count: int | None = None) -> None:
        """Run work until `count` pieces have finished (all, by default), and whatever it waits for before it."""
        stack = [(self, self.finished + len(self._queue) if count is None else count)]
        while stack:
            stream, goal = stack[-1]
            if stream.finished >= goal:
                stack.pop()
                continue
            after = stream._queue[0].after
            if after is not None and not after.done:
                stack.append((after.stream, after.count))
                continue
            stream._queue[0].run()
            stream._queue.popleft()
            stream.finished += 1
            if not stream._queue:
                self._busy.pop(stream, None)


def _nothing() -> None:
    pass
