"""Which side holds the truth, byte range by byte range: a map from [0, infinity) to two bits.

The bits are those of `Side`: 1 the host has the bytes, 2 the device has them, 3 both have, 0 they are zero everywhere
because nobody ever wrote them (or they were cleared). Kept as a short sorted list with equal neighbours merged, so that
a memory used through one view is one or two entries whatever its size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

ZERO = 0


class Extents:
    """The map. All of it is `ZERO` at first; operations cost the number of extents they meet."""

    __slots__ = ("_bits", "_starts")

    def __init__(self) -> None:
        self._starts = [0]  # extent i is [starts[i], starts[i + 1]), the last one has no end
        self._bits = [ZERO]

    def at(self, start: int, stop: int) -> int | None:
        """The bits of [start, stop) if they are the same throughout, else None."""
        starts = self._starts
        index = bisect_right(starts, start)
        if index == len(starts) or stop <= starts[index]:
            return self._bits[index - 1]
        return None

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, bits) of the extents in [start, stop), cut to it, in order.

        The list is read before the first is given, so that `put` may be called meanwhile.
        """
        if start >= stop:
            return iter(())
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop, first + 1)
        edges = [start, *self._starts[first + 1 : last], stop]
        return zip(edges[:-1], edges[1:], self._bits[first:last], strict=True)

    def put(self, start: int, stop: int | None, bits: int) -> bool:
        """Set the bits of [start, stop) (to the very end if `stop` is None); whether that changed anything."""
        starts, values = self._starts, self._bits
        if stop is not None and start >= stop:
            return False
        if start == 0 and (len(starts) == 1 or (len(starts) == 2 and starts[1] == stop)):
            return self._put_first(stop, bits)
        first = bisect_right(starts, start) - 1
        last = len(starts) if stop is None else bisect_left(starts, stop, first + 1)
        if last == first + 1 and values[first] == bits:
            return False
        low, before = first, values[first - 1] if first else None
        if starts[first] < start:
            low, before = first + 1, values[first]
        edges, kept = [], []
        if before != bits:
            edges.append(start)
            kept.append(bits)
        if stop is not None and (last == len(starts) or starts[last] > stop):
            if values[last - 1] != bits:
                edges.append(stop)
                kept.append(values[last - 1])
        elif stop is not None and values[last] == bits:
            last += 1  # the next extent is a part of this one now
        starts[low:last] = edges
        values[low:last] = kept
        return True

    def _put_first(self, stop: int | None, bits: int) -> bool:
        """`put` from 0 on where one extent, or the end, follows: all that happens to memories with one view."""
        if self._bits[0] == bits:
            return False
        beyond = self._bits[-1]
        if stop is None or bits == beyond:
            self._starts, self._bits = [0], [bits]
        else:
            self._starts, self._bits = [0, stop], [bits, beyond]
        return True

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int | None, int]]:
        stops: list[int | None] = [*self._starts[1:], None]
        return zip(self._starts, stops, self._bits, strict=True)

    def __repr__(self) -> str:
        names = ("zero", "host", "device", "both")
        return "Extents(" + ", ".join(f"{a}-{'' if b is None else b} {names[bits]}" for a, b, bits in self) + ")"
