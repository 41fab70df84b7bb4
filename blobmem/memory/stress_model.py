"""What the stress test compares a SyncedMemory with: two plain byte arrays, and what else must hold at any time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.devices.base import Event, Stream
from blobmem.devices.pages import Pages
from blobmem.devices.simulated import SimulatedDevice
from blobmem.memory.slot import Slot
from blobmem.memory.synced import SyncedMemory
from blobmem.memory.views import ALIGNMENT, Intent, Side, View

BLOCKS = 48
LIMIT = BLOCKS * ALIGNMENT  # six pages: enough for growth, moves and trims on both sides, and quick to compare
CAPACITY = 4 * LIMIT  # of a device: enough for a move
STREAMS = 3
VIEWS = 5
SLOTS = 4
HELD = 4

Draw = Callable[[int], int]

# Bytes to write: never 0, which fresh and cleared memory has, nor the 0xCD of fresh device memory.
_POOL = np.random.default_rng(355).integers(1, 200, 3 * LIMIT).astype(np.uint8)


class Mismatch(AssertionError):
    """The memory did something else than two plain byte arrays do."""


class CrampedDevice(SimulatedDevice):
    """A simulated device on which growth soon has to move, and which does not wait where the memory should have.

    It pins, and as a GPU's driver does it refuses to copy what is partly pinned.
    """

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self._pinned: dict[int, int] = {}

    def close(self) -> None:
        """It has nothing to give back."""

    def reservation(self, nbytes: int) -> int:
        return nbytes + 4 * ALIGNMENT

    def pin(self, address: int, nbytes: int) -> bool:
        self._pinned[address] = address + nbytes
        return True

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        self._check_pinned(array)
        super().memcpy_htod(address, array, stream)

    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        self._check_pinned(array)
        super().memcpy_dtoh(array, address, stream)

    def _check_pinned(self, array: np.ndarray) -> None:
        start = array.ctypes.data
        for low, high in list(self._pinned.items()):
            inside = max(0, min(high, start + array.nbytes) - max(low, start))
            if inside not in (0, array.nbytes):
                raise Mismatch(f"{inside} of the {array.nbytes} bytes of a copy are pinned")

    def _flush(self, allocation: Any) -> None:
        if any(stream.touches(allocation) for stream in self._busy):
            raise Mismatch(f"{allocation.label!r} moves, shrinks or is freed while work on it is in flight")


class CrampedMemory(SyncedMemory):
    """A memory whose host pages soon have to move."""

    def _make_pages(self, nbytes: int) -> Pages:
        return Pages(nbytes, nbytes)


@dataclasses.dataclass(slots=True)
class Held:
    """An array we keep: where it is, where the array that was lent (this may be a slice) ends, if writing counts."""

    array: np.ndarray
    start: int
    stop: int
    lent_stop: int
    counts: bool = True


class Model:
    """A memory, views and slots of it, two devices with three streams each, and two arrays that say what must be read.

    What the rules are made of, and `check`, which holds after every rule. Mismatch as soon as anything differs.

    Args:
        make_device: makes a device of at most CAPACITY bytes, whose calls fail as its `fail_at`, a callable or None,
            says: see SimulatedDevice. Its `close` is called at the end.
    """

    def __init__(self, make_device: Callable[[], Any] = CrampedDevice) -> None:
        self.device, self.other = make_device(), make_device()
        self.streams = [self.device.create_stream() for _ in range(STREAMS)]
        self.other_streams = [self.other.create_stream() for _ in range(STREAMS)]
        self.host = np.zeros(LIMIT, np.uint8)  # what the host side must read
        self.far = np.zeros(LIMIT, np.uint8)  # what the device side must read
        self.held: list[Held] = []
        self.reads: list[tuple[Event, np.ndarray, np.ndarray]] = []  # in flight: when, what it gets, what it must get
        self._start(CrampedMemory(0, self.device, "stressed"))

    def _start(self, memory: SyncedMemory) -> None:
        self.memory = memory
        self.views = [memory.view(0, 100), memory.view(0, 50)]
        self.slots: list[Slot] = []  # which may overlap
        self.seen: dict[tuple[Any, ...], tuple[int, int | None]] = {}

    def _view(self, draw: Draw) -> View:
        return self.views[draw(len(self.views))]

    def _door(self, draw: Draw, view: View) -> View:
        """The view, or by chance one of the same bytes through a slot in which they all are."""
        stop = view.offset + view.nbytes
        around = [s for s in self.slots if s.place.offset <= view.offset and stop <= s.place.offset + s.place.nbytes]
        if not around or not draw(3):
            return view
        slot = around[draw(len(around))]
        return slot.view(view.offset - slot.place.offset, view.nbytes)

    def _range(self, draw: Draw) -> tuple[int, int]:
        """An offset and a size inside LIMIT, small ones more often."""
        offset = draw(BLOCKS) * ALIGNMENT
        room = LIMIT - offset
        return offset, 1 + draw(room if draw(2) else min(room, 3 * ALIGNMENT))

    def _part(self, draw: Draw, nbytes: int) -> tuple[int, int]:
        start = draw(nbytes)
        return start, start + 1 + draw(nbytes - start)

    def _data(self, draw: Draw, nbytes: int) -> np.ndarray:
        start = draw(2 * LIMIT)
        return _POOL[start : start + nbytes]

    def _wrote(self, start: int, data: np.ndarray | int, stop: int | None = None) -> None:
        stop = start + data.size if isinstance(data, np.ndarray) else stop
        self.host[start:stop] = data
        self.far[start:stop] = data

    def _same(self, got: np.ndarray, must: np.ndarray, what: str, start: int) -> None:
        if not np.array_equal(got, must):
            at = int(np.flatnonzero(got != must)[0])
            raise Mismatch(
                f"{what}: byte {start + at} is {got[at]}, not {must[at]} "
                f"({np.count_nonzero(got != must)} of {got.size} differ); {self.memory!r}, {self.memory._extents!r}"
            )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Mismatch(f"{what}; {self.memory!r}, {self.memory._extents!r}")

    def _let_go(self, start: int, stop: int) -> None:
        """From now on, writing through arrays we keep over these bytes no longer counts."""
        for held in self.held:
            held.counts &= not (held.start < stop and start < held.stop)

    def _to_host(self, draw: Draw, view: View, intent: Intent) -> np.ndarray:
        """The view's bytes on the host; where the epoch says that an access is not needed, by chance without one."""
        view = self._door(draw, view)
        memory, key = view.memory, (Side.HOST, view, intent)
        if self.seen.get(key, (-1,))[0] == memory.epoch and draw(2):
            return memory.host_array(view.offset, (view.nbytes,), np.uint8, intent is not Intent.READ)
        array = view.cpu_data(intent)
        self.seen[key] = (memory.epoch, None)
        return array

    def _to_device(self, draw: Draw, view: View, intent: Intent, stream: Stream | None = None) -> int:
        self._let_go(view.offset, view.offset + view.nbytes)
        view = self._door(draw, view)
        memory, key = view.memory, (Side.DEVICE, view, intent, stream)
        epoch, address = self.seen.get(key, (-1, None))
        if epoch != memory.epoch or address is None or draw(2):
            address = view.gpu_data(intent, stream)
            self.seen[key] = (memory.epoch, address)
        return address

    def _capacity(self, side: Side) -> int:
        return self.memory.cpu_capacity if side is Side.HOST else self.memory.gpu_capacity

    def _hold(self, view: View, array: np.ndarray, start: int) -> None:
        start += view.offset
        self.held = [*self.held[1 - HELD :], Held(array, start, start + array.size, view.offset + view.nbytes)]

    def _over_our_pages(self, array: np.ndarray) -> bool:
        host = self.memory._host
        return host.capacity > 0 and np.may_share_memory(array, host.bytes(0, host.capacity))

    def _read_later(self, view: View, address: int, stream: Stream) -> None:
        got = np.zeros(view.nbytes, np.uint8)
        self.device.memcpy_dtoh(got, address, stream)
        self.reads.append((stream.record(), got, self.far[view.offset : view.offset + view.nbytes].copy()))

    def _stream(self, draw: Draw) -> Stream | None:
        index = draw(2 * STREAMS)
        return self.streams[index] if index < STREAMS else None

    def _picture(self) -> tuple[Any, ...]:
        memory = self.memory
        return (
            repr(memory._extents), memory.size, memory.cpu_capacity, memory.gpu_capacity, memory.version,
            self.device.statistics.bytes_held,
        )  # fmt: skip

    def check(self) -> None:
        """What must hold at any time, found out without an access that would change the memory's state."""
        memory, device = self.memory, self.device
        late = []
        for read in self.reads:
            event, got, must = read
            if event.done:
                self._same(got, must, "read on a stream", 0)
            else:
                late.append(read)
        self.reads = late
        settled = all(stream.record().done for stream in self.streams)
        for start, stop, bits in memory._extents.runs(0, LIMIT):
            if bits & Side.HOST:
                self._require(stop <= memory.cpu_capacity, "the host is said to have bytes beyond its capacity")
                self._same(memory._host.bytes(start, stop), self.host[start:stop], "bytes on host", start)
            if bits & Side.DEVICE:
                self._require(stop <= memory.gpu_capacity, "the device is said to have bytes beyond its capacity")
                if settled:
                    got = np.empty(stop - start, np.uint8)
                    device.memcpy_dtoh(got, memory._far.address + start)
                    self._same(got, self.far[start:stop], "bytes on device", start)
            if bits == 0:
                self._require(not self.host[start:stop].any(), f"bytes {start} to {stop} were forgotten")
        held = device.statistics.bytes_held
        self._require(held == memory.gpu_capacity, f"the device holds {held} bytes")
        self._require(not self.other.statistics.bytes_held, "the device that it moved from still holds something")
