"""The allocator of the CUDA device: memories grow where they are, and hold hardly more than their bytes.

An allocation of a chunk (2 MiB) or more is large. It has a range of addresses of its own, several times its size, into
which physical memory is mapped as it grows: nothing moves, and old and new are never held together. Its bytes seldom
fill whole chunks, so its first and last chunk may be shared: the same physical chunk is mapped in the ranges of two
large allocations, one ending in its first bytes and the next beginning in its last.

    range of A  | chunk | chunk | chunk X: A | - |
                                             |
    range of B                  | chunk X: - | B | chunk | chunk: B | - |

Smaller ones lie in what is left, at the chunk's home address, and move when what follows them is taken. Every byte of a
chunk belongs to one allocation or none, and is only touched through that allocation's address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from blobmem.devices.cuda.chunks import Chunk, Chunks, Driver
from blobmem.devices.cuda.large import Large
from blobmem.devices.pages import default_reservation, round_up

ALIGNMENT = 512


@dataclass(slots=True)
class _Small:
    """An allocation in bytes [start, stop) of a chunk."""

    chunk: Chunk
    start: int
    stop: int


class Space:
    """The allocations of one GPU. Addresses are multiples of 512. Calls may come from any thread.

    NoRoom changes nothing. Whatever unmaps or reuses bytes waits for the GPU's work first.

    Args:
        driver: see there.
        reservation: the bytes of addresses to set aside for a large allocation of so many bytes.
    """

    def __init__(self, driver: Driver, reservation: Callable[[int], int] = default_reservation) -> None:
        self._driver = driver
        self._reservation = reservation
        self._chunks = Chunks(driver)
        self._chunk = self._chunks.size
        self._lock = threading.Lock()
        self._allocations: dict[int, _Small | Large] = {}

    @property
    def physical_bytes(self) -> int:
        """Bytes of GPU memory held, chunks counted whole."""
        return self._chunks.held

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` > 0 new bytes, contents undefined."""
        with self._lock:
            return self._allocate(round_up(nbytes, ALIGNMENT))

    def grow(self, address: int, old: int, new: int) -> int:
        """Make an allocation of `old` bytes `new` >= `old` bytes large, contents kept; the address it then has.

        It stays where `grows_in_place` says so, and then at most part of one chunk is copied: the last bytes of a large
        one, where others have the rest of their chunk. Else it moves, which needs room for both. Either way the call
        waits for the GPU's work if it copies.
        """
        with self._lock:
            if self._grow(self._allocations[address], round_up(new, ALIGNMENT)):
                return address
            moved = self._allocate(round_up(new, ALIGNMENT))
            self._driver.copy(moved, address, old)
            self._free(address)
            return moved

    def shrink(self, address: int, old: int, new: int) -> None:
        """Give back all but the first `new` > 0 of an allocation's `old` bytes; it does not move.

        What an earlier growth in place took goes back whole. A cut inside physical memory that was made in one piece
        copies what stays of the piece to a smaller one; where there is no room for both, the piece stays as it is, and
        later growth uses it.
        """
        with self._lock:
            allocation = self._allocations[address]
            self._driver.synchronize()
            if isinstance(allocation, Large):
                allocation.cut(allocation.start + round_up(new, ALIGNMENT))
            elif (stop := allocation.start + round_up(new, ALIGNMENT)) < allocation.stop:
                self._chunks.give(allocation.chunk, stop, allocation.stop)
                allocation.stop = stop

    def free(self, address: int) -> None:
        """Give an allocation back."""
        with self._lock:
            self._driver.synchronize()
            self._free(address)

    def grows_in_place(self, address: int, new: int) -> bool:
        """Whether growing an allocation to `new` bytes would leave it where it is, were nothing else done before."""
        with self._lock:
            allocation, new = self._allocations[address], round_up(new, ALIGNMENT)
            if isinstance(allocation, Large):
                return allocation.start + new <= allocation.reserved
            stop = allocation.start + new
            return stop <= allocation.stop or allocation.chunk.fits(allocation.stop, stop)

    # Allocations. Sizes are multiples of ALIGNMENT from here on, and the lock is held.

    def _allocate(self, nbytes: int) -> int:
        if nbytes < self._chunk:
            chunk, offset = self._chunks.take_small(nbytes)
            self._allocations[chunk.home + offset] = _Small(chunk, offset, offset + nbytes)
            return chunk.home + offset
        large = Large(self._driver, self._chunks, nbytes, self._reservation(nbytes))
        self._allocations[large.base + large.start] = large
        return large.base + large.start

    def _grow(self, allocation: _Small | Large, nbytes: int) -> bool:
        """Grow an allocation where it is; False, and nothing has changed, if it would have to move."""
        stop = allocation.start + nbytes
        if stop <= allocation.stop:
            return True
        if isinstance(allocation, _Small):
            if not allocation.chunk.fits(allocation.stop, stop):
                return False
            self._chunks.take_from(allocation.chunk, allocation.stop, stop)
            allocation.stop = stop
            return True
        if stop > allocation.reserved:
            return False
        allocation.extend(stop)
        return True

    def _free(self, address: int) -> None:
        allocation = self._allocations.pop(address)
        if isinstance(allocation, _Small):
            self._chunks.give(allocation.chunk, allocation.start, allocation.stop)
        else:
            allocation.free()
