"""Reserved host pages: address space set aside now, memory committed when it is first touched.

Growing inside a reservation costs nothing and moves nothing, so arrays handed out over the pages stay what they were.
"""

from __future__ import annotations

import functools
import mmap
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from blobmem.devices.base import Device

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
LEAST_RESERVED = 1 << 30
MOST_RESERVED = 1 << 40
HUGE_FROM = 4 << 20

# Python names MAP_NORESERVE only from 3.13 on; these are the numbers of Linux (all but two rare ports) and macOS.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0))


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


@functools.cache
def can_reserve() -> bool:
    """Whether reserved but untouched pages cost nothing here (not so under strict overcommit, nor on Windows)."""
    if not _NORESERVE:
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return True


@functools.cache
def _huge_pages() -> str:
    """What the kernel does about huge pages unasked: "always", "madvise" or "never"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "never"
    return text[text.find("[") + 1 : text.find("]")]


def default_reservation(nbytes: int) -> int:
    """Bytes of address space to set aside for something that now needs `nbytes`."""
    return max(LEAST_RESERVED, nbytes, min(16 * nbytes, MOST_RESERVED))


class Pages:
    """A private anonymous mapping: zero at first, committed page by page on touch.

    Args:
        capacity_hint: bytes that must fit.
        reserve: bytes of address space wanted, at least `capacity_hint` (by default `default_reservation`). Less is
            taken where the system refuses, and only what must fit where reserving is not free (`can_reserve`).

    Attributes:
        reserved: bytes that the mapping really has.
        pinned: bytes from 0 on that are page-locked for a device.
        buffer: the mapping itself; NumPy arrays created over it keep it alive, and it is never unmapped before.

    Raises:
        MemoryError: the system has no address space for `capacity_hint` bytes.
    """

    __slots__ = ("__weakref__", "_advised", "_unpin", "buffer", "pinned", "reserved")

    def __init__(self, capacity_hint: int, reserve: int | None = None) -> None:
        least = round_up(max(capacity_hint, 1), PAGE)
        wanted = default_reservation(capacity_hint) if reserve is None else max(reserve, least)
        if not can_reserve():
            wanted = least
        self.buffer = _map(round_up(wanted, HUGE if wanted >= HUGE else PAGE), least)
        self.reserved = len(self.buffer)
        self.pinned = 0
        self._advised = ""
        self._unpin: Callable[[], object] = _nothing

    def use(self, nbytes: int) -> None:
        """Tell that the first `nbytes` bytes are in use, so that the kernel backs them with pages of a fitting size.

        Without this, where huge pages are the rule, the first byte of a small reservation would commit 2 MiB.
        """
        if nbytes < HUGE:
            advice = "NOHUGEPAGE" if _huge_pages() == "always" and self._advised != "HUGEPAGE" else ""
        else:
            advice = "HUGEPAGE" if nbytes >= HUGE_FROM and _huge_pages() != "never" else ""
        if advice and advice != self._advised and hasattr(mmap, f"MADV_{advice}"):
            self._advised = advice
            try:
                self.buffer.madvise(getattr(mmap, f"MADV_{advice}"))
            except OSError:
                return  # only advice: a kernel built without huge pages knows nothing of it

    def pin(self, device: Device, nbytes: int) -> bool:
        """Page-lock the first `nbytes` bytes in one piece, whatever was before; whether the device could.

        Nothing may be in flight over them.
        """
        self.unpin()
        nbytes, address = round_up(nbytes, PAGE), self.bytes(0, 1).ctypes.data
        if not device.pin(address, nbytes):
            return False
        self.pinned = nbytes
        # the mapping must not go before its lock does
        self._unpin = weakref.finalize(self, device.when_idle, functools.partial(_unpin, device, address, self.buffer))
        self._unpin.atexit = False
        return True

    def unpin(self) -> None:
        """Undo `pin`, if it was done."""
        self._unpin()
        self._unpin, self.pinned = _nothing, 0

    def discard(self, start: int, stop: int) -> None:
        """Give the pages of bytes [start, stop) back to the system; these bytes, and no others, read zero after."""
        self.unpin()  # a device would go on with the pages that it locked, and we with new ones
        low, high = round_up(start, PAGE), stop // PAGE * PAGE
        if low >= high or sys.platform != "linux":  # elsewhere MADV_DONTNEED does not promise zeros
            self.bytes(start, stop).fill(0)
            return
        self.bytes(start, low).fill(0)
        self.bytes(high, stop).fill(0)
        self.buffer.madvise(mmap.MADV_DONTNEED, low, high - low)

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """A uint8 array over bytes [start, stop)."""
        return np.ndarray((stop - start,), np.uint8, buffer=self.buffer, offset=start) if stop > start else _EMPTY


_EMPTY = np.empty(0, np.uint8)


def _nothing() -> None:
    pass


def _unpin(device: Device, address: int, buffer: mmap.mmap) -> None:
    device.unpin(address)


def _map(wanted: int, least: int) -> mmap.mmap:
    while True:
        try:
            if sys.platform == "win32":
                return mmap.mmap(-1, wanted)
            return mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            if wanted <= least:
                raise MemoryError(
                    f"the system has no address space for {least} more bytes of host memory ({error}); free something, "
                    f"or raise the limits (ulimit -v, sysctl vm.max_map_count)"
                ) from error
            wanted = max(least, round_up(wanted // 4, PAGE))
