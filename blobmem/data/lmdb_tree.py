"""The records of an LMDB database's file, leaf by leaf in key order; `lmdb_file` says what nodes are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from blobmem.data.datum import RecordError
from blobmem.data.lmdb_file import BRANCH, HEADER, LEAF, LmdbFile

Item = tuple[bytes, bytes | RecordError]
"""Key and value of a record; where that is damaged, what is wrong with it."""

Run = tuple[np.ndarray, np.ndarray]
"""Bytes, and where in them values of records begin and end, (values, 2)."""

_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
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
        self._number = self._path[-1].pop()
        self._page = self._file.page(self._number, LEAF)
        self._offsets = _offsets(self._page)
        if not self._offsets:  # of such ones, branches that share children could have a walk without end
            raise self._file.damaged(f"leaf page {self._number} has no records")
        self.first += self.count
        self.count = len(self._offsets)
        if self.first + self.count > self._file.entries:
            raise self._file.damaged(f"it has more than its {self._file.entries} records")
        return True

    def _children(self, number: int) -> list[int]:
        page = self._file.page(number, BRANCH)
        children = []
        for offset in _offsets(page):
            if offset + _NODE.size > len(page):
                raise self._file.damaged(f"page {number} has a node beyond its end")
            low, high, top, _ = _NODE.unpack_from(page, offset)
            children.append(low | high << 16 | top << 32)
        if not children:
            raise self._file.damaged(f"branch page {number} has no children")
        return children

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

    def runs(self, start: int) -> Iterator[Run]:
        """The values of this leaf's records from its record `start` on, as far as none is damaged."""
        # imported late: reading alone must not wait for the compiler
        from blobmem.data.plain import plain_values

        page = np.frombuffer(self._page, np.uint8)
        while start < self.count:
            places = np.empty((self.count - start, 2), np.int64)
            found = plain_values(page, start, places)
            if found:
                yield page, places[:found]
            else:
                (_, value), found = next(self.records(start)), 1
                if isinstance(value, RecordError):
                    return
                yield np.frombuffer(value, np.uint8), np.array([[0, len(value)]])
            start += found

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
