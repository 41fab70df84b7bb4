"""The host side of a memory: its pages, the arrays lent over them, and the debug mode's seals on lent arrays."""

from __future__ import annotations

import ctypes
import warnings
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.pages import Pages
from blobmem.errors import BlobmemError

if TYPE_CHECKING:
    from blobmem.devices.base import Device

PIN_FROM = 64 << 10
"""Bytes of a memory from which page-locking pays."""

_EMPTY = np.empty(0, np.uint8)


class HostSide:
    """Bytes in reserved pages, or in an array adopted from the user. The owner holds its lock around every call.

    Attributes:
        capacity: bytes in use from 0 on.
        reserved: bytes up to which growth is in place.
        seals: in debug mode (start, stop, checksum) of lent bytes that nobody should write; None when there are none.
    """

    __slots__ = (
        "_buffer", "_copies", "_dirty", "_lent", "_lent_limit", "_pages", "_unpinnable",
        "capacity", "reserved", "seals",
    )  # fmt: skip

    def __init__(self, pinnable: bool = True) -> None:
        self._pages: Pages | None = None
        self._buffer: Any = None
        self._dirty = 0  # bytes from here on have been zero ever since the pages were made
        self._lent: list[tuple[weakref.ref[np.ndarray], int, int, bool]] = []
        self._lent_limit = 16
        self._copies = 0
        self._unpinnable = not pinnable
        self.capacity = 0
        self.reserved = 0
        self.seals: list[tuple[int, int, int]] | None = None

    def adopt(self, array: np.ndarray) -> None:
        """Use the bytes of `array`, which is C-contiguous and writable, in place of pages."""
        # Over another array or a memoryview, NumPy would make a slice of a lent array hold on to the user's array only.
        self._pages, self.seals = None, None
        self._lent.clear()  # they are over the old bytes
        self._buffer = (ctypes.c_ubyte * array.nbytes).from_buffer(array.reshape(-1).view(np.uint8).data)
        self.capacity = self.reserved = self._dirty = array.nbytes

    @property
    def adopted(self) -> int:
        """The size in bytes of the array that was adopted; 0 if there is none, or no longer."""
        return self.reserved if self._pages is None else 0

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes`, at most `reserved`."""
        if self._pages is not None:
            self._pages.use(nbytes)
        self.capacity = nbytes

    def move(self, pages: Pages, kept: Iterable[tuple[int, int]], name: str) -> bool:
        """Go on in `pages`, into which the ranges `kept` are copied; whether there was anything before."""
        had_bytes = self._buffer is not None
        if had_bytes and self._pages is None:
            warnings.warn(
                f"memory {name!r} outgrew the {self.reserved} bytes of the array it was given, and goes on in memory "
                f"of its own: what is written to that array from now on is not seen. Give a larger array",
                UserWarning,
                stacklevel=6,
            )
        dirty = 0
        for start, stop in kept:
            pages.bytes(start, stop)[:] = self.bytes(start, stop)
            dirty = stop
        self._pages, self._buffer, self.reserved = pages, pages.buffer, pages.reserved
        self._dirty = dirty
        self._lent.clear()  # they are over the old bytes
        self.seals = None
        return had_bytes

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """A uint8 array over [start, stop), not counted as lent."""
        return np.ndarray((stop - start,), np.uint8, buffer=self._buffer, offset=start) if stop > start else _EMPTY

    def array(
        self, offset: int, shape: Sequence[int], dtype: Any, writeable: bool, lend: bool, name: str
    ) -> np.ndarray:
        """A new array over the bytes from `offset`; BlobmemError if they are beyond the capacity."""
        if self._buffer is None:
            array = np.empty(shape, dtype)
            if array.nbytes == 0:
                return array
            raise _untouched(name, offset, array.nbytes, 0)
        array = np.ndarray(shape, dtype, buffer=self._buffer, offset=offset)
        stop = offset + array.nbytes
        if stop > self.capacity:
            raise _untouched(name, offset, array.nbytes, self.capacity)
        if not writeable:
            array.setflags(write=False)
        elif stop > self._dirty:
            self._dirty = stop
        if lend:
            if len(self._lent) >= self._lent_limit:
                self._purge()
            self._lent.append((weakref.ref(array), offset, stop, writeable))
        return array

    def wants_pin(self, stop: int) -> bool:
        """Whether a copy of bytes below `stop` that is about to be made should find them page-locked, and does not.

        Not the first one: somebody may only have had a look. Small copies are as fast without. But where some bytes are
        page-locked, all have to be: a device refuses to copy across the border.
        """
        if self._pages is None or self._unpinnable:
            return False
        if 0 < self._pages.pinned < stop:
            return True
        if self.capacity < PIN_FROM:
            return False
        self._copies += 1
        return self._copies > 1 and stop > self._pages.pinned

    def pin(self, device: Device) -> None:
        """Page-lock all bytes in use, once nothing is in flight over them, where the device and the system can."""
        if self._pages is not None:
            self._unpinnable = not self._pages.pin(device, self.capacity)

    def unpin(self) -> None:
        """Undo `pin`."""
        if self._pages is not None:
            self._pages.unpin()

    @property
    def pinned(self) -> int:
        """Bytes from 0 on that are page-locked."""
        return 0 if self._pages is None else self._pages.pinned

    def written(self, stop: int) -> None:
        """Bytes below `stop` may have been written."""
        if stop > self._dirty:
            self._dirty = stop

    def zero(self, start: int, stop: int) -> None:
        """Make [start, stop) read zero, without touching pages that never were anything else."""
        stop = min(stop, self._dirty)
        if start < stop:
            self.bytes(start, stop).fill(0)

    def discard(self, keep: int) -> None:
        """Give back all pages beyond the first `keep` bytes; an adopted array stays as it is."""
        if self._pages is not None and keep < self.capacity:
            self._pages.discard(keep, max(keep, self._dirty))
            self._dirty = min(self._dirty, keep)
            self.capacity = keep

    # Lending

    def _purge(self) -> None:
        self._lent = [entry for entry in self._lent if entry[0]() is not None]
        self._lent_limit = max(16, 2 * len(self._lent))

    def lent(self, start: int, stop: int, writeable: bool = False) -> list[tuple[int, int]]:
        """The ranges of arrays still alive that meet [start, stop); of writable ones only, if so asked."""
        if not self._lent:
            return []
        return [
            (a, b)
            for reference, a, b, may_write in self._lent
            if a < stop and start < b and (may_write or not writeable) and reference() is not None
        ]

    # Debug mode: a seal is the checksum of lent bytes taken when the device took over from them.

    def seal(self, start: int, stop: int) -> None:
        """From now on, nobody should write [start, stop) through an array lent before."""
        ranges = {(max(a, start), min(b, stop)) for a, b in self.lent(start, stop, writeable=True)}
        if ranges:
            self.seals = (self.seals or []) + [(a, b, self._checksum(a, b)) for a, b in sorted(ranges)]

    def verify(self, start: int, stop: int, name: str) -> None:
        """BlobmemError if sealed bytes that meet [start, stop) have changed; each change is reported once."""
        for seal in self.seals or ():
            a, b, checksum = seal
            if a < stop and start < b and self._checksum(a, b) != checksum:
                assert self.seals is not None
                self.seals = [other for other in self.seals if other is not seal] or None
                raise BlobmemError(
                    f"late write: bytes {a} to {b} of memory {name!r} were written through an array handed out "
                    f"before the device side took over, so the device did not see it. Ask for the data again "
                    f"(blob.data, cpu_data) each time before writing"
                )

    def release(self, start: int, stop: int) -> None:
        """[start, stop) is going to be written rightly: break the seals there, keeping their rests."""
        rests = []
        for a, b, checksum in self.seals or ():
            if a >= stop or start >= b:
                rests.append((a, b, checksum))
                continue
            rests += [(c, d, self._checksum(c, d)) for c, d in ((a, start), (stop, b)) if c < d]
        self.seals = rests or None

    def _checksum(self, start: int, stop: int) -> int:
        return zlib.crc32(self.bytes(start, stop).data)


def _untouched(name: str, offset: int, nbytes: int, capacity: int) -> BlobmemError:
    return BlobmemError(
        f"memory {name!r} has {capacity} bytes on the host, not the {nbytes} at {offset}; "
        f"access them first (View.cpu_data, SyncedMemory.access)"
    )
