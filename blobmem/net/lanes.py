"""Steps of a schedule that are queued on several streams: in which order, and which of them wait for which.

These are two that compute and, in graphs, two that copy, one each way. Two steps may run at a time unless they use the
same bytes and one of them writes there; such ones run in the order of the schedule. That is found from the addresses
that they have, whoever put the arrays there: a plan, in which arrays take turns, says where they lie so that there is
little to wait for, and is not relied on.

To everybody else it is all on the first stream: steps are accessed for that one, before any of them is queued; the
others begin after what is queued there by then, and at the end the first one waits for them. What an access turns over
(`net.captured`) is turned on the stream of its step.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices import Device, Event, Stream
from blobmem.errors import DeviceError
from blobmem.memory import SyncedMemory
from blobmem.memory.parked import copy_stream
from blobmem.memory.reordered import turned_later
from blobmem.net.plan.times import Times

if TYPE_CHECKING:
    from blobmem.net.steps import Step

MAIN, SIDE, OUT, IN = range(4)
"""Numbers of streams: the first, the second, those of copies from the device and to it."""

Turns = list[tuple[Any, ...]]
"""Of each array that is to be turned over, `memory.reordered.Turn` and its arguments."""

EARLY = 0.05
"""ms by which a step ends before another one begins for the other not to wait, as far as is known."""

Place = tuple[int, int, bool]
"""Addresses [start, stop) that a step uses, and whether it writes there."""


def waits(
    lanes: Sequence[int], places: Sequence[Sequence[Place]], ms: Sequence[float] | None = None
) -> list[list[int]]:
    """For each step the positions of those of other streams that it waits for, at most one of each stream.

    Streams are in order: it has then come after all steps before these, too, and after what they waited for. What an
    earlier wait has seen to is not waited for again.

    Args:
        lanes: of each step, the number of its stream.
        places: what each uses.
        ms: what each takes, where copies and others should wait for each other as seldom as can be: for the last of
            all steps that are done by then anyway, as far as these tell.
    """
    edges = sorted({edge for used in places for start, stop, _ in used if start < stop for edge in (start, stop)})
    piece = {edge: at for at, edge in enumerate(edges)}
    number = max(lanes, default=0) + 1
    # of each stream, for each piece between two edges: the last step that used it, the last that wrote it
    last_use, last_write = (np.full((number, len(edges)), -1) for _ in range(2))
    known = [np.full(number, -1) for _ in range(number)]  # by each stream: the last steps of all that it comes after
    known_at: list[np.ndarray] = []  # by each step
    result: list[list[int]] = []
    clocks = [_Clock() for _ in range(number)]
    for at, (lane, used) in enumerate(zip(lanes, places, strict=True)):
        spans = [(slice(piece[start], piece[stop]), writes) for start, stop, writes in used if start < stop]
        found = [(last_use if writes else last_write)[:, span].max(axis=1) for span, writes in spans]
        wanted = np.max([np.full(number, -1), *found], axis=0)
        result.append([])
        begin = max([clocks[lane].now, *(clocks[other].end_of(after) for other, after in enumerate(wanted.tolist()))])
        for after in sorted(wanted.tolist(), reverse=True):
            if after >= 0 and lanes[after] != lane and after > known[lane][lanes[after]]:
                if ms is not None and max(lane, lanes[after]) > SIDE:
                    after = max(after, clocks[lanes[after]].last(begin - EARLY))
                result[-1].append(after)
                known[lane] = np.maximum(known[lane], known_at[after])
        clocks[lane].add(at, begin + (0.0 if ms is None else ms[at]))
        known[lane][lane] = at
        known_at.append(known[lane].copy())
        for span, writes in spans:
            last_use[lane, span] = at
            if writes:
                last_write[lane, span] = at
    return result


class _Clock:
    """When the steps of one stream end, in ms."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._ends: list[float] = []

    @property
    def now(self) -> float:
        return self._ends[-1] if self._ends else 0.0

    def add(self, at: int, end: float) -> None:
        self._steps.append(at)
        self._ends.append(end)

    def end_of(self, at: int) -> float:
        """The end of a step of the stream; 0 for -1."""
        return self._ends[bisect_right(self._steps, at) - 1] if at >= 0 else 0.0

    def last(self, ms: float) -> int:
        """The last step that has ended by then, -1 if none has."""
        done = bisect_right(self._ends, ms)
        return self._steps[done - 1] if done else -1


def prepare(
    steps: Iterable[Step],
    within: Iterable[set[SyncedMemory]],
    stream: Stream | None,
    scratch: Sequence[SyncedMemory],
) -> list[Turns]:
    """Access all that the steps use, before any of them is queued; what is then to be turned before each.

    `within` has for each step the memories whose bytes earlier ones leave in another order. Others are turned at once.
    """
    turned: list[Turns] = []
    for step, memories in zip(steps, within, strict=True):
        with turned_later(memories) as turns:
            step.prepare(stream, scratch)
        turned.append(turns)
    return turned


def make(turns: Turns) -> None:
    """Queue what is to be turned."""
    for turn, *arguments in turns:
        turn(*arguments)


def launch(step: Step) -> None:
    """Queue a step that was prepared."""
    step.launch()


def in_turn(steps: Iterable[Step], turned: Iterable[Turns], queue: Callable[[Step], None]) -> None:
    """Have each of the steps, which were prepared, queued by `queue` on the present stream."""
    for step, turns in zip(steps, turned, strict=True):
        make(turns)
        queue(step)


def _places(turns: Turns) -> Iterable[Place]:
    for _, _, source, target, (*shape, dtype), _ in turns:
        nbytes = math.prod(shape) * dtype.itemsize
        yield source, source + nbytes, False
        yield target, target + nbytes, True


class Lanes:
    """Steps on several streams, none of which is the host's.

    Args:
        steps: in order.
        device: where they run.
        within: gives `prepare`'s of steps; None for such as have to run one by one.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        device: Device,
        within: Callable[[Sequence[Step]], list[set[SyncedMemory]] | None],
    ) -> None:
        self.steps = list(steps)
        self._device, self._within = device, within
        self._two = len({step.lane for step in steps}) > 1
        found = {step.copies or step.lane for step in steps}
        self._others = sorted(found - {MAIN}) if len(found) > 1 else []
        self._accessed: tuple[Any, ...] = ()
        self._places: list[list[Place]] = []
        self._waits: list[list[int]] = []
        self._turned: Sequence[Turns] | None = None  # before the steps of the last run, if they ran beside each other

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Run the steps, given this thread's stream and workspaces."""
        beside = stream is not None and self._two and not any(step.once for step in self.steps)
        within = self._within(self.steps) if beside else None
        if within is None:
            self._turned = None
            for step in self.steps:
                step.run(stream, scratch)
        else:
            self._turned = prepare(self.steps, within, stream, scratch)
            self.each(self.steps, self._turned, launch)

    @property
    def repeats(self) -> bool:
        """Whether `run_again` would do what the last run did."""
        return all(step.repeats for step in self.steps)

    def run_again(self) -> None:
        """Queue what the last run did, where every access would find all as that one left it."""
        if self._turned is None:
            for step in self.steps:
                step.run_again()
        else:
            self.each(self.steps, self._turned, launch)

    @property
    def ran(self) -> Any:
        """What the last run was: as long as this is the same, `queue` queues the same."""
        return self._turned, [step.ran for step in self.steps]

    def queue(self, one: Callable[[Step], None]) -> None:
        """Have each step of the last run queued by `one`."""
        if self._turned is None:
            for step in self.steps:
                step.queue(one)
        else:
            self.each(self.steps, self._turned, one)

    def each(self, steps: Sequence[Step], turned: Sequence[Turns], queue: Callable[[Step], None]) -> None:
        """Have each of the steps, which were prepared, queued by `queue`, on its stream and after what it waits for."""
        main = self._device.compute_stream()
        if main is None or not self._others:
            in_turn(steps, turned, queue)
            return
        streams = {MAIN: main} | {lane: self._stream(lane) for lane in self._others}
        after = self._order(steps, turned)
        wanted, ends, now, begun = {*chain(*after)}, dict[int, Event](), main, main.record()
        for lane in self._others:
            streams[lane].wait(begun)
        try:
            for at, step in enumerate(steps):
                stream = streams[step.copies or step.lane]
                for other in after[at]:
                    stream.wait(ends[other])
                if stream is not now:
                    self._device.queue_on(now := stream)
                make(turned[at])
                queue(step)
                if at in wanted:
                    ends[at] = stream.record()
        except BaseException:
            with contextlib.suppress(DeviceError):  # what was raised first says more
                self._join(streams)
            raise
        self._join(streams)

    def _stream(self, lane: int) -> Stream:
        if lane != SIDE:
            return copy_stream(self._device, lane == OUT)
        side = self._device.side_stream()
        assert side is not None
        return side

    def _join(self, streams: Mapping[int, Stream]) -> None:
        main = streams[MAIN]
        self._device.queue_on(main)
        for lane in self._others:
            main.wait(streams[lane].record())

    def _ms(self, steps: Sequence[Step]) -> list[float] | None:
        """What each takes, if some of them copy."""
        if not any(step.copies for step in steps):
            return None
        times = Times(self._device)
        return [times.ms(step.call) for step in steps]

    def _order(self, steps: Sequence[Step], turned: Sequence[Turns]) -> list[list[int]]:
        """What each waits for, worked out anew where any of them uses other bytes."""
        accessed = [step.accessed for step in steps], turned
        if accessed != self._accessed:
            places = [[*step.places(), *_places(turns)] for step, turns in zip(steps, turned, strict=True)]
            if places != self._places:
                lanes = [step.copies or step.lane for step in steps]
                self._places, self._waits = places, waits(lanes, places, self._ms(steps))
            self._accessed = accessed
        return self._waits
