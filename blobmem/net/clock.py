"""How long each call of a schedule takes on a device that can say so: measured while the calls run."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from blobmem.devices import Device, Stream
from blobmem.memory import SyncedMemory
from blobmem.net.captured import _turned_within
from blobmem.net.lanes import in_turn, launch, prepare
from blobmem.ops.call import Call

if TYPE_CHECKING:
    from blobmem.net.steps import Step

log = logging.getLogger("blobmem")

_TOGETHER = 64
"""Steps of which a graph is made: the host is then out of the way, as when a pass is one graph."""

MARK = 3.4e-3
"""Milliseconds that a mark adds to a call: 1.3 us are its own, and the kernel behind it begins later than it would
behind another kernel. With that the calls of twelve nets sum to their captured steps on an H200, within 3%."""

LEAST = 0.5e-3
"""Milliseconds that no call takes less than."""


class Clock:
    """Runs the steps of schedules in order on one stream, and knows afterwards how long each took.

    Attributes:
        calls: those that were timed, with the ms that each took, once `stop` has been called. What is not part of
            graphs (copies to the host and back, functions of the host) is not timed, and runs as ever.
    """

    def __init__(self, device: Device) -> None:
        self.calls: list[tuple[Call, float]] = []
        self._device: Any = device
        self._runs: list[tuple[list[Step], Any, Any]] = []  # with their marks and their graph

    def run(self, program: Iterable[Step], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Run the steps, given this thread's stream and workspaces."""
        for can, steps in groupby(program, _can_be_timed):
            left = list(steps)
            while can and left:
                self._run(left[:_TOGETHER], stream, scratch)
                del left[:_TOGETHER]
            for step in left:
                step.run(stream, scratch)

    def _run(self, steps: list[Step], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        within = _turned_within(steps)
        if within is None:  # which no graph can have together
            for step in steps:
                self._run([step], stream, scratch)
            return
        turned = prepare(steps, within, stream, scratch)
        marks = self._device.marks()

        def launch_marked(step: Step) -> None:
            step.launch()
            marks.put()

        def queue(_: Any) -> None:
            marks.put()
            in_turn(steps, turned, launch_marked)

        try:
            graph = self._device.capture(queue)
        except Exception as error:  # any library's
            log.warning("%d calls from layer '%s' on are not timed: %s", len(steps), steps[0].call.layer_name, error)
            in_turn(steps, turned, launch)
            return
        graph.launch()
        self._runs.append((steps, marks, graph))

    def stop(self) -> None:
        """Wait for what has run."""
        stream = self._device.compute_stream()
        if stream is not None:
            stream.synchronize()
        for steps, marks, _ in self._runs:
            taken = zip(steps, marks.gaps(), strict=True)
            self.calls += [(step.call, max(LEAST, ms - MARK)) for step, ms in taken]
        self._runs.clear()

    def keep(self) -> None:
        """Write the times to the file of the device's GPU."""
        from blobmem.ops.cuda import times

        found: dict[times.Key, list[float]] = defaultdict(list)
        for call, ms in self.calls:
            found[times.key_of(call, self._device)].append(ms)
        times.add(self._device, found)


def _can_be_timed(step: Step) -> bool:
    return not (step.eager or step.once or step.call.op in ("evict", "fetch"))
