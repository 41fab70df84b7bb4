"""Records of an LMDB database in key order, found by their position.

LMDB allows one environment per file and process, so all readers of a file share one, which closes with the last of
them. Opening takes no lock and writes nothing: databases on read-only disks work, and any number of processes can
read one. A database that another program is changing at that moment must not be read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blobmem.errors import NetError

DATA_FILE = "data.mdb"
"""The file that makes a folder an LMDB database."""


class Records:
    """The records of a database, in key order, over and over: position p is record p modulo their number.

    Reading goes on where it stopped at no cost; another position is reached by skipping. A reader serves one thread
    at a time. A process forked from this one opens the database for itself.

    Raises NetError if the folder holds no database, or one that is cut short, empty or already open elsewhere in
    this process.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._attach()

    def _attach(self) -> None:
        self._environment = _acquire(self.path)
        release = weakref.finalize(self, _release, self._environment)
        release.atexit = False
        with _damage(self.path):
            transaction = self._environment.handle.begin()
            self._cursor = transaction.cursor()
            self._count: int = transaction.stat()["entries"]
            self._index = 0
            if not self._cursor.first():
                raise NetError(f"{self.path} holds no records: create it again")

    def __len__(self) -> int:
        return self._count

    def read(self, position: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of `count` records from `position` on. Raises NetError if the database is damaged."""
        if self._environment.pid != os.getpid():
            self._attach()
        with _damage(self.path):
            self._seek(position % self._count)
            for _ in range(count):
                yield self._cursor.item()
                self._advance()

    def _seek(self, index: int) -> None:
        if index < self._index:
            self._rewind()
        while self._index < index:
            self._advance()

    def _advance(self) -> None:
        if self._index + 1 == self._count:
            self._rewind()
        elif self._cursor.next():
            self._index += 1
        else:
            raise NetError(f"{self.path} is damaged: it ends after {self._index + 1} of {self._count} records")

    def _rewind(self) -> None:
        if not self._cursor.first():
            raise NetError(f"{self.path} is damaged: its first record is gone")
        self._index = 0


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """What LMDB finds wrong while it reads, as NetError."""
    try:
        yield
    except _lmdb().Error as error:
        raise NetError(f"{path} is damaged: {error}; copy or create it again") from error


# ---------------------------------------------------------------- environments, one per file and process


@dataclass(slots=True)
class _Environment:
    """An open LMDB environment and how many readers use it."""

    handle: Any
    key: tuple[int, int]
    pid: int
    users: int = 0


_lock = threading.Lock()
_open: dict[tuple[int, int], _Environment] = {}
_released: deque[_Environment] = deque()


def _acquire(path: str) -> _Environment:
    """The environment of a database folder; `_release` gives it back."""
    file = os.path.join(path, DATA_FILE)
    try:
        status = os.stat(file)
    except OSError:
        raise NetError(f"{path} is no LMDB database: there is no {file}") from None
    key = (status.st_dev, status.st_ino)
    with _lock:
        _close_released()
        entry = _open.get(key)
        if entry is None:
            entry = _open[key] = _Environment(_open_handle(path, status.st_size), key, os.getpid())
        entry.users += 1
    return entry


def _open_handle(path: str, size: int) -> Any:
    lmdb = _lmdb()
    if not size:
        raise NetError(f"{path} is no LMDB database: its {DATA_FILE} is empty")
    try:
        # records are read in the order in which they lie in the file, which is what reading ahead is good for
        handle = lmdb.open(path, readonly=True, lock=False, create=False, readahead=True)
    except lmdb.Error as error:
        if "already open" in str(error):
            raise NetError(f"{path} is open in this process by other code than blobmem: close it there first") from None
        raise NetError(f"{path} cannot be opened as an LMDB database: {error}") from None
    # touching a mapped page beyond the file's end would kill the process
    with _damage(path):
        expected = (handle.info()["last_pgno"] + 1) * handle.stat()["psize"]
    if size < expected:
        handle.close()
        raise NetError(
            f"{path} is cut short: {DATA_FILE} has {size} bytes of {expected}; copy or create it again "
            "(if it was ever whole, `mdb_copy -c` can repair it)"
        )
    return handle


def _release(entry: _Environment) -> None:
    # runs when a reader is collected, which may be at any moment, inside _acquire too: no waiting for the lock here
    _released.append(entry)
    if _lock.acquire(blocking=False):
        try:
            _close_released()
        finally:
            _lock.release()


def _close_released() -> None:
    while _released:
        entry = _released.popleft()
        entry.users -= 1
        if not entry.users and _open.get(entry.key) is entry:
            del _open[entry.key]
            entry.handle.close()


def _after_fork() -> None:
    """Let go of the parent's environments in a child: LMDB's must not be used there."""
    global _lock
    _lock = threading.Lock()
    for entry in _open.values():
        entry.handle.close()
    _open.clear()
    _released.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _lmdb() -> Any:
    # imported late: `import blobmem` must stay quick
    import lmdb

    return lmdb
