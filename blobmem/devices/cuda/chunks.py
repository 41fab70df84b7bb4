"""Physical memory in whole chunks, and which bytes of a shared chunk are free."""

from __future__ import annotations

import bisect
import itertools
from typing import Any, Protocol

Interval = tuple[int, int]


class NoRoom(MemoryError):
    """The GPU has no memory, or the process no addresses, for what was asked."""


class Driver(Protocol):
    """The calls by which memory and addresses are had. NoRoom from any of them that takes something.

    Attributes:
        granularity: bytes in a chunk. Handles, reservations and mappings are multiples of it.
    """

    granularity: int

    def reserve(self, nbytes: int) -> int:
        """The start of a range of unused addresses, a multiple of the granularity."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give back a whole range with nothing mapped in it."""

    def create(self, nbytes: int) -> Any:
        """A handle of new physical memory, contents undefined."""

    def release(self, handle: Any) -> None:
        """Give physical memory back."""

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Let a handle of `nbytes` be read and written at a reserved address; it may be mapped elsewhere, too."""

    def unmap(self, address: int, nbytes: int) -> None:
        """End what one `map` began."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU: after all work queued so far, and finished when it returns."""

    def synchronize(self) -> None:
        """Wait for all work queued on the GPU."""


class Chunk:
    """A physical chunk whose bytes several allocations use.

    Attributes:
        handle: the driver's.
        number: among all shared chunks there have been.
        free: intervals that nobody uses, in order, none touching the next.
        home: the address at which all of it is mapped for the small allocations in it; 0 before there is one.
    """

    __slots__ = ("free", "handle", "home", "number")

    def __init__(self, handle: Any, number: int) -> None:
        self.handle = handle
        self.number = number
        self.free: list[Interval] = []
        self.home = 0

    def fits(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is free."""
        return any(a <= start and stop <= b for a, b in self.free)


class Chunks:
    """The physical memory that is held: handles with one owner, and shared chunks, each while anybody uses it.

    Attributes:
        size: bytes in a chunk.
        held: bytes held.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.size = driver.granularity
        self.held = 0
        self._made = 0
        self._holes: list[tuple[int, int, int, Chunk]] = []  # length, start, chunk's number, chunk: in this order

    def create(self, nbytes: int) -> Any:
        """A handle of `nbytes`, a multiple of the chunk's size. NoRoom changes nothing."""
        handle = self._driver.create(nbytes)
        self.held += nbytes
        return handle

    def release(self, handle: Any, nbytes: int) -> None:
        """Give back what `create` gave."""
        self._driver.release(handle)
        self.held -= nbytes

    def ending(self) -> int:
        """The most bytes that are free at the end of a shared chunk."""
        return next((length for length, start, _, _ in reversed(self._holes) if start + length == self.size), 0)

    def find(self, start: int, stop: int) -> Chunk | None:
        """The shared chunk in whose free bytes [start, stop) lies with the least left over."""
        holes = itertools.islice(self._holes, bisect.bisect_left(self._holes, (stop - start,)), None)
        return next((chunk for length, a, _, chunk in holes if a <= start and stop <= a + length), None)

    def take(self, start: int, stop: int) -> Chunk:
        """Use [start, stop) of some shared chunk, of a new one where it is free in none. NoRoom changes nothing."""
        chunk = self.find(start, stop)
        if chunk is None:
            chunk = Chunk(self.create(self.size), self._made)
            self._made += 1
            self._add(chunk, 0, self.size)
        self.take_from(chunk, start, stop)
        return chunk

    def take_from(self, chunk: Chunk, start: int, stop: int) -> None:
        """Use the free bytes [start, stop) of a chunk."""
        a, b = self._remove(chunk, bisect.bisect_right(chunk.free, start, key=lambda interval: interval[0]) - 1)
        if a < start:
            self._add(chunk, a, start)
        if stop < b:
            self._add(chunk, stop, b)

    def take_small(self, nbytes: int) -> tuple[Chunk, int]:
        """Use `nbytes` of some shared chunk, mapped at its home: the chunk and the offset. NoRoom changes nothing."""
        index = bisect.bisect_left(self._holes, (nbytes,))
        if index < len(self._holes):
            _, offset, _, chunk = self._holes[index]
            self.take_from(chunk, offset, offset + nbytes)
        else:
            chunk, offset = self.take(0, nbytes), 0
        try:
            self._settle(chunk)
        except NoRoom:
            self.give(chunk, offset, offset + nbytes)
            raise
        return chunk, offset

    def give(self, chunk: Chunk, start: int, stop: int) -> None:
        """Use [start, stop) of a chunk no longer; a chunk that nobody uses is given back."""
        index = bisect.bisect_left(chunk.free, (start, stop))
        if index < len(chunk.free) and chunk.free[index][0] == stop:
            stop = self._remove(chunk, index)[1]
        if index and chunk.free[index - 1][1] == start:
            start = self._remove(chunk, index - 1)[0]
        if stop - start < self.size:
            self._add(chunk, start, stop)
            return
        if chunk.home:
            self._driver.unmap(chunk.home, self.size)
            self._driver.unreserve(chunk.home, self.size)
        self.release(chunk.handle, self.size)

    def _add(self, chunk: Chunk, start: int, stop: int) -> None:
        bisect.insort(chunk.free, (start, stop))
        bisect.insort(self._holes, (stop - start, start, chunk.number, chunk))

    def _remove(self, chunk: Chunk, index: int) -> Interval:
        start, stop = chunk.free.pop(index)
        del self._holes[bisect.bisect_left(self._holes, (stop - start, start, chunk.number))]
        return start, stop

    def _settle(self, chunk: Chunk) -> None:
        """Map a chunk at its home, if it has none. NoRoom changes nothing."""
        if chunk.home:
            return
        home = self._driver.reserve(self.size)
        try:
            self._driver.map(home, self.size, chunk.handle)
        except NoRoom:
            self._driver.unreserve(home, self.size)
            raise
        chunk.home = home
