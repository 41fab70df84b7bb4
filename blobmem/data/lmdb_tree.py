"""The records of an LMDB database's file, leaf by leaf in key order; `lmdb_file` says what nodes are made of."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from blobmem.data.datum import RecordError
from blobmem.data.lmdb_file import BRANCH, HEADER, LEAF, LmdbFile
from blobmem.errors import NetError

if TYPE_CHECKING:
    from blobmem.data.plain import Placer

Item = tuple[bytes, bytes | RecordError]
"""Key and value of a record; where that is damaged, what is wrong with it."""

_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_CHILD = np.uint64(2**48 - 1)  # the bits of a branch's node that are the child's number; the key's size is above
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
        # on each level above the lowest branches the pages yet to visit, in reverse order
        self._path: list[list[int]] = []
        self._line = np.empty(0, np.int64)  # leaves of the branches that have been read; the present one is before _at
        self._at = 0
        if file.entries and file.depth > 1:
            self._path.append([file.root])
        elif file.entries:
            self._line = np.array([file.root])
        self._page = b""
        self._number = 0
        self._offsets: tuple[int, ...] = ()
        self.first = 0
        self.count = 0

    def advance(self) -> bool:
        """Go to the next leaf; False at the end. Raises NetError where the tree is damaged."""
        if self._at == len(self._line) and not self._next_branch():
            return False
        self._go_on(1, self.count)
        return True

    def _go_on(self, leaves: int, records: int) -> None:
        """Go on by so many leaves, to one that has so many records before it from `first` on."""
        self._at += leaves
        self.first += records
        self._number = int(self._line[self._at - 1])
        if not self._file.has(self._number):
            with contextlib.suppress(NetError):  # told when the walk comes there
                while len(self._ahead()) < self._file.most_together and self._next_branch():
                    pass
        self._page = self._file.page(self._number, LEAF, self._ahead())
        self._offsets = _offsets(self._page)
        self.count = len(self._offsets)
        if not self.count:  # of such ones, branches that share children could have a walk without end
            raise self._file.damaged(f"leaf page {self._number} has no records")
        if self.first + self.count > self._file.entries:
            raise self._file.damaged(f"it has more than its {self._file.entries} records")

    def _next_branch(self) -> bool:
        """Have the leaves of the next branch in line, too; False at the end. NetError, and all is as before, if it is
        damaged."""
        while self._path and not self._path[-1]:
            self._path.pop()
        if not self._path:
            return False
        while len(self._path) < self._file.depth - 1:
            children = self._children(self._path[-1][-1])
            self._path[-1].pop()
            self._path.append(children[::-1].tolist())
        children = self._children(self._path[-1][-1])
        self._path[-1].pop()
        passed = max(0, self._at - 1)
        self._line, self._at = np.concatenate([self._line[passed:], children]), self._at - passed
        return True

    def _ahead(self) -> np.ndarray:
        """The next leaves, as many of those in line as may have been read together."""
        return self._line[self._at : self._at + self._file.most_together]

    def _children(self, number: int) -> np.ndarray:
        page = self._file.page(number, BRANCH)
        offsets = np.array(_offsets(page))
        if not len(offsets):
            raise self._file.damaged(f"branch page {number} has no children")
        if offsets.max() + _NODE.size > len(page):
            raise self._file.damaged(f"page {number} has a node beyond its end")
        nodes = np.frombuffer(page, np.uint8)[offsets[:, np.newaxis] + np.arange(_NODE.size)]
        return (nodes.view("<u8")[:, 0] & _CHILD).astype(np.int64)

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
        leaves = self._line[self._at - 1 : self._at + self._file.most_together]
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
