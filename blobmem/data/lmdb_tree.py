"""The records of an LMDB database's file, leaf by leaf in key order; `lmdb_file` says what nodes are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from blobmem.data.datum import RecordError
from blobmem.data.lmdb_file import BRANCH, HEADER, LEAF, LmdbFile
from blobmem.errors import NetError

if TYPE_CHECKING:
    from blobmem.data.plain import Placer

Item = tuple[bytes, bytes | RecordError]
"""Key and value of a record; where that is damaged, what is wrong with it."""

_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_CHILD = 2**48 - 1  # the bits of a branch's node that are the child's number; the key's size is above
_BIG = 1
_LONGEST_KEY = 511  # bytes, as LMDB is built


class Leaves:
    """A walk over the leaves of a database's main tree in key order, at first before the first one.

    Attributes:
        first: number of the first record in the present leaf.
        count: number of records in it.
    """

    def __init__(self, file: LmdbFile) -> None:
        self._file = file
        # on each level the pages yet to visit, in reverse order
        self._path: list[list[int]] = [[file.root]] if file.entries else []
        self._page = b""
        self._number = 0
        self._offsets: tuple[int, ...] = ()
        self.first = 0
        self.count = 0

    def advance(self) -> bool:
        """Go to the next leaf; False at the end. Raises NetError where the tree is damaged."""
        while self._path and not self._path[-1]:
            self._path.pop()
        if not self._path:
            return False
        while len(self._path) < self._file.depth:
            self._path.append(self._children(self._path[-1].pop())[::-1])
        self.first += self.count
        self._enter(self._path[-1].pop())
        return True

    def _enter(self, number: int) -> None:
        """Be at that leaf, whose first record is `first`."""
        self._number = number
        if not self._file.has(number):
            while len(self._path[-1]) < self._file.most_together and self._next_branch():
                pass
        self._page = self._file.page(number, LEAF, self._ahead())
        self._offsets = _offsets(self._page)
        self.count = len(self._offsets)
        if not self.count:  # of such ones, branches that share children could have a walk without end
            raise self._file.damaged(f"leaf page {number} has no records")
        if self.first + self.count > self._file.entries:
            raise self._file.damaged(f"it has more than its {self._file.entries} records")

    def _children(self, number: int) -> list[int]:
        page = self._file.page(number, BRANCH)
        offsets = _offsets(page)
        if not offsets:
            raise self._file.damaged(f"branch page {number} has no children")
        if max(offsets) + _NODE.size > len(page):
            raise self._file.damaged(f"page {number} has a node beyond its end")
        node = _NUMBER.unpack_from
        return [node(page, offset)[0] & _CHILD for offset in offsets]

    def records(self, start: int) -> Iterator[Item]:
        """Key and value of this leaf's records from its record `start` on; for a damaged value an error."""
        page, node, end = self._page, _NODE.unpack_from, len(self._page)
        for index, offset in enumerate(self._offsets[start:], self.first + start):
            key_start = offset + _NODE.size
            if key_start > end:
                yield b"number %d" % index, self._damage()
                continue
            low, high, flags, key_size = node(page, offset)
            value_start = key_start + key_size
            size = low | high << 16
            if key_size > _LONGEST_KEY:
                yield b"number %d" % index, self._damage()
                continue
            key = page[key_start:value_start]
            if not flags and value_start + size <= end:
                yield key, page[value_start : value_start + size]
            elif flags == _BIG and value_start + _NUMBER.size <= end:
                yield key, self._big_value(_NUMBER.unpack_from(page, value_start)[0], size)
            else:
                yield key, self._damage()

    def place(self, start: int, placer: Placer) -> int:
        """Let the placer take values from this leaf's record `start` on, and go to the leaf of the last; how many.

        Ends before a value that is not plain, or whose leaf has to be read or is damaged.
        """
        leaves = [self._number, *self._ahead()]
        swept = placer.place_leaves(*self._file.window, leaves, start, self._file.entries - self.first)
        if swept.leaf:
            self._go_on(swept.leaf, swept.before)
        return swept.taken

    def skip(self, index: int, placer: Placer) -> None:
        """Go on, over leaves that have been read already, to the last that ends before record `index`."""
        end = self.first + self.count
        skipped, before = placer.skip_leaves(*self._file.window, self._ahead(), index - end)
        if skipped:
            self._go_on(skipped, self.count + before)

    def _next_branch(self) -> bool:
        """Have the leaves of the next branch, too, in line, if it hangs on the same one; whether so."""
        branches = self._path[-2] if len(self._path) > 1 else []
        if not branches:
            return False
        try:
            self._path[-1][:0] = self._children(branches[-1])[::-1]
        except NetError:  # told when the walk comes there
            return False
        branches.pop()
        return True

    def _ahead(self) -> list[int]:
        """The next leaves, as many of those in line as may have been read together."""
        return self._path[-1][: -self._file.most_together - 1 : -1]

    def _go_on(self, leaves: int, records: int) -> None:
        """Go on by so many leaves, to one that has so many records before it from `first` on."""
        number = self._path[-1][-leaves]
        del self._path[-1][-leaves:]
        self.first += records
        self._enter(number)

    def _big_value(self, number: int, size: int) -> bytes | RecordError:
        try:
            return self._file.overflow(number, size)
        except RecordError as error:
            return error

    def _damage(self) -> RecordError:
        return RecordError(f"page {self._number} of the database is damaged, or it is no plain record")


def _offsets(page: bytes) -> tuple[int, ...]:
    """Where the nodes of a page begin."""
    lower: int = HEADER.unpack_from(page)[3]
    return struct.unpack_from(f"<{(lower - HEADER.size) // 2}H", page, HEADER.size)
