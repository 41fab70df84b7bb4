"""Bytes that have left a device for a while, on the host: where a plan puts what an arena has no room for."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.base import Device, Event, Stream
from blobmem.devices.pages import round_up
from blobmem.memory.synced import SyncedMemory
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
            wait = partial(_wait_and_drop, stream, self._host)
            weakref.finalize(self, self.device.when_idle, wait).atexit = False


def _wait_and_drop(stream: Stream, pages: object) -> None:
    stream.synchronize()


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
        self._last: Event | None = None  # of the copies, each of which comes after the one before
        self._user: Stream | None = None  # whose graphs may copy them at any later time

    def take(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on a stream the copy of a view's bytes to here, from `start` on. DeviceError if it fails; `holds` is
        then false."""
        with self._lock:
            self.holds = False
            array = self._array(start, view, stream, Intent.OVERWRITE)
            view.memory.copy_out(view.offset, array, stream, self)
            self._last = stream.record()
            self.epoch += 2
            self.holds = True

    def give(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on a stream the copy of what is here, from `start` on, to where a view is. DeviceError if it fails."""
        self.refresh()
        with self._lock:
            view.memory.copy_in(view.offset, self._array(start, view, stream, Intent.READ), stream, self)
            self._last = stream.record()
            self.epoch += 2

    def lend(self, stream: Stream | None, out: bool) -> None:
        """Let work queued on a stream (None: done at once), graphs above all, copy the bytes to here (`out`), or away.

        That comes after the copies so far. While the epoch stays it may do so again and again, and whoever uses the
        bytes waits for the stream. Who queues it sets `holds`.
        """
        if not out:
            self.refresh()
        with self._lock:
            super().access(Side.HOST, 0, self.size, Intent.OVERWRITE if out else Intent.READ)
            self.block.lock_pages()
            if stream is None:
                self._land()
            elif self._user is not stream:
                self._follow(stream)
                self._last, self._user = None, stream
                self.block.outlast(stream)
                self.epoch += 2
            elif self._last is not None:
                stream.wait(self._last)
                self._last = None

    def refresh(self) -> None:
        """Take what somebody has written in the place that the bytes came from. DeviceError if it fails."""
        if self.holds and self.source is not None:
            self.source.bring_home()

    def outdate(self) -> bool:
        """Somebody writes the place that the bytes came from; whether they are here, and older then."""
        if self.holds:
            self.epoch += 2  # graphs that copy them away have to ask for them
        return self.holds

    def bytes(self) -> np.ndarray:
        """All of them on the host, as uint8, once they were accessed there."""
        return self._host.bytes(0, self.size)

    def _array(self, start: int, view: View, stream: Stream, intent: Intent) -> np.ndarray:
        """So many bytes as the view has, on the host, for a copy on that stream, which comes after the last one."""
        super().access(Side.HOST, start, view.nbytes, intent)
        self.block.lock_pages()
        self._follow(stream)
        return self._host.bytes(start, start + view.nbytes)

    def _follow(self, stream: Stream) -> None:
        """Let a stream come after the copies so far."""
        if self._last is not None:
            stream.wait(self._last)
        if self._user is not None:
            stream.wait(self._user.record())

    def _land(self) -> None:
        """Wait for the copies; a stream whose graphs make them has to say so again."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._user is not None:
            self._user.synchronize()
            self._user = None
            self.epoch += 2

    def _grow_host(self, nbytes: int) -> None:
        if nbytes > self._host.capacity:
            self.block.reserve(Side.HOST, self.block.size)
            self._host.adopt(self.block.host_array(self._start, (self.size,), np.uint8, lend=False))
            self.epoch += 2

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
