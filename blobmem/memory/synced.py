"""SyncedMemory: one logical run of bytes that may live on the host, on a device, or both."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

import blobmem.memory as package
from blobmem import devices
from blobmem.devices.base import Device, Event, Stream
from blobmem.devices.pages import Pages
from blobmem.errors import BlobmemError, DeviceError
from blobmem.memory.device_side import DeviceSide, Flight
from blobmem.memory.extents import ZERO, Extents
from blobmem.memory.host_side import HostSide
from blobmem.memory.reordered import Reordered
from blobmem.memory.travels import travelled
from blobmem.memory.views import HEADS, Head, Intent, Side, View, intent_of

_shrinks = 0


def shrinks() -> int:
    """A number that changes after a side of any memory has got less capacity, or another place."""
    return _shrinks


def _shrink() -> None:
    global _shrinks
    _shrinks = next(_counter)


_counter = itertools.count(1)
_HOST, _DEVICE, _BOTH = 1, 2, 3
_HOST_SIDE = Side.HOST
_READ, _OVERWRITE = Intent.READ, Intent.OVERWRITE


class SyncedMemory:
    """Bytes from 0 on without end, which read zero until written; each is kept on the host, on the device, or on both.

    A byte written through any view on either side is what every view reads on either side, until it is written again.
    Which side has the truth is known extent by extent, so that views of any size may share the memory. Nothing is
    allocated before it is touched, and nothing copied that the other side has or that is about to be overwritten.

    Args:
        size: bytes that `cpu_data` and the other calls without a view are about.
        device: the device, or its word ("simulated:8GiB"); None is `blobmem.devices.default()`.
        name: what messages and the device's list of holders call it.
        pinnable: its host side may be page-locked, for copies.

    Attributes:
        epoch: moves whenever repeating an access might matter. If an access was made at some epoch and the epoch is
            the same, making it again would do nothing and give the same address and pages. It goes up, by 2 or more;
            only a `clear` of bytes that the device alone has may move it by 1, which their next overwriting undoes.
        version: moves when the host's pages or the device's address do.
        writer: what `set_writer` was last given; blobs of another owner have it say why they cannot be used
            (`about_blob`).
        watched: somebody relies on the writer being the same while the epoch is; another writer then moves it, once.
        unwritten: no byte has been written since `expect_write`; the next write moves the epoch.
        shared: a mark for those who share memories between nets; nothing here looks at it.
        reordered: bytes that a schedule keeps in another order; whoever accesses them here gets them as they are.
        away: others have the place of the bytes, which are elsewhere meanwhile: a `slot.Slot`'s, or `reordered`.
        evicted: nets bring the bytes to arrays of their arenas while they use them, and from there: the device side is
            not theirs to use, but for
        staying: so many of its first bytes, which stay there.
    """

    away = evicted = False
    staying = 0
    _listener: Callable[[], Callable[[], None] | None] | None = None
    _copied: Event | None = None  # the end of the copies from and to the host side that `take` and `give` have queued
    _user: Stream | None = None  # whose graphs may make such copies at any later time

    def __init__(
        self, size: int = 0, device: Device | str | None = None, name: str = "", pinnable: bool = True
    ) -> None:
        self._lock = threading.RLock()
        self._size = _nonnegative("size", size)
        self._name = name
        self._device = devices.default() if device is None else devices.get(device)
        self._extents = Extents()
        self._host = HostSide(pinnable)
        self._far = DeviceSide(self._device)
        self._views: weakref.WeakValueDictionary[int, View] = weakref.WeakValueDictionary()
        self.epoch = 0
        self._cleared: tuple[int, int, int] | None = None  # epoch before the last clear that can be undone, its range
        self.version = 0
        self.writer: Any = None
        self.watched = False
        self.unwritten = False
        self.shared = False
        self.reordered: Reordered | None = None

    @classmethod
    def adopt(cls, array: np.ndarray, device: Device | str | None = None, name: str = "") -> SyncedMemory:
        """A memory whose host side is `array` itself (C-contiguous and writable), of the array's size in bytes.

        Touching it beyond that size detaches it into memory of its own, contents copied, with a UserWarning.
        """
        memory = cls(array.nbytes, device, name)
        memory.set_host_array(array)
        return memory

    # What it is

    @property
    def size(self) -> int:
        """Bytes that the calls without a view are about."""
        return self._size

    def set_size(self, nbytes: int) -> None:
        """Change `size`, freely up and down; no byte changes. TypeError, ValueError unless an integer from 0 on."""
        self._size = _nonnegative("size", nbytes)

    @property
    def device(self) -> Device:
        """Where the device side lives."""
        return self._device

    @property
    def name(self) -> str:
        """What messages and the device's list of holders call it."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        with self._lock:
            self._name = name
            if self._far.address:
                self._device.relabel(self._far.address, name)

    @property
    def cpu_capacity(self) -> int:
        """Bytes in use on the host; 0 before the first touch."""
        return self._host.capacity

    @property
    def pinned_bytes(self) -> int:
        """Bytes from 0 on that are page-locked on the host."""
        return self._host.pinned

    @property
    def gpu_capacity(self) -> int:
        """Bytes allocated on the device; 0 before the first touch."""
        return self._far.capacity

    @property
    def head(self) -> Head:
        """Where the newest of the first `size` bytes are; mixed if that differs among them."""
        with self._lock:
            bits = self._extents.at(0, self._size) if self._size else ZERO
            return Head.MIXED if bits is None else HEADS[bits]

    def is_zero(self, offset: int, nbytes: int) -> bool:
        """Whether none of these bytes was written since the memory was made or they were last cleared."""
        with self._lock:
            if self.reordered is not None and self.reordered.newer:
                return nbytes == 0
            return nbytes == 0 or self._extents.at(offset, offset + nbytes) == ZERO

    def resident_side(self, offset: int, nbytes: int) -> Side:
        """The side where these bytes can be used with the fewest copied; the device if both have them all."""
        with self._lock:
            count = [0, 0, 0, 0]
            for start, stop, bits in self._extents.runs(offset, offset + nbytes):
                count[bits] += stop - start
        on_device = count[_DEVICE] + count[_BOTH] and count[_HOST] <= count[_DEVICE]
        return Side.DEVICE if on_device else Side.HOST

    def is_at_host(self, offset: int, nbytes: int) -> bool:
        """Whether the host has the newest of these bytes, or they are zero, whoever else has them."""
        with self._lock:
            return all(bits != _DEVICE for _, _, bits in self._extents.runs(offset, offset + nbytes))

    def lent(self, offset: int, nbytes: int, writeable: bool = False) -> bool:
        """Whether an array handed out over some of these bytes is still alive (a writable one, if so asked)."""
        with self._lock:
            return bool(self._host.lent(offset, offset + nbytes, writeable))

    @property
    def adopted(self) -> int:
        """Bytes of the array that the host side is (`set_host_array`); 0 if that is memory of our own."""
        return self._host.adopted

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"memory {self._name!r} and what lives in it (blobs, layers, nets, solvers) cannot be copied or pickled: "
            f"copy the arrays, net.save(file) the parameters, or build another net that takes them (share_with)"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, size={self._size}, head={self.head}, "
            f"cpu_capacity={self.cpu_capacity}, gpu_capacity={self.gpu_capacity}, device={self.device.name})"
        )

    # The calls without a view

    def cpu_data(self) -> np.ndarray:
        """The first `size` bytes on the host, to read: a read-only uint8 array."""
        return self._cpu_data(_READ)

    def mutable_cpu_data(self) -> np.ndarray:
        """The first `size` bytes on the host, to read and write: a uint8 array. Counts as a write."""
        return self._cpu_data(Intent.WRITE)

    def _cpu_data(self, intent: Intent) -> np.ndarray:
        size = self._size
        self.announce(intent)
        self.access(_HOST_SIDE, 0, size, intent)
        return self.host_array(0, (size,), np.uint8, intent is not _READ)

    def gpu_data(self) -> int:
        """The device address of the first `size` bytes, to read."""
        return self.access(Side.DEVICE, 0, self._size, _READ) or 0

    def mutable_gpu_data(self) -> int:
        """The device address of the first `size` bytes, to read and write. Counts as a write."""
        self.announce(Intent.WRITE)
        return self.access(Side.DEVICE, 0, self._size, Intent.WRITE) or 0

    def view(self, offset: int, nbytes: int) -> View:
        """The view of `nbytes` bytes from `offset`, a multiple of 512; it may reach beyond `size`."""
        return View(self, offset, nbytes)

    def register(self, view: View) -> None:
        """Know of a view that is alive, for `trim`. Views call it themselves."""
        with self._lock:
            self._views[id(view)] = view

    def views(self) -> list[View]:
        """The views that are alive."""
        with self._lock:
            return list(self._views.values())

    @property
    def view_count(self) -> int:
        """How many views are alive."""
        with self._lock:
            return len(self._views)

    @property
    def lock(self) -> threading.RLock:
        """Held around every call."""
        return self._lock

    def set_writer(self, writer: Any) -> None:
        """Remember who writes the bytes from now on."""
        with self._lock:
            if writer is not self.writer:
                self.writer = writer
                if self.watched:  # schedules do not: nets that take turns would have to look at everything anew
                    self.watched = False
                    self.epoch += 2

    def expect_write(self) -> None:
        """Let the next write move the epoch, which another one by whoever wrote the bytes last need not."""
        with self._lock:
            if not self.unwritten:
                self.unwritten = True
                self.epoch += 2  # who relies on it has to make the access again

    def _begin_write(self) -> None:
        self.unwritten = False
        self.epoch += 2

    def listen(self, listener: Callable[[], Callable[[], None] | None]) -> None:
        """Have `announce` call what the listener, a weak reference, refers to, once, and that of the last listener."""
        with self._lock:
            self._listener = listener
            self.epoch += 2  # who has written has to say so again

    def announce(self, intent: Intent) -> None:
        """Somebody who is no schedule is about to use bytes; if it writes them whoever listens may read them before."""
        if self._listener is None or intent is _READ:
            return
        with self._lock:
            call = None if self._listener is None else self._listener()
            if call is not None:
                call()
            self._listener = None

    # Access

    def access(self, side: Side, offset: int, nbytes: int, intent: str, stream: Stream | None = None) -> Any:
        """Make bytes [offset, offset + nbytes) right on one side for the intent, in one locked step.

        READ and WRITE bring what the side lacks from the other side, or zero it; WRITE and OVERWRITE make this side
        the only one that has the bytes.

        Args:
            side: which side will be used.
            offset, nbytes: the bytes; capacity grows to hold them.
            intent: "read", "write" or "overwrite".
            stream: for the device, the stream whose work will use the bytes: it is ordered after whatever is in flight
                over them, and later accesses are ordered after it. None: the caller uses them at once, and waits here.

        Returns:
            The device address of `offset` (0 if there is nothing and no byte is asked for); None for the host, whose
            array `host_array` makes.

        Raises:
            OutOfDeviceMemory: there is no room; nothing has changed, and the same call succeeds once there is.
            DeviceError: there is no device side, or a copy failed; what was brought before stays brought, and each
                byte is still where it was.
            BlobmemError: in debug mode, a late write.
        """
        with self._lock:
            stop = offset + nbytes
            if self._copied is not None or self._user is not None:
                self._land()
            if self.reordered is not None:
                self.reordered.before_access(offset, stop, intent_of(intent), stream)
            if self.unwritten and intent != _READ:
                self._begin_write()
            bits = self._extents.at(offset, stop)
            host = self._host
            if side is _HOST_SIDE:
                if (bits == _HOST or (bits == _BOTH and intent == _READ)) and host.seals is None:
                    return None
                self._access_host(offset, stop, intent_of(intent), bits)
                return None
            far = self._far
            if (bits == _DEVICE or (bits == _BOTH and intent == _READ)) and host.seals is None:
                if stream is None and not far.flights:
                    return far.address + offset
                if far.is_settled(offset, stop, intent_of(intent) is not _READ, stream):
                    return far.address + offset
            elif (
                intent == _OVERWRITE and 0 <= offset < stop <= far.capacity and host.seals is None
                and not package.debug and far.is_settled(offset, stop, True, stream)
            ):  # fmt: skip
                if not self._refill(offset, stop):
                    self._put(offset, stop, _DEVICE)
                return far.address + offset
            return self._access_device(offset, stop, intent_of(intent), stream, bits)

    def _access_host(self, start: int, stop: int, intent: Intent, bits: int | None) -> None:
        """`bits` are what the extents have for these bytes."""
        if not self._range(start, stop):
            return
        self._grow_host(stop)
        if intent is _READ and self._host.seals is None and bits == _DEVICE:  # the most usual
            if self._far.flights and self._far.land_for_host(start, stop, True, True):
                self.epoch += 2
            self._bring_to_host(start, stop, _DEVICE)
            return
        missing = [run for run in self._extents.runs(start, stop) if not run[2] & _HOST]
        brings = intent is not _OVERWRITE
        fetches = brings and any(bits == _DEVICE for _, _, bits in missing)
        self._far.drop_finished()
        if self._far.land_for_host(start, stop, intent is not _READ or bool(missing), fetches):
            self.epoch += 2
        if self._host.seals is not None:
            self._host.verify(start, stop, self._name)
            for a, b in [(start, stop)] if intent is not _READ else [(a, b) for a, b, _ in missing]:
                self._host.release(a, b)
        if brings:
            for a, b, bits in missing:
                self._bring_to_host(a, b, bits)
        if intent is not _READ:
            self._host.written(stop)
            self._put(start, stop, _HOST)

    def _bring_to_host(self, start: int, stop: int, bits: int) -> None:
        travelled()
        if bits == _DEVICE:
            self._pin_for(stop)
            self._device.memcpy_dtoh(self._host.bytes(start, stop), self._far.address + start)
            self._host.written(stop)
        elif self._device.compute:
            self._host.zero(start, stop)
        self._put(start, stop, bits | _HOST)

    def _access_device(self, start: int, stop: int, intent: Intent, stream: Stream | None, bits: int | None) -> int:
        """`bits` are what the extents have for these bytes."""
        if not self._range(start, stop):
            return self._far.address and self._far.address + start
        self._grow_device(stop)
        far = self._far
        runs = [(start, stop, bits)] if bits is not None else list(self._extents.runs(start, stop))
        missing = [run for run in runs if not run[2] & _DEVICE]
        if far.flights:
            far.drop_finished()
            if far.order(start, stop, intent is not _READ or bool(missing), stream):
                self.epoch += 2
        if self._host.seals is not None:
            self._host.verify(start, stop, self._name)
        if missing and intent is not _OVERWRITE:
            self._bring_to_device(missing, stream)
        if intent is not _READ:
            self._put(start, stop, _DEVICE)
        if package.debug:
            for a, b, bits in runs:
                if bits == _HOST:
                    self._host.seal(a, b)
        if stream is not None and self._far.use(start, stop, intent is not _READ, stream):
            self.epoch += 2
        return self._far.address + start

    def _bring_to_device(self, missing: Sequence[tuple[int, int, int]], stream: Stream | None) -> None:
        travelled()
        self._pin_for(max((b for _, b, bits in missing if bits == _HOST), default=0))
        queued = 0
        try:
            for a, b, bits in missing:
                address = self._far.address + a
                if bits == _HOST:
                    self._device.memcpy_htod(address, self._host.bytes(a, b), stream)
                else:
                    self._device.memset(address, 0, b - a, stream)
                queued = b
                self._put(a, b, bits | _DEVICE)
        finally:
            if queued and stream is not None:
                start = missing[0][0]
                self._far.flights.append(Flight(start, queued, stream, stream.record(), reads_host=True, writes=True))

    def _pin_for(self, stop: int) -> None:
        if stop and self._host.wants_pin(stop):
            self.pin()

    def pin(self) -> None:
        """Page-lock the host's side for copies to and from the device, where they can do that; waits for copies.

        Nobody has to: memories of some size that travel again and again are.
        """
        with self._lock:
            self._land()
            self._far.land_copies()
            self._host.pin(self._device)

    def async_gpu_push(self, stream: Stream) -> None:
        """Queue on `stream` the copies that the device lacks of the first `size` bytes; both sides have them at once.

        Whoever then writes them on the host, or uses them on the device, waits for the copies or comes after them.
        OutOfDeviceMemory and DeviceError as for `access`.
        """
        with self._lock:
            if self._size == 0:
                return
            self._land()
            if self.reordered is not None:
                self.reordered.before_access(0, self._size, _READ, stream)
            self._grow_device(self._size)
            missing = [run for run in self._extents.runs(0, self._size) if not run[2] & _DEVICE]
            self._far.drop_finished()
            for a, b, _ in missing:
                if self._far.order(a, b, True, stream):
                    self.epoch += 2
            self._bring_to_device(missing, stream)
            if package.debug:
                for a, b, bits in missing:
                    if bits == _HOST:
                        self._host.seal(a, b)

    def copy_out(self, offset: int, array: np.ndarray, stream: Stream, owner: object) -> None:
        """Queue on `stream` the copy of the device's bytes from `offset` on into a host array of uint8.

        It comes after what writes them now, and whoever writes them later comes after it. `owner`, whose array it is,
        is kept until then. DeviceError if it fails.
        """
        stop = offset + array.nbytes
        with self._lock:
            far = self._begin_copy(offset, stop, False, stream)
            missing = [run for run in self._extents.runs(offset, stop) if not run[2] & _DEVICE]
            self._bring_to_device(missing, stream)
            self._device.memcpy_dtoh(array, far.address + offset, stream)
            far.flights.append(Flight(offset, stop, stream, stream.record(), False, False, owner))
            self.epoch += 2

    def copy_in(self, offset: int, array: np.ndarray, stream: Stream, owner: object) -> None:
        """Queue on `stream` the copy of a host array of uint8 over the device's bytes from `offset` on.

        It comes after what uses them now, and whoever uses them later comes after it. `owner`, whose array it is, is
        kept until then. DeviceError if it fails.
        """
        stop = offset + array.nbytes
        with self._lock:
            far = self._begin_copy(offset, stop, True, stream)
            self._device.memcpy_htod(far.address + offset, array, stream)
            self._extents.put(offset, stop, _DEVICE)
            far.flights.append(Flight(offset, stop, stream, stream.record(), False, True, owner))
            self.epoch += 2

    def _begin_copy(self, start: int, stop: int, writes: bool, stream: Stream) -> DeviceSide:
        """Let `stream` come after what is in the way of a copy."""
        travelled()
        self._grow_device(stop)
        self._far.drop_finished()
        self._far.order(start, stop, writes, stream)
        return self._far

    def take(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on `stream` the copy of another memory's bytes, on its device, to here, from `start` on, where the host
        then has them.

        Whoever uses them here waits for it. DeviceError if it fails.
        """
        with self._lock:
            array = self._for_copy(start, view.nbytes, Intent.OVERWRITE)
            self._follow(stream)
            view.memory.copy_out(view.offset, array, stream, self)
            self._copied = stream.record()
            self._begin_write()

    def give(self, view: View, stream: Stream, start: int = 0) -> None:
        """Queue on `stream` the copy of what is here from `start` on, from the host's side, to another memory's bytes
        on its device.

        Bytes that are zero are not copied, but zero there, too. DeviceError if it fails.
        """
        with self._lock:
            if self.is_zero(start, view.nbytes):
                view.memory.clear(view.offset, view.nbytes)
                return
            array = self._for_copy(start, view.nbytes, _READ)
            self._follow(stream)
            view.memory.copy_in(view.offset, array, stream, self)
            self._copied = stream.record()
            self.epoch += 2

    def lend(self, stream: Stream | None, out: bool, start: int = 0, nbytes: int | None = None) -> None:
        """Let work queued on a stream (None: done at once), graphs above all, copy these bytes (None: all) to the host
        (`out`), or from there.

        That comes after the copies so far. While the epoch stays it may do so again and again, and whoever uses the
        bytes waits for the stream.
        """
        with self._lock:
            self._for_copy(start, self._size if nbytes is None else nbytes, Intent.OVERWRITE if out else _READ)
            if out and self.unwritten:
                self._begin_write()
            if stream is None or self._user is not stream:
                self._lock_pages()
            if stream is None:
                self._land()
            elif self._user is not stream:
                self._follow(stream)
                self._copied, self._user = None, stream
                self._outlast(stream)
                self.epoch += 2
            elif self._copied is not None:
                stream.wait(self._copied)
                self._copied = None

    def bytes(self, start: int = 0, nbytes: int | None = None) -> np.ndarray:
        """These bytes on the host, which were lent, as uint8."""
        return self._host.bytes(start, start + (self._size if nbytes is None else nbytes))

    @property
    def is_locked(self) -> bool:
        """Whether the host's side is page-locked, as copies in graphs want it."""
        return self.pinned_bytes >= self._host.capacity

    def _lock_pages(self) -> None:
        if not self.is_locked:
            self.pin()

    def _outlast(self, stream: Stream) -> None:
        """Let the host's pages stay until what is queued on a stream, now or later, has ended."""
        wait = partial(wait_and_drop, stream, self._host)
        weakref.finalize(self, self._device.when_idle, wait).atexit = False

    def _follow(self, stream: Stream) -> None:
        """Let a stream come after the copies so far."""
        if self._copied is not None:
            stream.wait(self._copied)
        if self._user is not None:
            stream.wait(self._user.record())

    def _for_copy(self, start: int, nbytes: int, intent: Intent) -> np.ndarray:
        """So many bytes on the host, for a copy of which nobody waits for the end here."""
        stop = start + nbytes
        bits = self._extents.at(start, stop)
        if stop > self._host.capacity:  # for all of it: growing pages that are locked means locking them anew
            self._grow_host(max(stop, self._size, *(view.offset + view.nbytes for view in self.views())))
        if self._host.wants_pin(stop):
            self.pin()
        if intent is _READ and bits not in (_HOST, _BOTH):
            self._land()  # what is brought from elsewhere is not queued
        self._access_host(start, stop, intent, bits)
        return self._host.bytes(start, stop)

    def _land(self) -> None:
        """Wait for what `take` and `give` have queued, and graphs that it was lent to; these have to ask again."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._user is not None:
            self._user.synchronize()
            self._user = None
            self.epoch += 2

    def host_array(
        self, offset: int, shape: Sequence[int], dtype: Any, writeable: bool = True, lend: bool = True
    ) -> np.ndarray:
        """A new array over the host's bytes from `offset`; no state changes, so `access` comes first.

        With `lend` the memory knows of it, and of every view NumPy makes of it, while it is alive: see `lent`, `trim`
        and the debug mode. BlobmemError if the bytes were never accessed on the host.
        """
        with self._lock:
            return self._host.array(offset, shape, dtype, writeable, lend, self._name)

    def allow_late(self, offset: int, nbytes: int) -> None:
        """In debug mode, take what was written to these bytes through arrays handed out before for right."""
        with self._lock:
            self._host.release(offset, offset + nbytes)

    def clear(self, offset: int, nbytes: int) -> None:
        """Let these bytes read zero from now on, on both sides; neither is touched until somebody reads them there."""
        with self._lock:
            stop = offset + nbytes
            self.announce(_OVERWRITE)
            if self.unwritten:
                self._begin_write()
            before, seen = (self.epoch, offset, stop), self._cleared
            if seen == before and self.reordered is None and self._host.seals is None:  # as in every iteration
                self._extents.put(offset, stop, ZERO)
                self.epoch += 1
                return
            if not self._range(offset, stop):
                return
            if self.reordered is not None:
                self.reordered.before_access(offset, stop, _OVERWRITE, None)
            if self._host.seals is not None:
                self._host.verify(offset, stop, self._name)
                self._host.release(offset, stop)
            before = self.epoch, offset, stop
            # an epoch says what state the bytes are in: of two clears from the same one, the other range's moves on
            if self._extents.at(offset, stop) == _DEVICE and (seen is None or seen[0] != self.epoch or seen == before):
                self._extents.put(offset, stop, ZERO)
                self._cleared = before
                self.epoch += 1
            else:
                self._put(offset, stop, ZERO)

    def is_cleared_since(self, epoch: int, offset: int, nbytes: int) -> bool:
        """Whether nothing has happened since an epoch but that these bytes, which the device had, were cleared."""
        return self.epoch == epoch + 1 and self._cleared == (epoch, offset, offset + nbytes)

    def refill(self, epoch: int, offset: int, nbytes: int) -> bool:
        """If `is_cleared_since`, repeat an access of that epoch to these bytes on the device, to overwrite them now."""
        with self._lock:
            return self.is_cleared_since(epoch, offset, nbytes) and self._refill(offset, offset + nbytes)

    def _refill(self, start: int, stop: int) -> bool:
        """Undo a `clear` of these bytes, as they are overwritten on the device, if nothing has happened since."""
        if self._cleared != (self.epoch - 1, start, stop):
            return False
        self._extents.put(start, stop, _DEVICE)
        self.epoch -= 1
        return True

    # Other places for the bytes

    def set_host_array(self, array: np.ndarray) -> None:
        """Let the host side be `array` itself (C-contiguous, writable) from now on, which has the truth of its bytes.

        Bytes beyond it read zero; arrays handed out before are over the old ones. Waits for what is in flight.
        ValueError for another array.
        """
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(
                f"only a C-contiguous, writable array can be adopted; "
                f"this one of shape {array.shape} is not: give np.ascontiguousarray(array), or array.copy()"
            )
        with self._lock:
            self.announce(_OVERWRITE)
            self._land()
            self._far.land()
            self._drop_reordered()
            self.version += self._host.capacity > 0
            self._host.adopt(array)
            _shrink()
            self._extents.put(0, None, ZERO)
            self._extents.put(0, array.nbytes, _HOST)
            self.epoch += 2

    def set_device_array(self, address: int, nbytes: int, owner: Any) -> None:
        """Let the device side be somebody else's bytes from now on, which `owner` keeps alive, and which are the truth.

        Bytes beyond them read zero. Waits for what is in flight.
        """
        with self._lock:
            self.announce(_OVERWRITE)
            self._drop_reordered()
            self._far.adopt(address, nbytes, owner)
            _shrink()
            self._extents.put(0, None, ZERO)
            self._extents.put(0, nbytes, _DEVICE)
            self.version += 1
            self.epoch += 2

    def hold_device(self) -> Any:
        """What keeps the device side where it is, and the memory alive, as long as it is kept."""
        with self._lock:
            hold = self._far.hold()
            hold.memory = self
            return hold

    def fetch(self) -> None:
        """Bring to the host what only the device has. DeviceError or MemoryError, and no byte is lost, if it fails."""
        with self._lock:
            self._land()
            if self.reordered is not None:
                self.reordered.before_access(0, sys.maxsize, _READ, None)
            for a, b, bits in list(self._extents.runs(0, self._far.capacity)):
                if bits == _DEVICE:
                    self._access_host(a, b, _READ, bits)

    def move_to(self, device: Device) -> None:
        """Live on another device from now on: what only the old one has comes to the host, and its side is given back.

        DeviceError or MemoryError, and the memory is where it was, if the bytes cannot come.
        """
        with self._lock:
            if device is self._device:
                return
            self.fetch()
            for a, b, bits in list(self._extents.runs(0, self._far.capacity)):
                if bits & _DEVICE:
                    self._extents.put(a, b, _HOST)
            self._far.close()
            self._drop_reordered()
            self._host.unpin()
            self._device, self._far = device, DeviceSide(device)
            _shrink()
            self.version += 1
            self.epoch += 2

    def leave_device(self) -> bool:
        """Give back the device's side, what only that has coming to the host; whether it was given back: not while
        somebody else uses it, or it is somebody else's. DeviceError or MemoryError, and it is not, if bytes cannot
        come.
        """
        with self._lock:
            far = self._far
            if far.held() is not None or far.owner is not None:
                return False
            self.fetch()
            for a, b, bits in list(self._extents.runs(0, far.capacity)):
                if bits & _DEVICE:
                    self._extents.put(a, b, _HOST)
            if far.capacity:
                far.close()
                _shrink()
                self.version += 1
            self.epoch += 2
            return True

    # Capacity

    def reserve(self, side: Side, nbytes: int) -> None:
        """Grow one side's capacity to at least `nbytes`; no state changes. OutOfDeviceMemory changes nothing."""
        with self._lock:
            if _nonnegative("capacity", nbytes):
                self._grow_host(nbytes) if side is _HOST_SIDE else self._grow_device(nbytes)

    def unreserve(self, side: Side, nbytes: int) -> None:
        """Undo a `reserve`: give back one side's capacity beyond `nbytes`.

        BlobmemError, and nothing has changed, if that side has bytes there, or an array is handed out over them.
        """
        with self._lock:
            self._land()
            host, far = self._host, self._far
            capacity = host.capacity if side is _HOST_SIDE else far.capacity
            used = any(bits & side for _, _, bits in self._extents.runs(nbytes, capacity))
            if used or (side is _HOST_SIDE and host.lent(nbytes, capacity)):
                raise BlobmemError(
                    f"cannot take back what memory {self._name!r} reserved beyond {nbytes} bytes: "
                    f"it has been used since; trim gives back what no view needs"
                )
            if nbytes < capacity:
                host.discard(nbytes) if side is _HOST_SIDE else far.shrink(nbytes)
                _shrink()
                self.version += nbytes == 0
                self.epoch += 2

    def trim(self) -> int:
        """Give back, on both sides, what lies beyond the largest of `size` and every view alive; the bytes given back.

        Waits for what is in flight. Bytes beyond read zero afterwards. An adopted array stays whole. BlobmemError, and
        nothing has changed, if an array handed out over them is alive.
        """
        with self._lock:
            self._land()
            views = [view.offset + view.nbytes for view in self.views()]
            keep = max([self._size, self._host.adopted, *views])
            before = self._host.capacity + self._far.capacity
            if keep >= max(self._host.capacity, self._far.capacity):
                return 0
            for a, b in self._host.lent(keep, self._host.capacity):
                raise BlobmemError(
                    f"cannot trim memory {self._name!r} to {keep} bytes: an array handed out over its bytes {a} to {b} "
                    f"is still alive. Drop it (or copy it), or keep a view over its bytes"
                )
            if keep < self._far.capacity and self._far.held() is not None:
                raise BlobmemError(
                    f"cannot trim memory {self._name!r} to {keep} bytes: a device array handed out over it "
                    f"is still alive. Drop it (or copy it)"
                )
            if self._far.land():
                self.epoch += 2
            if keep < self._far.capacity:
                self._far.shrink(keep)
                self.version += keep == 0
            self._host.discard(keep)
            _shrink()
            if self._host.seals is not None:
                self._host.release(keep, max(keep, before))
            self._extents.put(keep, None, ZERO)
            self.epoch += 2
            return before - self._host.capacity - self._far.capacity

    def _make_pages(self, nbytes: int) -> Pages:
        return Pages(nbytes)  # a CUDA device will want to pin them

    def _grow_host(self, nbytes: int) -> None:
        host = self._host
        if nbytes <= host.capacity:
            return
        if nbytes > host.reserved:
            self._land()
            kept = [(a, b) for a, b, bits in self._extents.runs(0, host.capacity) if bits & _HOST]
            self.version += host.move(self._make_pages(nbytes), kept, self._name)
        host.grow(nbytes)
        self.epoch += 2

    def _grow_device(self, nbytes: int) -> None:
        far = self._far
        if nbytes <= far.capacity:
            return
        if self._device.is_host:
            raise DeviceError(
                f"memory {self._name!r} has no device side: it was made for the host alone. "
                f"Make it with a device, for instance SyncedMemory(size, device='simulated')"
            )
        if not far.address:
            weakref.finalize(self, self._device.when_idle, far.close).atexit = False
        self.version += far.grow(nbytes, self._name)
        self.epoch += 2

    def _drop_reordered(self) -> None:
        if self.reordered is not None:
            self.reordered.end()
            self.reordered = None

    def _put(self, start: int, stop: int, bits: int) -> None:
        if self._extents.put(start, stop, bits):
            self.epoch += 2

    def _range(self, start: int, stop: int) -> bool:
        if start < 0 or stop < start:
            raise ValueError(f"memory {self._name!r}: {stop - start} bytes at {start} is not a range of it")
        return stop > start


def wait_and_drop(stream: Stream, pages: object) -> None:
    """Wait for a stream whose work uses these pages."""
    stream.synchronize()


def _nonnegative(what: str, value: int) -> int:
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"a memory's {what} is 0 bytes or more, not {value}")
    return value
