"""Records of a database in key order, found by their position, whichever kind of database it is.

LMDB databases are read by `lmdb_tree`, LevelDB ones by `leveldb`. A database that another program is changing
at that moment must not be read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from blobmem.data.datum import RecordError
from blobmem.data.lmdb_file import DATA_FILE, LmdbFile
from blobmem.data.lmdb_tree import Item, Leaves
from blobmem.errors import NetError

if TYPE_CHECKING:
    from blobmem.data.plain import Placer

Kind = Literal["LMDB", "LEVELDB"]

MARK_FILE = "CURRENT"
"""The file that makes a folder a LevelDB database."""


class Reader(Protocol):
    """The records of a database, in key order, over and over: position p is record p modulo their number.

    Reading goes on where it stopped at no cost; another position is reached by skipping. A reader serves one thread
    at a time, and there may be any number of them.

    Attributes:
        path: the database's folder.
    """

    path: str

    def __len__(self) -> int:
        """Number of records."""

    def items(self, position: int) -> Iterator[Item]:
        """The records from `position` on, without end. Raises NetError if the database is damaged beyond one record."""

    def read(self, position: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of `count` records from `position` on. Raises NetError if one of them is damaged."""


def kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """What kind of database a folder holds, by the files in it; None for neither."""
    if os.path.isfile(os.path.join(path, DATA_FILE)):
        return "LMDB"
    return "LEVELDB" if os.path.isfile(os.path.join(path, MARK_FILE)) else None


def open_records(path: str | os.PathLike[str]) -> Reader:
    """A reader of the database in a folder, of either kind.

    Raises NetError if it holds none, or one that is cut short, empty or cannot be opened.
    """
    if kind_of(path) == "LEVELDB":
        # imported late: it needs a package that is optional
        from blobmem.data.leveldb import LevelRecords

        return LevelRecords(path)
    return Records(path)


def checked(path: str, items: Iterator[Item], count: int) -> Iterator[tuple[bytes, bytes]]:
    """The next `count` of these items. Raises NetError naming one that is damaged."""
    for key, value in itertools.islice(items, count):
        if isinstance(value, RecordError):
            raise NetError(f"record {key!r} of {path} cannot be used: {value}")
        yield key, value


class Records:
    """The `Reader` of an LMDB database.

    Raises NetError if the folder holds no database, or one that is cut short or empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._index = 0
        self._file = LmdbFile(self.path)
        if not self._file.entries:
            raise NetError(f"{self.path} holds no records: create it again")
        self._leaves = Leaves(self._file)
        self._seek(0)

    def __len__(self) -> int:
        return self._file.entries

    def items(self, position: int) -> Iterator[Item]:
        self._seek(position % len(self))
        while True:
            leaves = self._leaves
            for item in leaves.records(self._index - leaves.first):
                self._index += 1
                yield item
            self._seek(self._index % len(self))

    def place(self, position: int, placer: Placer) -> None:
        """Let the placer take the values from `position` on until it is full, or comes to one that is not plain."""
        self._seek(position % len(self), placer)
        while not placer.full:
            leaves = self._leaves
            self._index += leaves.place(self._index - leaves.first, placer)
            if self._index == leaves.first + leaves.count:
                self._seek(self._index % len(self))
            elif not placer.full and not self._place_one_by_one(placer):
                return

    def _place_one_by_one(self, placer: Placer) -> bool:
        """`place`, for the leaf's values that lie in pages of their own; whether it goes on behind them."""
        leaves = self._leaves
        for _, value in leaves.records(self._index - leaves.first):
            if isinstance(value, RecordError) or not placer.place(value):
                return False
            self._index += 1
            if len(value) <= self._file.page_size // 2 or placer.full:  # larger ones never lie in leaves
                break
        self._seek(self._index % len(self))
        return True

    def read(self, position: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        return checked(self.path, self.items(position), count)

    def _seek(self, index: int, placer: Placer | None = None) -> None:
        """Go to a record; where there is a placer, with its help."""
        if index < self._leaves.first:
            self._leaves = Leaves(self._file)
        leaves = self._leaves
        try:
            while index >= leaves.first + leaves.count:
                if placer is not None and index > leaves.first + leaves.count:
                    leaves.skip(index, placer)
                if not leaves.advance():
                    end = leaves.first + leaves.count
                    raise self._file.damaged(f"it ends after {end} of {len(self)} records")
        except NetError:
            self._leaves, self._index = Leaves(self._file), 0
            raise
        self._index = index
