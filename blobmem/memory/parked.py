"""Bytes that have left a device for a while, on the host: where a plan puts what an arena has no room for."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from blobmem.devices.base import Device, Stream
from blobmem.devices.pages import round_up
from blobmem.memory.synced import SyncedMemory, wait_and_drop
from blobmem.memory.views import ALIGNMENT, Intent, Side, View

if TYPE_CHECKING:
    from blobmem.memory.reordered import Reordered
    from blobmem.memory.slot import Slot


class Block(SyncedMemory):
    """Bytes of the host in which all lies that a plan parks, page-locked as one when the first of it is copied.

    Attributes:
        locked: whether they are page-locked; None before that was tried.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(0, device, "evicted")
        self.locked: bool | None = None
        self._streams: set[Stream] = set()

    def lock_pages(self) -> None:
        """Page-lock them, where the device and the system can."""
        if self.locked is None:
            self.pin()
            self.locked = self.pinned_bytes >= self.size

    def outlast(self, stream: Stream) -> None:
        """Let the pages stay until what is queued on a stream, now or later, has ended."""
        if stream not in self._streams:
            self._streams.add(stream)
            wait = partial(wait_and_drop, stream, self._host)
            weakref.finalize(self, self.device.when_idle, wait).atexit = False


class Parked(SyncedMemory):
    """`nbytes` bytes whose truth is at the host; streams, and graphs that they run, copy them from and to a device.

    Whoever uses them waits for the copies that are under way. They lie in `block`, behind those of others; None is one
    of their own.

    Attributes:
        block: that.
        holds: they are what was taken last, and no pass has begun to write the place that they came from since.
        source: that place: a slot, or what keeps the bytes channels last, as they then are here. It knows what somebody
            else has written there since.
    """

    def __init__(self, nbytes: int, device: Device, name: str = "", block: Block | None = None) -> None:
        super().__init__(nbytes, device, name)
        self.block = Block(device) if block is None else block
        self._start = self.block.size
        self.block.set_size(self._start + round_up(nbytes, ALIGNMENT))
        self.holds = False
        self.source: Slot | Reordered | None = None

    def take(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on a stream the copy of a view's bytes to here, from `start` on. DeviceError if it fails; `holds` is
        then false."""
        with self._lock:
            self.holds = False
            super().take(view, stream, start)
            self.holds = True

    def give(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on a stream the copy of what is here, from `start` on, to where a view is. DeviceError if it fails."""
        self.refresh()
        super().give(view, stream, start)

    def lend(self, stream: Stream | None, out: bool, start: int = 0, nbytes: int | None = None) -> None:
        """See SyncedMemory. Who queues a copy to here sets `holds`."""
        if not out:
            self.refresh()
        super().lend(stream, out, start, nbytes)

    def refresh(self) -> None:
        """Take what somebody has written in the place that the bytes came from. DeviceError if it fails."""
        if self.holds and self.source is not None:
            self.source.bring_home()

    def outdate(self) -> bool:
        """Somebody writes the place that the bytes came from; whether they are here, and older then."""
        if self.holds:
            self.epoch += 2  # graphs that copy them away have to ask for them
        return self.holds

    @property
    def is_locked(self) -> bool:
        return bool(self.block.locked)

    def _for_copy(self, start: int, nbytes: int, intent: Intent) -> np.ndarray:
        array = super()._for_copy(start, nbytes, intent)
        self._lock_pages()
        return array

    def _lock_pages(self) -> None:
        self.block.lock_pages()

    def _outlast(self, stream: Stream) -> None:
        self.block.outlast(stream)

    def _grow_host(self, nbytes: int) -> None:
        if nbytes > self._host.capacity:
            self.block.reserve(Side.HOST, self.block.size)
            self._host.adopt(self.block.host_array(self._start, (self.size,), np.uint8, lend=False))
            self.epoch += 2


def copy_stream(device: Device, out: bool) -> Stream:
    """This thread's stream for copies from the device (`out`), or to it, beside what computes."""
    of_thread, name = device.of_thread.__dict__, "copies out" if out else "copies in"
    stream: Stream | None = of_thread.get(name)
    if stream is None:
        stream = of_thread[name] = device.create_copy_stream()
    return stream
