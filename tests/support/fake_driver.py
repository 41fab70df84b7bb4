"""A GPU's memory as its driver hands it out, in host memory: physical handles, reserved addresses, and the mapping.

It refuses what the real one refuses or would silently do wrong: mapping over what is mapped or outside a reservation,
unmapping part of a mapping, releasing what is mapped, touching what is not, and unmapping under queued work.
"""

from __future__ import annotations

import bisect
from collections import Counter

import numpy as np

from blobmem.devices.cuda.chunks import NoRoom

FIRST = 1 << 40


class FakeDriver:
    """See the module, and `blobmem.devices.cuda.chunks.Driver`.

    Attributes:
        capacity: physical bytes there are.
        held: of these, created and not released.
        calls: how often each call was made.
        fail_in: the how-many-th next call that takes something is to raise NoRoom (from 1; 0: none).
    """

    def __init__(self, granularity: int = 4096, capacity: int = 1 << 50, contents: bool = True) -> None:
        self.granularity = granularity
        self.capacity = capacity
        self.contents = contents
        self.held = 0
        self.fail_in = 0
        self.calls: Counter[str] = Counter()
        self.handles: dict[int, tuple[int, np.ndarray | None]] = {}
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int]] = {}
        self._starts: list[int] = []
        self._queued: list[tuple[int, np.ndarray]] = []
        self._next = FIRST
        self._next_handle = 0

    def _count(self, name: str, *sizes: int, takes: bool = False) -> None:
        self.calls[name] += 1
        assert all(size % self.granularity == 0 for size in sizes) and sizes[-1:] != (0,), (name, sizes)
        if takes and self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                raise NoRoom(f"{name} was to fail")

    def reserve(self, nbytes: int) -> int:
        self._count("reserve", nbytes, takes=True)
        address, self._next = self._next, self._next + nbytes + self.granularity
        self.reservations[address] = nbytes
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._count("unreserve", nbytes)
        assert self.reservations.pop(address) == nbytes
        assert not any(address <= start < address + nbytes for start in self._near(address, nbytes))

    def create(self, nbytes: int) -> int:
        self._count("create", nbytes, takes=True)
        if self.held + nbytes > self.capacity:
            raise NoRoom(f"{nbytes} bytes, and {self.capacity - self.held} are free")
        self.held += nbytes
        handle = self._next_handle = self._next_handle + 1
        self.handles[handle] = nbytes, np.full(nbytes, 0xCD, np.uint8) if self.contents else None
        return handle

    def release(self, handle: int) -> None:
        self._count("release")
        assert not any(mapped == handle for _, mapped in self.mappings.values()), "it is still mapped"
        self.held -= self.handles.pop(handle)[0]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._count("map", address - FIRST, nbytes, takes=True)
        assert self.handles[handle][0] == nbytes, "a handle is mapped whole"
        assert any(start <= address and address + nbytes <= start + size for start, size in self.reservations.items())
        assert all(not self._overlaps(start, address, nbytes) for start in self._near(address, nbytes))
        self.mappings[address] = nbytes, handle
        bisect.insort(self._starts, address)

    def unmap(self, address: int, nbytes: int) -> None:
        self._count("unmap", nbytes)
        assert self.mappings[address][0] == nbytes, "what one call mapped is unmapped whole"
        for start, data in self._queued:
            assert start + data.size <= address or address + nbytes <= start, "work is queued on it"
        del self.mappings[address]
        self._starts.remove(address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._count("copy")
        self.synchronize()
        self.write(target, self.read(source, nbytes))

    def synchronize(self) -> None:
        self._count("synchronize")
        queued, self._queued = self._queued, []
        for address, data in queued:
            self.write(address, data)

    # The GPU's work

    def queue_write(self, address: int, data: np.ndarray) -> None:
        """Write at some time up to the next `synchronize`."""
        self._queued.append((address, data))

    def write(self, address: int, data: np.ndarray) -> None:
        """Write bytes at an address."""
        done = 0
        for part in self._bytes(address, data.size):
            part[:] = data[done : done + part.size]
            done += part.size

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes at an address."""
        parts = self._bytes(address, nbytes)
        return np.concatenate(parts) if self.contents else np.empty(0, np.uint8)

    def state(self) -> tuple[object, ...]:
        """All that a failed call must leave as it was."""
        return dict(self.reservations), dict(self.mappings), sorted(self.handles), self.held

    def _bytes(self, address: int, nbytes: int) -> list[np.ndarray]:
        parts = []
        while self.contents and nbytes:
            index = bisect.bisect_right(self._starts, address) - 1
            assert index >= 0, f"{address:#x} is not mapped"
            start = self._starts[index]
            size, handle = self.mappings[start]
            assert address < start + size, f"{address:#x} is not mapped"
            part = self.handles[handle][1][address - start :][:nbytes]  # type: ignore[index]
            parts.append(part)
            address, nbytes = address + part.size, nbytes - part.size
        return parts

    def _near(self, address: int, nbytes: int) -> list[int]:
        low = bisect.bisect_left(self._starts, address) - 1
        return self._starts[max(low, 0) : bisect.bisect_left(self._starts, address + nbytes)]

    def _overlaps(self, start: int, address: int, nbytes: int) -> bool:
        return start < address + nbytes and address < start + self.mappings[start][0]
