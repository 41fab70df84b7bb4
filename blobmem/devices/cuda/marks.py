"""Moments in captured work, and the time between them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from blobmem.devices.cuda.calls import bindings, check
from blobmem.devices.cuda.context import Context


class Marks:
    """Moments in what a thread's compute stream captures, which a graph passes when it is launched."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._events: list[Any] = []

    def put(self) -> None:
        """Mark the present end of what is captured."""
        driver = bindings()
        self._events.append(check(driver.cuEventCreate(0), "cuEventCreate"))
        # else it would be a mere point for other streams to wait for
        external = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL.value
        stream = self._context.compute_stream().native
        check(driver.cuEventRecordWithFlags(self._events[-1], stream, external), "cuEventRecordWithFlags")

    def gaps(self) -> list[float]:
        """Milliseconds from each to the next, once the graph has run, which the caller has seen to. Only once."""
        driver, events = bindings(), self._events
        self._events = []
        try:
            return [float(check(driver.cuEventElapsedTime(*pair), "cuEventElapsedTime")) for pair in pairwise(events)]
        finally:
            for event in events:
                check(driver.cuEventDestroy(event), "cuEventDestroy")
