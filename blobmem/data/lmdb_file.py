"""The file of an LMDB database, read as a file, page by page; `lmdb_tree` walks over them.

LMDB itself reads through a map of the file and trusts what it finds there: a file that is cut short, or a flipped bit
in an offset, ends the process. Here all is read with file reads and checked before it is used, so that damage is an
error; only flipped bits in a key or a value cannot show, as LMDB keeps no checksums. Nothing is shared with other
readers, no lock is taken and nothing is written: databases on read-only disks work, in any number of threads and
processes.

The format is LMDB's data version 1, with the word size and byte order of 64-bit little-endian machines:

    page      u64 number, u16 -, u16 flags, u16 lower, u16 upper; lower ends the array of u16 offsets that begins
              at 16, one for each node. In an overflow page a u32 at 12 counts the pages of its run.
    node      u16 low, u16 high, u16 flags, u16 key size, key; in leaves then the value, whose size is low | high << 16,
              or, where flags has BIG, the u64 number of the overflow page after whose header the value lies. In
              branches low | high << 16 | flags << 32 is the number of a child.
    pages 0, 1  two versions of the meta data: at 16 u32 magic, u32 version, u64 -, u64 -, two trees of 48 bytes
              (u32 page size [of the first], u16 flags, u16 depth, u64 branches, u64 leaves, u64 overflow pages,
              u64 entries, u64 root), u64 last page, u64 transaction; the later transaction counts.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobmem.data.datum import RecordError
from blobmem.errors import NetError

DATA_FILE = "data.mdb"
"""The file that makes a folder an LMDB database."""

_MAGIC = 0xBEEFC0DE
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8

HEADER = struct.Struct("<QHHHH")
_RUN = struct.Struct("<QHHI")
_META_DATA = struct.Struct("<II16x I44x 4xHH24xQQ QQ")
_META_BYTES = HEADER.size + _META_DATA.size
_DEPTH_LIMIT = 32  # LMDB's own
_LEAST_RECORD = 10  # bytes: an offset and a node
_DUPLICATES = 4

_HAS_PREAD = hasattr(os, "pread")
_AHEAD_BYTES = 2**21  # read together, at most, where the next leaves lie near each other, as with small records
_FASTER = 8  # times as much is read each time
_NEAR = 3  # times as many pages as there are leaves among them: writers fill gaps that older pages have left


@dataclass(frozen=True, slots=True)
class _Meta:
    page_size: int
    flags: int
    depth: int
    entries: int
    root: int
    last_page: int
    transaction: int


class LmdbFile:
    """An LMDB database's file, open for reading by one thread at a time.

    Attributes:
        entries: number of records.
        root, depth: the main tree's first page and number of levels.
        page_size: bytes of a page.
        most_together: pages that are read together at most.

    Raises NetError unless the folder holds a database that is whole.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        path = os.path.join(folder, DATA_FILE)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError):
            raise NetError(f"{folder} is no LMDB database: there is no {path}") from None
        except OSError as error:
            raise NetError(f"{folder} cannot be opened as an LMDB database: {error}") from None
        weakref.finalize(self, self._file.close).atexit = False
        meta = self._read_meta()
        self.page_size = meta.page_size
        self.most_together = max(1, _AHEAD_BYTES // meta.page_size)
        self._last_page = meta.last_page
        self.root, self.depth = meta.root, meta.depth
        self.entries = meta.entries
        self._window = b""  # pages read together, from _window_page on
        self._window_page = 0

    def damaged(self, what: str) -> NetError:
        """The error that says so."""
        return NetError(f"{self.folder} is damaged: {what}; copy or create it again")

    # ---------------------------------------------------------------- meta data

    def _read_meta(self) -> _Meta:
        size = os.fstat(self._file.fileno()).st_size
        if not size:
            raise NetError(f"{self.folder} is no LMDB database: its {DATA_FILE} is empty")
        first = self._meta_at(0)
        second = self._meta_at(first.page_size)
        meta = second if second.transaction > first.transaction else first
        expected = (meta.last_page + 1) * meta.page_size
        if size < expected:
            raise NetError(
                f"{self.folder} is cut short: {DATA_FILE} has {size} bytes of {expected}; copy or create it again "
                "(if it was ever whole, `mdb_copy -c` can repair it)"
            )
        if meta.flags & _DUPLICATES:
            raise NetError(f"{self.folder} has several values for one key (DUPSORT): copy it into a database without")
        if meta.entries and not 0 < meta.depth <= _DEPTH_LIMIT:
            raise self.damaged(f"its tree has {meta.depth} levels")
        if meta.entries * _LEAST_RECORD > size:
            raise self.damaged(f"there is no place for {meta.entries} records in its {size} bytes")
        return meta

    def _meta_at(self, offset: int) -> _Meta:
        raw = self._read_at(offset, _META_BYTES)
        no_database = f"{self.folder} cannot be opened as an LMDB database: "
        if len(raw) < _META_BYTES:
            raise NetError(f"{no_database}{DATA_FILE} ends within its header")
        magic, version, page_size, flags, depth, entries, root, last, transaction = _META_DATA.unpack_from(
            raw, HEADER.size
        )
        if magic != _MAGIC:
            swapped = _MAGIC.to_bytes(4, "big"), _MAGIC.to_bytes(4, "little")
            if any(mark in raw[:24] for mark in swapped):
                raise NetError(
                    f"{no_database}it was made on another kind of machine (32 bits, or another byte order); copy it "
                    "with mdb_dump there and mdb_load here"
                )
            raise NetError(f"{no_database}{DATA_FILE} has not the header of one")
        if version != 1:
            raise NetError(f"{no_database}its format has version {version}, not 1")
        if not 256 <= page_size <= 65536 or page_size & (page_size - 1) or not HEADER.unpack_from(raw)[2] & META:
            raise NetError(f"{no_database}its header is damaged")
        return _Meta(page_size, flags, depth, entries, root, last, transaction)

    # ---------------------------------------------------------------- pages

    def _read_at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on; fewer only at the end of the file."""
        try:
            data = _read_at(self._file, offset, count)
            while len(data) < count:
                more = _read_at(self._file, offset + len(data), count - len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise NetError(f"{self.folder} cannot be read: {error}") from None
        return data

    @property
    def window(self) -> tuple[bytes, int, int]:
        """The leaves that were read last, unchecked: their bytes, the size of each, and the first one's number."""
        return self._window, self.page_size, self._window_page

    def has(self, number: int) -> bool:
        """Whether that page is among those that were read last."""
        return 0 <= number - self._window_page < len(self._window) // self.page_size

    def page(self, number: int, kind: int, ahead: Sequence[int] | np.ndarray = ()) -> bytes:
        """A page of that kind, BRANCH or LEAF, with its number, kind and the bounds of its offsets checked.

        A leaf is read together with those that come next, `ahead`.
        """
        if number > self._last_page:
            raise self.damaged(f"it refers to page {number} of {self._last_page + 1}")
        size = self.page_size
        read = self.has(number)
        if kind == BRANCH and not read:  # apart: the leaves that were read together stay
            page = self._read_pages(number, 1)
        else:
            if not read:
                self._read_ahead(number, ahead)
            index = number - self._window_page
            page = self._window[index * size : (index + 1) * size]
        found, _, flags, lower, upper = HEADER.unpack_from(page)
        if found != number or flags & (BRANCH | LEAF | OVERFLOW | META) != kind:
            raise self.damaged(f"page {number} is not what it should be")
        if not HEADER.size <= lower <= upper <= size or lower % 2:
            raise self.damaged(f"the header of page {number} is wrong")
        return page

    def _read_ahead(self, number: int, ahead: Sequence[int] | np.ndarray) -> None:
        """Read a leaf, and those of the next ones that lie near it: the more, the more have been read."""
        most = min(max(1, _FASTER * len(self._window) // self.page_size), self.most_together)
        numbers = np.array([number, *ahead[:most]], np.int64)
        first, last = np.minimum.accumulate(numbers), np.maximum.accumulate(numbers)
        pages = last - first + 1
        near = pages <= np.minimum(_NEAR * np.arange(1, len(numbers) + 1), most)
        end = int(np.flatnonzero(near & (last <= self._last_page))[-1])
        self._window = b""  # not the old pages and the new ones at once
        self._window_page = int(first[end])
        self._window = self._read_pages(self._window_page, int(pages[end]), number)

    def _read_pages(self, first: int, count: int, wanted: int | None = None) -> bytes:
        """So many pages, or if the file ends too soon as many as there are, the `wanted` one (the first) among them."""
        pages = self._read_at(first * self.page_size, count * self.page_size)
        wanted = first if wanted is None else wanted
        if len(pages) < (wanted - first + 1) * self.page_size:
            raise self.damaged(f"it has been cut short since it was opened, before page {wanted}")
        return pages

    def overflow(self, number: int, size: int) -> bytes:
        """The value of `size` bytes in the run of pages that begins with `number`. Raises RecordError."""
        wanted = _RUN.size + size
        pages = -(-wanted // self.page_size)
        if number + pages > self._last_page + 1:
            raise RecordError(f"its value of {size} bytes lies beyond the database's end: the database is damaged")
        raw = self._read_at(number * self.page_size, wanted)
        if len(raw) < wanted:
            raise self.damaged(f"it has been cut short since it was opened, within page {number}")
        found, _, flags, run = _RUN.unpack_from(raw)
        if found != number or not flags & OVERFLOW or run < pages:
            raise RecordError(f"page {number}, where its value should be, is another one: the database is damaged")
        return raw[_RUN.size :]


def _read_at(file: Any, offset: int, count: int) -> bytes:
    if _HAS_PREAD:  # no shared file position: a forked process reads on through the same file
        return os.pread(file.fileno(), count, offset)
    file.seek(offset)
    return bytes(file.read(count))
