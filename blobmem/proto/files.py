"""Whole files in and out: reads that say what to do when they fail, writes that happen entirely or not at all."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from blobmem.errors import NetError

MAX_BINARY = 2**31 - 1
"""Bytes that protobuf can hold in one message."""

MAX_TEXT = 64 * 2**20
"""Bytes of the largest text file that is read; the longest nets written by hand or by script are below 1 MiB."""

PathLike = str | os.PathLike[str]


def read_bytes(path: PathLike, limit: int) -> bytes:
    """The contents of a file, or of a pipe.

    NetError if it is missing (with the names that are near), cannot be read, or holds more than `limit` bytes.
    """
    data = None
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                limit = min(limit, MAX_TEXT)
                data = _read_stream(file, limit)
            elif status.st_size <= limit:
                data = file.read()
    except FileNotFoundError:
        raise NetError(_missing(Path(path))) from None
    except IsADirectoryError:
        raise NetError(f"{os.fspath(path)} is a folder: give a file in it") from None
    except (OSError, ValueError) as error:
        raise NetError(f"{os.fspath(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if data is None or len(data) > limit:
        raise NetError(
            f"{os.fspath(path)} is larger than {limit / 2**20:.0f} MiB, the most that is read of such a file: "
            f"is it the right one?"
        )
    return data


def digest_of(paths: Iterable[Path]) -> str:
    """The sha256 of files behind each other, by which what is made of these is named. OSError if one cannot be read."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_atomic(path: PathLike, data: bytes) -> None:
    """Makes `path` hold exactly `data`.

    Whatever happens meanwhile, a crash included, `path` is either what it was before or complete. NetError if the
    folder is missing or cannot be written to, or the disk is full.
    """
    target = os.path.realpath(path)  # a link stays a link: the file it leads to is replaced
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(folder)
    except OSError as error:
        if not os.path.isdir(folder):
            raise NetError(f"{os.fspath(path)} cannot be written: create the folder {folder} first") from None
        raise NetError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _read_stream(file: IO[bytes], limit: int) -> bytes:
    """Up to a little more than `limit` bytes of something without a size; an endless one must not fill the memory."""
    parts: list[bytes] = []
    total = 0
    while total <= limit:
        part = file.read(2**20)
        if not part:
            break
        parts.append(part)
        total += len(part)
    return b"".join(parts)


def _sync_folder(folder: str) -> None:
    """Makes the new name as lasting as the file; a system that cannot sync folders (Windows) does it by itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _missing(path: Path) -> str:
    said = f"there is no file {path}"
    folder = path.parent
    if not folder.is_dir():
        return f"{said}, nor a folder {folder}; relative paths start at {Path.cwd()}"
    near = difflib.get_close_matches(path.name, os.listdir(folder), n=1)
    if near:
        return f"{said}; did you mean {folder / near[0]}?"
    return said if path.is_absolute() else f"{said}; relative paths start at {Path.cwd()}"
