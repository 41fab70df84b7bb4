"""New LMDB databases, all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blobmem.data.lmdb_file import DATA_FILE
from blobmem.errors import NetError

_FIRST_MAP = 16 * 2**20  # bytes of addresses; doubled whenever they run out
_COMMIT_RECORDS = 1000
_COMMIT_BYTES = 16 * 2**20


class DatabaseWriter:
    """Records into a database that `new_database` made; keys must ascend."""

    def __init__(self, environment: Any, target: Path) -> None:
        self._environment = environment
        self._target = target
        self._pending: list[tuple[bytes, bytes]] = []
        self._bytes = 0
        self._last_key = b""
        self.count = 0

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record. Raises ValueError unless its key is beyond all before it, NetError if writing fails."""
        if key <= self._last_key:
            raise ValueError(f"keys must ascend: {key!r} comes after {self._last_key!r}")
        self._pending.append((key, value))
        self._bytes += len(key) + len(value)
        self._last_key = key
        self.count += 1
        if len(self._pending) >= _COMMIT_RECORDS or self._bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Hand what was put to LMDB, which takes it as a whole; more addresses are taken where it has too few."""
        import lmdb

        environment = self._environment
        while self._pending:
            try:
                with _write_errors(self._target), environment.begin(write=True) as transaction:
                    # ascending keys fill each page before the next one is begun
                    transaction.cursor().putmulti(self._pending, append=True)
            except lmdb.MapFullError:
                environment.set_mapsize(2 * environment.info()["map_size"])
            else:
                self._pending.clear()
                self._bytes = 0


@contextlib.contextmanager
def new_database(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[DatabaseWriter]:
    """A writer for a new database folder, which gets its name when the block ends without an exception.

    Whatever happens before, nothing has that name, or what had it stays. The folder around it is made if need be.
    Raises NetError if there is something of that name (with `overwrite`: something other than an LMDB database), or
    if it cannot be written (the disk is full, say).
    """
    import lmdb

    target = Path(path)
    check_target(target, overwrite)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with _write_errors(target):
            temporary.mkdir(parents=True)
            environment = lmdb.open(str(temporary), map_size=_FIRST_MAP, lock=False, sync=False)
        with environment:
            writer = DatabaseWriter(environment, target)
            yield writer
            writer.commit()
            with _write_errors(target):
                environment.sync(True)
        with _write_errors(target):
            _rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Errors of disk and LMDB as NetError; of a full map as they are, they are no errors to anybody else."""
    import lmdb

    try:
        yield
    except lmdb.MapFullError:
        raise
    except (OSError, lmdb.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise NetError(f"the database {target} cannot be written: {reason}") from error


def check_target(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise NetError if a new database must not take this path."""
    target = Path(path)
    if not os.path.lexists(target):
        return
    if not overwrite:
        how = "overwrite it (overwrite=True; --overwrite on the command line)"
        raise NetError(f"{target} exists already: remove it, give another folder, or {how}")
    if target.is_symlink() or set(map(str, _names(target))) - {DATA_FILE, "lock.mdb"}:
        raise NetError(f"{target} is not just an LMDB database and is not overwritten: remove it by hand")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except NotADirectoryError:
        return [folder.name]


def _rename(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; one that has it gets out of the way first, and back if that fails."""
    old = temporary.with_name(temporary.name + ".old")
    replaced = target.exists()
    if replaced:
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
