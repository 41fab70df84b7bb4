"""Records of a LevelDB database, by the package plyvel, which is an extra.

LevelDB knows neither how many records it holds nor which one has a number: both come from walking over its keys, of
which every 32nd is remembered. It lets one process open a database, and writes into the folder even to read; all
readers of this process share one handle. Checksums of all blocks are checked. They cannot show records that a log
file which is cut short has lost: LevelDB takes that for a crash while writing, and goes on without them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from blobmem.data.database import MARK_FILE, checked
from blobmem.data.lmdb_tree import Item
from blobmem.errors import NetError

_STRIDE = 32  # records between two remembered keys


class LevelRecords:
    """The `Reader` of a LevelDB database.

    Raises NetError if the folder holds no database, one that is damaged, empty or open elsewhere, or without plyvel.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._database = _acquire(self.path)
        self._walk: Iterator[tuple[bytes, bytes]] = iter(())
        self._position = 0  # which the walk has come to

    def __len__(self) -> int:
        """Number of records; the first time it takes a walk over all keys that no reader has come to yet."""
        return len(self._database)

    def items(self, position: int) -> Iterator[Item]:
        database = self._database
        database.check_process()
        if position != self._position:
            self._walk, self._position = iter(()), position
        while True:
            item = next(self._walk, None)
            if item is None:  # at the end, or where the walk does not come to
                self._walk = database.walk(*database.find(self._position))
                item = next(self._walk)
            self._position += 1
            yield item

    def read(self, position: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        return checked(self.path, self.items(position), count)


class _Database:
    """An open database and what walks over it have found out."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._keys: list[bytes] = []  # of every _STRIDE-th record, as far as walks have come
        self._count: int | None = None
        with _errors(path):
            # to be read, not made; damage is an error, not left out
            self._handle = _plyvel().DB(path, create_if_missing=False, paranoid_checks=True)
        if next(self.walk(0, None, values=False), None) is None:
            raise NetError(f"{path} holds no records, or none that can be read: create it again")

    def check_process(self) -> None:
        """Raise NetError in a process forked from the one that opened it."""
        if self._pid != os.getpid():
            raise NetError(
                f"{self._path} is a LevelDB database, which the parent of this process has open, and LevelDB lets one "
                "process at a time: copy its records into an LMDB database"
            )

    def walk(self, number: int, key: bytes | None, values: bool = True) -> Iterator[tuple[bytes, bytes]]:
        """Key and value (empty unless asked for) of all records from the one with that number and key on.

        Raises NetError if the database is damaged, also where LevelDB lets damage end the walk.
        """
        last = None
        with _errors(self._path), self._iterator(start=key, include_value=values) as items:
            for item in items:
                last, value = item if values else (item, b"")
                self._note(number, last)
                number += 1
                yield last, value
        with _errors(self._path), self._iterator(reverse=True, include_value=False) as backward:
            if next(backward, None) != last:
                raise NetError(f"{self._path} is damaged: it cannot be read to its end; copy or create it again")
        self._count = number

    def _iterator(self, **options: Any) -> contextlib.closing[Any]:
        # closed by hand: garbage collection may take the database first, and then its iterators end the process
        return contextlib.closing(self._handle.iterator(verify_checksums=True, fill_cache=False, **options))

    def _note(self, number: int, key: bytes) -> None:
        if number == len(self._keys) * _STRIDE:
            with self._lock:
                if number == len(self._keys) * _STRIDE:  # still: other readers note keys too
                    self._keys.append(key)

    def find(self, position: int) -> tuple[int, bytes]:
        """Number and key of the record at a position."""
        number = position if self._count is None else position % self._count
        nearest = min(number // _STRIDE, len(self._keys) - 1)
        start = nearest * _STRIDE
        for at, (key, _) in enumerate(self.walk(start, self._keys[nearest], values=False), start):
            if at == number:
                return number, key
        return self.find(position)  # now that the walk has shown their number

    def __len__(self) -> int:
        if self._count is None:
            start = (len(self._keys) - 1) * _STRIDE
            for _ in self.walk(start, self._keys[-1], values=False):
                pass
        assert self._count is not None
        return self._count


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """What LevelDB says, as NetError."""
    plyvel = _plyvel()
    try:
        yield
    except plyvel.CorruptionError as error:
        raise NetError(f"{path} is damaged: {_text(error)}; copy or create it again") from None
    except plyvel.Error as error:
        text = _text(error)
        if text.startswith("IO error: lock "):
            text = f"another process has it open, and LevelDB lets one at a time ({text})"
        raise NetError(f"{path} cannot be read as a LevelDB database: {text}") from None


def _text(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _plyvel() -> Any:
    try:
        import plyvel
    except ImportError:
        raise NetError(
            "LevelDB databases are read by the package plyvel, which is not installed: pip install 'blobmem[leveldb]'"
        ) from None
    return plyvel


# ---------------------------------------------------------------- databases, one handle each


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[int, int], _Database] = weakref.WeakValueDictionary()


def _acquire(path: str) -> _Database:
    """The database in a folder; it closes with the last reader."""
    _plyvel()
    if not os.path.isfile(os.path.join(path, MARK_FILE)):
        raise NetError(f"{path} is no LevelDB database: there is no file {MARK_FILE} in it")
    status = os.stat(path)
    key = (status.st_dev, status.st_ino)
    with _lock:
        database = _open.get(key)
        if database is None:
            database = _open[key] = _Database(path)
    database.check_process()
    return database


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
