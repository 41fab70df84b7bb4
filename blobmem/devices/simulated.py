"""A device made of host memory: a fixed capacity, its own addresses, poisoned fresh bytes, counted transfers, failures
on demand, and streams whose work is done only when somebody waits for it.

The memory system is tested on it anywhere, and it answers "would this fit in 8 GB?" on a laptop.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.devices.base import Device, Stream, host_bytes, out_of_memory, readable_bytes
from blobmem.devices.pages import HUGE, Pages, default_reservation, round_up
from blobmem.devices.queues import SimulatedStream, Work
from blobmem.errors import DeviceError

POISON = 0xCD
FIRST_ADDRESS = 1 << 52  # beyond every address a process can have, so that a mix-up of the two kinds never goes unseen
GUARD = HUGE

FailAt = int | Iterable[int] | Callable[[str, int], bool] | None


class _Allocation:
    """`nbytes` live bytes at `address`, in a range of `reserved` addresses that belongs to it alone."""

    __slots__ = ("address", "bytes", "label", "nbytes", "pages", "reserved")

    def __init__(self, address: int, reserved: int, label: str, pages: Pages | None) -> None:
        self.address, self.reserved, self.label, self.pages = address, reserved, label, pages
        self.nbytes = 0
        self.bytes = _EMPTY if pages is None else pages.bytes(0, pages.reserved)

    def extend(self, nbytes: int) -> None:
        if self.pages is not None:
            if nbytes > self.pages.reserved:  # only where the platform could not reserve all that the device promises
                pages = Pages(nbytes, nbytes)
                pages.bytes(0, self.nbytes)[:] = self.bytes[: self.nbytes]
                self.pages, self.bytes = pages, pages.bytes(0, pages.reserved)
            self.pages.use(nbytes)
            self.bytes[self.nbytes : nbytes] = POISON
        self.nbytes = nbytes

    def cut(self, nbytes: int) -> None:
        if self.pages is not None:
            self.pages.discard(nbytes, self.nbytes)
        self.nbytes = nbytes

    def kill(self) -> None:
        self.bytes[: self.nbytes] = POISON  # arrays that outlive the allocation show it
        self.nbytes = 0


_EMPTY = np.empty(0, np.uint8)


class SimulatedDevice(Device):
    """See the module. Every byte is accounted for exactly; nothing is rounded.

    Args:
        capacity: bytes it can hold; None stands for more than anybody asks (2^46).
        fail_at: which calls fail though there is room. An ordinal (from 1) or several, among `allocate` and `grow`
            calls together; or a callable of (name of the call, ordinal among calls of that name) that is true for a
            call to fail: "allocate" and "grow" raise OutOfDeviceMemory, "memcpy_htod", "memcpy_dtoh", "memcpy_dtod"
            and "memset" DeviceError. A call that fails changes nothing. The attribute may be set at any time.
        compute: False touches no page: copies and memsets only check their ranges and count, `as_array` refuses.
    """

    name = "simulated"

    def __init__(self, capacity: int | None = None, fail_at: FailAt = None, compute: bool = True) -> None:
        super().__init__()
        self.capacity = 1 << 46 if capacity is None else capacity
        self.compute = compute
        self.fail_at = fail_at
        self._calls: Counter[str] = Counter()
        self._allocations: dict[int, _Allocation] = {}
        self._addresses: list[int] = []
        self._next = FIRST_ADDRESS
        self._busy: dict[SimulatedStream, None] = {}

    @property
    def fail_at(self) -> FailAt:
        """Which allocator calls fail, as for the class; may be set at any time."""
        return self._fail_at

    @fail_at.setter
    def fail_at(self, fail_at: FailAt) -> None:
        self._fail_at: frozenset[int] | Callable[[str, int], bool] | None
        if fail_at is None or callable(fail_at):
            self._fail_at = fail_at
        else:
            self._fail_at = frozenset([fail_at] if isinstance(fail_at, int) else fail_at)

    def reservation(self, nbytes: int) -> int:
        """Addresses set aside for an allocation of `nbytes`: as far as it grows in place."""
        return default_reservation(nbytes)

    # Allocation

    def allocate(self, nbytes: int, label: str = "") -> int:
        self._begin()
        if nbytes <= 0:
            raise DeviceError(f"simulated device: cannot allocate {nbytes} bytes for {label!r}; ask for at least one")
        scripted = self._strike("allocate")
        with self._lock:
            lacking = scripted or nbytes > self.capacity - self.statistics.bytes_held
            if not lacking:
                address = self._make(nbytes, label).address
                self.statistics.allocations += 1
                return address
        raise out_of_memory(self, nbytes, label, "", _scripted(scripted))

    def grow(self, address: int, old: int, new: int) -> int:
        self._begin()
        scripted = self._strike("grow")
        with self._lock:
            allocation = self._whole(address, "grow")
            if allocation.nbytes != old or new < old:
                raise DeviceError(
                    f"simulated device: cannot grow {address:#x} from {old} to {new} bytes: "
                    f"it has {allocation.nbytes} bytes, and growing never shrinks"
                )
            in_place = new <= allocation.reserved
            needed = new - old if in_place else new
            if not scripted and needed <= self.capacity - self.statistics.bytes_held:
                self.statistics.grows += 1
                if not in_place:
                    return self._move(allocation, new)
                allocation.extend(new)
                self._account(needed)
                return address
        what = f" to grow from {readable_bytes(old)} to {readable_bytes(new)}"
        raise out_of_memory(self, needed, allocation.label, what, _scripted(scripted))

    def _move(self, allocation: _Allocation, new: int) -> int:
        self._flush(allocation)
        old = allocation.nbytes
        moved = self._make(new, allocation.label)
        moved.bytes[:old] = allocation.bytes[:old]
        self._drop(allocation)
        self.statistics.moves += 1
        self.statistics.dtod_copies += 1
        self.statistics.dtod_bytes += old
        return moved.address

    def shrink(self, address: int, old: int, new: int) -> None:
        self._begin()
        with self._lock:
            allocation = self._whole(address, "shrink")
            if allocation.nbytes != old or not 0 < new <= old:
                raise DeviceError(
                    f"simulated device: cannot shrink {address:#x} from {old} to {new} bytes: "
                    f"it has {allocation.nbytes} bytes, and must keep at least one"
                )
            self._flush(allocation)
            allocation.cut(new)
            self._account(new - old)
            self.statistics.shrinks += 1

    def free(self, address: int) -> None:
        self._begin()
        with self._lock:
            allocation = self._whole(address, "free")
            self._flush(allocation)
            self._drop(allocation)
            self.statistics.frees += 1

    def grows_in_place(self, address: int, new: int) -> bool:
        with self._lock:
            return new <= self._whole(address, "grow").reserved

    def relabel(self, address: int, label: str) -> None:
        with self._lock:
            self._whole(address, "name").label = label

    # Copies

    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        self._begin()
        source = host_bytes(array, self.name)
        self._strike("memcpy_htod")
        with self._lock:
            allocation, offset = self._find(address, source.nbytes, "copy to")
            if source.nbytes:
                target = allocation.bytes[offset : offset + source.nbytes]
                self._do(stream, functools.partial(np.copyto, target, source), allocation)
                self.statistics.htod_copies += 1
                self.statistics.htod_bytes += source.nbytes

    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        self._begin()
        target = host_bytes(array, self.name)
        if not target.flags.writeable:
            raise DeviceError("simulated device: cannot copy into a read-only host array; give one that is writable")
        self._strike("memcpy_dtoh")
        with self._lock:
            allocation, offset = self._find(address, target.nbytes, "copy from")
            if target.nbytes:
                source = allocation.bytes[offset : offset + target.nbytes]
                self._do(stream, functools.partial(np.copyto, target, source), allocation)
                self.statistics.dtoh_copies += 1
                self.statistics.dtoh_bytes += target.nbytes

    def memcpy_dtod(self, dst: int, src: int, nbytes: int, stream: Stream | None = None) -> None:
        self._begin()
        self._strike("memcpy_dtod")
        with self._lock:
            here, start = self._find(src, nbytes, "copy from")
            there, target = self._find(dst, nbytes, "copy to")
            if nbytes:
                copy = functools.partial(
                    np.copyto, there.bytes[target : target + nbytes], here.bytes[start : start + nbytes]
                )
                self._do(stream, copy, here, there)
                self.statistics.dtod_copies += 1
                self.statistics.dtod_bytes += nbytes

    def memset(self, address: int, value: int, nbytes: int, stream: Stream | None = None) -> None:
        self._begin()
        self._strike("memset")
        with self._lock:
            allocation, offset = self._find(address, nbytes, "set")
            if nbytes:
                self._do(stream, functools.partial(allocation.bytes[offset : offset + nbytes].fill, value), allocation)
                self.statistics.memsets += 1

    def as_array(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """A NumPy array over the device's own memory, for its ops.

        DeviceError if `compute` is False or the range is not inside a live allocation. After the allocation moves or
        is freed, the array shows poison.
        """
        if not self.compute:
            raise DeviceError("simulated device: made with compute=False, it only counts; nothing can compute on it")
        dtype = np.dtype(dtype)
        if 0 in shape:  # of a memory that may have no allocation yet
            return np.empty(tuple(shape), dtype)
        with self._lock:
            allocation, offset = self._find(address, math.prod(shape) * dtype.itemsize, "compute on")
            pages = allocation.pages
        return np.ndarray(tuple(shape), dtype, buffer=pages.buffer if pages else None, offset=offset)

    # Streams

    def create_stream(self) -> SimulatedStream:
        return SimulatedStream(self._lock, self._busy)

    def synchronize(self) -> None:
        self._begin()
        with self._lock:
            for stream in list(self._busy):
                stream.finish()

    def _do(self, stream: Stream | None, run: Callable[[], Any], *touched: _Allocation) -> None:
        if not self.compute:
            run = _nothing
        if stream is None:
            run()
        elif isinstance(stream, SimulatedStream) and stream.belongs_to(self._lock):
            stream.queue(Work(run, touched))
        else:
            raise DeviceError(f"simulated device: {stream!r} is not one of its streams; make one with create_stream()")

    def _flush(self, allocation: _Allocation) -> None:
        for stream in list(self._busy):
            if stream.touches(allocation):
                stream.finish()

    # Accounting

    @property
    def most_bytes(self) -> int | None:
        return self.capacity

    def memory_info(self) -> tuple[int, int]:
        return self.capacity - self.statistics.bytes_held, self.capacity

    def holders(self) -> list[tuple[str, int]]:
        with self._lock:
            held = [(allocation.label, allocation.nbytes) for allocation in self._allocations.values()]
        return sorted(held, key=lambda holder: -holder[1])

    def _begin(self) -> None:
        if self._postponed:
            self._run_postponed()

    def _strike(self, name: str) -> bool:
        """Count a call, and tell whether it is to fail (copies and memsets raise at once)."""
        with self._lock:
            self._calls[name] += 1
            ordinal = self._calls[name]
            among_both = self._calls["allocate"] + self._calls["grow"]
        fail_at = self._fail_at
        if fail_at is None:
            return False
        for_room = name in ("allocate", "grow")
        fails = for_room and among_both in fail_at if isinstance(fail_at, frozenset) else fail_at(name, ordinal)
        if fails and not for_room:
            raise DeviceError(f"simulated device: {name} number {ordinal} fails, as fail_at asked; nothing was copied")
        return bool(fails)

    def _account(self, change: int) -> None:
        statistics = self.statistics
        statistics.bytes_held += change
        statistics.peak_bytes = max(statistics.peak_bytes, statistics.bytes_held)

    def _make(self, nbytes: int, label: str) -> _Allocation:
        reserved = max(nbytes, self.reservation(nbytes))
        allocation = _Allocation(self._next, reserved, label, Pages(nbytes, reserved) if self.compute else None)
        allocation.extend(nbytes)
        self._next += round_up(reserved, HUGE) + GUARD
        self._allocations[allocation.address] = allocation
        self._addresses.append(allocation.address)
        self._account(nbytes)
        return allocation

    def _drop(self, allocation: _Allocation) -> None:
        nbytes = allocation.nbytes
        allocation.kill()
        del self._allocations[allocation.address]
        del self._addresses[bisect.bisect_left(self._addresses, allocation.address)]
        self._account(-nbytes)

    def _whole(self, address: int, verb: str) -> _Allocation:
        allocation = self._allocations.get(address)
        if allocation is None:
            raise DeviceError(
                f"simulated device: cannot {verb} {address:#x}: no allocation starts there, {self._near(address)}"
            )
        return allocation

    def _find(self, address: int, nbytes: int, verb: str) -> tuple[_Allocation, int]:
        index = bisect.bisect_right(self._addresses, address) - 1
        if index >= 0 and nbytes >= 0:
            allocation = self._allocations[self._addresses[index]]
            if address + nbytes <= allocation.address + allocation.nbytes:
                return allocation, address - allocation.address
        raise DeviceError(
            f"simulated device: cannot {verb} {nbytes} bytes at {address:#x}: "
            f"not inside a live allocation, {self._near(address)}"
        )

    def _near(self, address: int) -> str:
        if not self._addresses:
            return "and none is live"
        nearest = min(
            self._allocations.values(),
            key=lambda a: max(a.address - address, address - a.address - a.nbytes + 1, 0),
        )
        return f"the nearest is {nearest.label or 'unnamed'!r}, {nearest.nbytes} bytes at {nearest.address:#x}"


def _nothing() -> None:
    pass


def _scripted(scripted: bool) -> str:
    return "; fail_at asked for this failure" if scripted else ""
