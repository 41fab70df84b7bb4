"""A place in an arena, which is a memory to whoever has views of it: arrays that take turns at the same bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from blobmem.devices.base import Device, Stream
from blobmem.errors import BlobmemError
from blobmem.memory.extents import ZERO
from blobmem.memory.parked import Parked, copy_stream
from blobmem.memory.synced import SyncedMemory
from blobmem.memory.views import HEADS, Head, Intent, Side, View, intent_of


class Slot(SyncedMemory):
    """`nbytes` bytes of another memory, the arena, from `offset` (a multiple of 512) on.

    Several slots of one arena may overlap: a byte written through one is what the others read there. The arena knows
    which side has the truth and what is in flight, so that copies and streams are ordered between all of them; views,
    the writer, the mark `shared` and bytes in another order are the slot's own. While it is alive `trim` of the arena
    keeps its bytes.

    Attributes:
        place: its bytes in the arena.
        moved: how far its epoch is beyond the arena's and its home's.
        home: where its bytes are while others have its place, if they are anywhere.
        away: they are there, and whoever uses the slot uses them.
        newer: it was written since they went there.

    BlobmemError for bytes beyond its end, and for an array of the user's in place of its own.
    """

    def __init__(self, arena: SyncedMemory, offset: int, nbytes: int, name: str = "") -> None:
        self.place = arena.view(offset, nbytes)
        self._arena = arena
        self._lock: threading.RLock = arena.lock
        self._size = nbytes
        self._name = name
        self._views: weakref.WeakValueDictionary[int, View] = weakref.WeakValueDictionary()
        self.moved = 0
        self.home: Parked | None = None
        self.away = self.newer = False
        self.writer: Any = None
        self.watched = False
        self.shared = False
        self.reordered = None

    # What it is

    @property
    def device(self) -> Device:
        return self._arena.device

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    @property
    def epoch(self) -> int:
        """The arena's, and what else has happened to this slot and its home: a change of that moves no other one's."""
        return self._arena.epoch + self._beyond

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.moved += value - self.epoch

    @property
    def _beyond(self) -> int:
        """How far its epoch is beyond the arena's."""
        return self.moved if self.home is None else self.moved + self.home.epoch

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._arena.version if self._home is None else ~self._home.version  # another array's

    @property
    def cpu_capacity(self) -> int:
        return self._within(self._arena.cpu_capacity)

    @property
    def pinned_bytes(self) -> int:
        return self._within(self._arena.pinned_bytes)

    @property
    def gpu_capacity(self) -> int:
        return self._within(self._arena.gpu_capacity)

    @property
    def _home(self) -> Parked | None:
        """Where its bytes are now, if that is not the arena."""
        return self.home if self.away else None

    def _within(self, capacity: int) -> int:
        return max(0, min(capacity - self.place.offset, self.place.nbytes))

    @property
    def head(self) -> Head:
        with self._lock:
            if self._home is not None:
                return self._home.head
            start = self.place.offset
            bits = self._arena._extents.at(start, start + self._size) if self._size else ZERO
            return Head.MIXED if bits is None else HEADS[bits]

    def is_zero(self, offset: int, nbytes: int) -> bool:
        with self._lock:
            if self._home is not None:
                return self._home.is_zero(offset, nbytes)
            if self.reordered is not None and self.reordered.newer:
                return nbytes == 0
            return self._arena.is_zero(self._at(offset, nbytes), nbytes)

    def resident_side(self, offset: int, nbytes: int) -> Side:
        if self._home is not None:
            return self._home.resident_side(offset, nbytes)
        return self._arena.resident_side(self._at(offset, nbytes), nbytes)

    def is_at_host(self, offset: int, nbytes: int) -> bool:
        if self._home is not None:
            return self._home.is_at_host(offset, nbytes)
        return self._arena.is_at_host(self._at(offset, nbytes), nbytes)

    def lent(self, offset: int, nbytes: int, writeable: bool = False) -> bool:
        if self._home is not None:
            return self._home.lent(offset, nbytes, writeable)
        return self._arena.lent(self._at(offset, nbytes), nbytes, writeable)

    @property
    def adopted(self) -> int:
        return 0

    def _at(self, offset: int, nbytes: int) -> int:
        """Where that is in the arena."""
        if offset + nbytes > self.place.nbytes:
            raise BlobmemError(
                f"bytes {offset} to {offset + nbytes} of '{self._name}' are beyond the {self.place.nbytes} that it was "
                f"given when its net was planned: run the net forward, or net.reshape(), which plans anew, or build it "
                f"with keep=['{self._name}']"
            )
        return self.place.offset + offset

    # Access

    def access(self, side: Side, offset: int, nbytes: int, intent: str, stream: Stream | None = None) -> Any:
        at = self._at(offset, nbytes)
        with self._lock:
            if self._home is not None:
                return self._home.access(side, offset, nbytes, intent, stream)
            if self.home is not None and intent != Intent.READ:
                self.newer = self.home.outdate()
            if self.reordered is not None:
                self.reordered.before_access(offset, offset + nbytes, intent_of(intent), stream)
            return self._arena.access(side, at, nbytes, intent, stream)

    def host_array(
        self, offset: int, shape: Sequence[int], dtype: Any, writeable: bool = True, lend: bool = True
    ) -> np.ndarray:
        if self._home is not None:
            return self._home.host_array(offset, shape, dtype, writeable, lend)
        return self._arena.host_array(self.place.offset + offset, shape, dtype, writeable, lend)

    def copy_out(self, offset: int, array: np.ndarray, stream: Stream, owner: object) -> None:
        self._arena.copy_out(self._at(offset, array.nbytes), array, stream, owner)

    def copy_in(self, offset: int, array: np.ndarray, stream: Stream, owner: object) -> None:
        self._arena.copy_in(self._at(offset, array.nbytes), array, stream, owner)

    def bring_home(self) -> None:
        """What is at home is about to be used, or others take the place: bring there what was written since."""
        if self.newer and self.home is not None:
            self.newer = False
            self.home.take(self.view(0, self._size), copy_stream(self.device, True))

    def hold_device(self) -> Any:
        if self._home is not None:
            return self._home.hold_device()
        return self._arena.hold_device()

    def async_gpu_push(self, stream: Stream) -> None:
        self.access(Side.DEVICE, 0, self._size, Intent.READ, stream)

    def allow_late(self, offset: int, nbytes: int) -> None:
        if self._home is not None:
            self._home.allow_late(offset, nbytes)
            return
        self._arena.allow_late(self._at(offset, nbytes), nbytes)

    def clear(self, offset: int, nbytes: int) -> None:
        at = self._at(offset, nbytes)
        with self._lock:
            if self._home is not None:
                self._home.clear(offset, nbytes)
                self.moved += 2
                return
            self.newer = self.home is not None and self.home.outdate()
            if self.reordered is not None:
                self.reordered.before_access(offset, offset + nbytes, Intent.OVERWRITE, None)
            self._arena.clear(at, nbytes)

    def is_cleared_since(self, epoch: int, offset: int, nbytes: int) -> bool:
        return self._arena.is_cleared_since(epoch - self._beyond, self._at(offset, nbytes), nbytes)

    def refill(self, epoch: int, offset: int, nbytes: int) -> bool:
        return self._arena.refill(epoch - self._beyond, self._at(offset, nbytes), nbytes)

    def fetch(self) -> None:
        self.access(Side.HOST, 0, self.place.nbytes, Intent.READ)

    # What only a memory with bytes of its own can do

    def set_host_array(self, array: np.ndarray) -> None:
        self._refuse()

    def set_device_array(self, address: int, nbytes: int, owner: Any) -> None:
        self._refuse()

    def move_to(self, device: Device) -> None:
        if device is not self.device:
            self._refuse()

    def pin(self) -> None:
        """Nothing: what is in an arena rarely travels."""

    def _refuse(self) -> NoReturn:
        raise BlobmemError(
            f"'{self._name}' takes turns with other arrays at the same bytes, and cannot be put elsewhere: "
            f"build its net with keep=['{self._name}'], or with memory='keep'"
        )

    # Capacity

    def reserve(self, side: Side, nbytes: int) -> None:
        self._arena.reserve(side, self._at(0, nbytes) + nbytes)

    def unreserve(self, side: Side, nbytes: int) -> None:
        self._arena.unreserve(side, self._at(0, nbytes) + nbytes)

    def trim(self) -> int:
        """Nothing: the arena's `trim` gives back what no slot needs."""
        return 0
