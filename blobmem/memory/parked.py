"""Bytes that have left a device for a while, on the host: where a plan puts what an arena has no room for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.base import Device, Event, Stream
from blobmem.memory.host_side import PIN_FROM
from blobmem.memory.synced import SyncedMemory
from blobmem.memory.views import Intent, Side, View

if TYPE_CHECKING:
    from blobmem.memory.reordered import Reordered
    from blobmem.memory.slot import Slot


class Parked(SyncedMemory):
    """`nbytes` bytes whose truth is at the host, page-locked where that pays; streams copy them from and to a device.

    Whoever uses them waits for the copies that are under way.

    Attributes:
        holds: they are what was taken last, and no pass has begun to write the place that they came from since.
        source: that place: a slot, or what keeps the bytes channels last, as they then are here. It knows what somebody
            else has written there since.
    """

    def __init__(self, nbytes: int, device: Device, name: str = "") -> None:
        super().__init__(nbytes, device, name)
        self.holds = False
        self.source: Slot | Reordered | None = None
        self._last: Event | None = None  # of the copies, each of which comes after the one before
        self._settled = nbytes < PIN_FROM  # whether they are page-locked, or need not be

    def take(self, view: View, stream: Stream) -> None:
        """Queue on a stream the copy of a view's bytes to here. DeviceError if it fails; `holds` is then false."""
        with self._lock:
            self.holds = False
            array = self._array(view, stream, Intent.OVERWRITE)
            view.memory.copy_out(view.offset, array, stream, self)
            self._last = stream.record()
            self.epoch += 2
            self.holds = True

    def give(self, view: View, stream: Stream) -> None:
        """Queue on a stream the copy of what is here to where a view is. DeviceError if it fails."""
        self.refresh()
        with self._lock:
            view.memory.copy_in(view.offset, self._array(view, stream, Intent.READ), stream, self)
            self._last = stream.record()

    def refresh(self) -> None:
        """Take what somebody has written in the place that the bytes came from. DeviceError if it fails."""
        if self.holds and self.source is not None:
            self.source.bring_home()

    def _array(self, view: View, stream: Stream, intent: Intent) -> np.ndarray:
        """The bytes on the host, for a copy on that stream, which comes after the last one."""
        super().access(Side.HOST, 0, view.nbytes, intent)
        if not self._settled:
            self._land()
            self.pin()
            self._settled = True
        if self._last is not None:
            stream.wait(self._last)
        return self._host.bytes(0, view.nbytes)

    def _land(self) -> None:
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def access(self, side: Side, offset: int, nbytes: int, intent: str, stream: Stream | None = None) -> Any:
        with self._lock:
            self._land()
            return super().access(side, offset, nbytes, intent, stream)


def copy_stream(device: Device, out: bool) -> Stream:
    """This thread's stream for copies from the device (`out`), or to it, beside what computes."""
    of_thread, name = device.of_thread.__dict__, "copies out" if out else "copies in"
    stream: Stream | None = of_thread.get(name)
    if stream is None:
        stream = of_thread[name] = device.create_copy_stream()
    return stream
