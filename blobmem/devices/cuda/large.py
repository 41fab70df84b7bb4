"""Large allocations: a range of addresses of its own, into which physical memory is mapped as the allocation grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from blobmem.devices.cuda.chunks import Chunk, Chunks, Driver, NoRoom
from blobmem.devices.pages import round_up


@dataclass(slots=True)
class Part:
    """Physical memory as it is mapped in a large allocation: a handle of its own, or a shared chunk's."""

    handle: Any
    nbytes: int
    chunk: Chunk | None = None


class Large:
    """An allocation of `nbytes` in a range of `wanted` addresses, of just what it needs where there are no more.

    Every step that can fail puts what undoes it on an ExitStack: NoRoom changes nothing.

    Attributes:
        base, reserved: its range.
        start, stop: where its bytes are in the range.
        parts: what is mapped, one after the other from `base` on; `stop` lies in the last one.
    """

    __slots__ = ("_chunks", "_driver", "_size", "base", "parts", "reserved", "start", "stop")

    def __init__(self, driver: Driver, chunks: Chunks, nbytes: int, wanted: int) -> None:
        self._driver, self._chunks, self._size = driver, chunks, chunks.size
        self.parts: list[Part] = []
        shared = chunks.ending() if nbytes % self._size else 0  # its first bytes, after another's last
        self.start = self.stop = -shared % self._size
        with ExitStack() as undo:
            self._reserve(round_up(self.start + nbytes, self._size), round_up(wanted, self._size))
            undo.callback(driver.unreserve, self.base, self.reserved)
            if self.start:
                self._append(self._share(self.start, self._size, undo), undo)
                self.stop = self._size
            self._extend(self.start + nbytes, undo)
            undo.pop_all()

    def _reserve(self, least: int, wanted: int) -> None:
        self.reserved = max(least, wanted)
        try:
            self.base = self._driver.reserve(self.reserved)
        except NoRoom:  # of addresses
            self.reserved = least
            self.base = self._driver.reserve(least)

    @property
    def mapped(self) -> int:
        """Bytes of the range that have physical memory, from `base` on."""
        return sum(part.nbytes for part in self.parts)

    def extend(self, stop: int) -> None:
        """Reach to `stop` of the range. NoRoom changes nothing."""
        with ExitStack() as undo:
            self._extend(stop, undo)
            undo.pop_all()

    def cut(self, stop: int) -> None:
        """Reach to `stop` at most. The GPU must have finished with what lies beyond."""
        while self.mapped - self.parts[-1].nbytes >= stop:
            self._drop()
            self.stop = self.mapped
        if stop >= self.stop:
            return
        origin, _, end = self._used(len(self.parts) - 1)
        chunk = self.parts[-1].chunk
        if chunk is not None:
            self._chunks.give(chunk, stop - origin, end)
        self.stop = stop
        try:
            self._tighten()
        except NoRoom:
            return

    def free(self) -> None:
        """Give everything back. The GPU must have finished with it."""
        while self.parts:
            self._drop()
        self._driver.unreserve(self.base, self.reserved)

    # Steps

    def _extend(self, stop: int, undo: ExitStack) -> None:
        """Reach to `stop`: in the last part, then in one new handle, then in a shared chunk."""
        position, last = self.mapped, len(self.parts) - 1
        roomier = self._widen(min(stop, position), undo)
        if whole := max(stop - position, 0) // self._size * self._size:
            self._append(self._create(whole, undo), undo)
        if rest := max(stop - position - whole, 0):
            self._append(self._share(0, rest, undo), undo)
        if roomier is not None:  # last, since all before it is undone without a copy
            self._replace(last, [roomier])
        self.stop = stop

    def _widen(self, stop: int, undo: ExitStack) -> Part | None:
        """Use the last part up to `stop`; where others have these bytes, the part to replace it by."""
        if stop <= self.stop:
            return None
        origin, start, end = self._used(len(self.parts) - 1)
        chunk = self.parts[-1].chunk
        if chunk is None:  # longer than was needed: a cut had no room for another
            return None
        if not chunk.fits(end, stop - origin):
            return self._share(start, stop - origin, undo)
        self._take(chunk, end, stop - origin, undo)
        return None

    def _tighten(self) -> None:
        """Hold the last part's bytes in fewer chunks where that can be. NoRoom changes nothing."""
        last = len(self.parts) - 1
        part, (_, start, stop) = self.parts[last], self._used(last)
        with ExitStack() as undo:
            if part.chunk is None:
                if round_up(stop, self._size) == part.nbytes:
                    return
                whole = stop // self._size * self._size
                parts = [self._create(whole, undo)] if whole else []
                if stop > whole:
                    parts.append(self._share(0, stop - whole, undo))
            else:
                alone = sum(b - a for a, b in part.chunk.free) == self._size - (stop - start)
                if not alone or self._chunks.find(start, stop) is None:
                    return
                parts = [self._share(start, stop, undo)]
            self._replace(last, parts)
            undo.pop_all()

    def _replace(self, index: int, parts: list[Part]) -> None:
        """Put parts of together at most its size in the place of another, contents kept. NoRoom changes nothing."""
        (origin, start, stop), old = self._used(index), self.parts[index]
        place = self.base + origin
        with ExitStack() as window:  # the new parts at addresses of their own for the copy
            size = sum(part.nbytes for part in parts)
            address = self._driver.reserve(size)
            window.callback(self._driver.unreserve, address, size)
            self._map(address, parts, window)
            self._driver.copy(address + start, place + start, stop - start)
        with ExitStack() as undo:
            self._driver.unmap(place, old.nbytes)
            undo.callback(self._driver.map, place, old.nbytes, old.handle)
            self._map(place, parts, undo)
            undo.pop_all()
        self.parts[index : index + 1] = parts
        self._release(old, start, stop)

    def _drop(self) -> None:
        """Give the last part back."""
        origin, start, stop = self._used(len(self.parts) - 1)
        part = self.parts.pop()
        self._driver.unmap(self.base + origin, part.nbytes)
        self._release(part, start, stop)

    def _used(self, index: int) -> tuple[int, int, int]:
        """Where a part begins in the range, and which of its bytes are the allocation's."""
        origin = sum(part.nbytes for part in self.parts[:index])
        return origin, max(self.start - origin, 0), min(self.stop - origin, self.parts[index].nbytes)

    # Parts: had, mapped, given back

    def _create(self, nbytes: int, undo: ExitStack) -> Part:
        handle = self._chunks.create(nbytes)
        undo.callback(self._chunks.release, handle, nbytes)
        return Part(handle, nbytes)

    def _share(self, start: int, stop: int, undo: ExitStack) -> Part:
        """[start, stop) of a shared chunk."""
        chunk = self._chunks.take(start, stop)
        undo.callback(self._chunks.give, chunk, start, stop)
        return Part(chunk.handle, self._size, chunk)

    def _take(self, chunk: Chunk, start: int, stop: int, undo: ExitStack) -> None:
        self._chunks.take_from(chunk, start, stop)
        undo.callback(self._chunks.give, chunk, start, stop)

    def _append(self, part: Part, undo: ExitStack) -> None:
        self._map(self.base + self.mapped, [part], undo)
        self.parts.append(part)
        undo.callback(self.parts.pop)

    def _map(self, address: int, parts: Sequence[Part], undo: ExitStack) -> None:
        """Map parts one after the other from `address` on."""
        for part in parts:
            self._driver.map(address, part.nbytes, part.handle)
            undo.callback(self._driver.unmap, address, part.nbytes)
            address += part.nbytes

    def _release(self, part: Part, start: int, stop: int) -> None:
        """Give back what is mapped nowhere any more."""
        if part.chunk is None:
            self._chunks.release(part.handle, part.nbytes)
        else:
            self._chunks.give(part.chunk, start, stop)
