"""Plain records in LMDB's leaf pages to batches of bytes, compiled: `BatchLoader` for records as they should be.

With Python for every record or page, threads that make batches of small images would take the interpreter from the pass
that they work for. Whatever is not plain (a compressed image, floats, another shape, damage) is left to Python.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blobmem.data.transform import Transformer
from blobmem.ops.host.compiled import kernel, part

_HEADER, _LOWER, _NODE, _LONGEST_KEY = 16, 12, 8, 511  # of LMDB's pages and nodes, in bytes
_LEAF, _KINDS = 2, 15  # among a page's flags: BRANCH, LEAF, OVERFLOW and META are its kind


@part
def _number(raw, at, size):  # type: ignore[no-untyped-def]
    """The number of `size` bytes at `at`, the lowest first; of 8 bytes it may come out negative."""
    value = np.int64(0)
    for byte in range(size):
        value |= np.int64(raw[at + byte]) << (8 * byte)
    return value


@part
def _records_in(page, number):  # type: ignore[no-untyped-def]
    """How many records a leaf page has; 0 where it is not that page, or its header is wrong (`LmdbFile.page`)."""
    lower, upper = _number(page, _LOWER, 2), _number(page, _LOWER + 2, 2)
    if _number(page, 0, 8) != number or _number(page, 10, 2) & _KINDS != _LEAF:
        return 0
    if not _HEADER <= lower <= upper <= len(page) or lower % 2:
        return 0
    return (lower - _HEADER) // 2


@part
def _value(page, record):  # type: ignore[no-untyped-def]
    """Where the value of a leaf page's record begins and ends; -1 where it lies elsewhere, or the node is wrong."""
    node = _number(page, _HEADER + 2 * record, 2)
    if node + _NODE > len(page):
        return -1, -1
    size, key_size = _number(page, node, 4), _number(page, node + 6, 2)
    start = node + _NODE + key_size
    if _number(page, node + 4, 2) or key_size > _LONGEST_KEY or start + size > len(page):
        return -1, -1
    return start, start + size


@part
def _varint(raw, at, stop):  # type: ignore[no-untyped-def]
    """A number of protobuf's encoding at `at`, and where it ends; -1 there if it does not end before `stop`."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < stop and shift < 70:
        byte = np.uint64(raw[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        if byte < 128:
            return value, at
        shift += np.uint64(7)
    return value, -1


@part
def _parse(raw, at, stop, fields):  # type: ignore[no-untyped-def]
    """Channels, height, width, label, and the data's place and size of a Datum of bytes; False if it is another one."""
    fields[:] = 0
    while at < stop:
        tag = raw[at]
        value, at = _varint(raw, at + 1, stop)
        if at < 0:
            return False
        if tag == 0x22:  # data
            if value > np.uint64(stop - at):
                return False
            fields[4], fields[5] = at, np.int64(value)
            at += np.int64(value)
        elif tag == 0x08 or tag == 0x10 or tag == 0x18:  # channels, height, width
            if value > np.uint64(0xFFFF):
                return False
            fields[tag // 8 - 1] = np.int64(value)
        elif tag == 0x28:  # label
            fields[3] = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))
        elif tag != 0x38 or value != 0:  # encoded is no
            return False
    return at == stop and fields[5] > 0 and fields[5] == fields[0] * fields[1] * fields[2]


@part
def _place(raw, start, stop, place, fields, batch):  # type: ignore[no-untyped-def]
    """Put the Datum at [start, stop) into a place of the batch; False, and nothing is done, where it is not plain."""
    data, shape, labels, cuts, words, crop, random_crop, mirror, mean = batch
    channels, rows, columns = shape
    if place >= len(data) or not _parse(raw, start, stop, fields):
        return False
    height, width = fields[1], fields[2]
    if fields[0] != channels or height < rows or width < columns:
        return False
    if not crop and (height != rows or width != columns):
        return False
    if len(mean) and (channels != mean[0] or height != mean[1] or width != mean[2]):
        return False
    top, left = (height - rows) // 2, (width - columns) // 2
    if crop and random_crop:
        top = np.int64(words[place, 1] % np.uint64(height - rows + 1))
        left = np.int64(words[place, 2] % np.uint64(width - columns + 1))
    lines, run = (rows, columns) if width > columns else (1, rows * columns)  # that lie together in both
    for c in range(channels):
        for y in range(lines):
            source, target = fields[4] + (c * height + top + y) * width + left, (c * rows + y) * columns
            line, out = raw[source : source + run], data[place, target : target + run]
            for x in range(run):
                out[x] = line[x]
    cuts[place, 0], cuts[place, 1], cuts[place, 2] = top, left, 0
    if mirror:
        cuts[place, 2] = np.int32(words[place, 0] & np.uint64(1))
    labels[place] = fields[3]
    return True


@kernel
def _place_value(raw, done, batch):  # type: ignore[no-untyped-def]
    return _place(raw, 0, len(raw), done, np.zeros(6, np.int64), batch)


@kernel
def _place_leaves(block, size, first, numbers, start, most, done, batch):  # type: ignore[no-untyped-def]
    """See Placer.place_leaves."""
    fields = np.zeros(6, np.int64)
    taken, leaf, before, count = 0, 0, 0, 0
    for n in range(len(numbers)):
        at = numbers[n] - first
        if at < 0 or at >= len(block) // size:
            break
        page = block[at * size : (at + 1) * size]
        records = _records_in(page, numbers[n])
        if records <= start or before + count + records > most:
            break
        record = start
        while record < records:
            begin, end = _value(page, record)
            if begin < 0 or not _place(page, begin, end, done + taken, fields, batch):
                break
            record += 1
            taken += 1
        if record > start:
            leaf, before, count = n, before + count, records
        if record < records:
            break
        start = 0
    return taken, leaf, before


@kernel
def _skip_leaves(block, size, first, numbers, most):  # type: ignore[no-untyped-def]
    """See Placer.skip_leaves."""
    skipped, before, count = 0, 0, 0
    for n in range(len(numbers)):
        at = numbers[n] - first
        if at < 0 or at >= len(block) // size:
            break
        records = _records_in(block[at * size : (at + 1) * size], numbers[n])
        if records < 1 or before + count + records > most:
            break
        skipped, before, count = n + 1, before + count, records
    return skipped, before


class Swept(NamedTuple):
    """What `Placer.place_leaves` has come to.

    Attributes:
        taken: values that were placed.
        leaf: which of the leaves the last of them was in; 0 if there is none.
        before: records of the leaves before that one.
    """

    taken: int
    leaf: int
    before: int


class Placer:
    """Puts plain records into one batch of bytes, one after the other.

    Args:
        transformer: says which part of each.
        data, cuts: as for `BatchLoader.load`.
        words: the items' random numbers (items, 4), if they have any.

    Attributes:
        done: items that are filled, from the first on.
        labels: the items' labels, int64.
    """

    def __init__(self, transformer: Transformer, data: np.ndarray, cuts: np.ndarray, words: np.ndarray) -> None:
        mean = transformer.mean_image()
        record = np.array(() if mean is None else mean.shape, np.int64)
        self.done = 0
        self.labels = np.zeros(len(data), np.int64)
        items = data.reshape(len(data), -1), data.shape[1:], self.labels, cuts, words
        self._batch = *items, transformer.crop > 0, transformer.random_crop, transformer.mirror, record

    @property
    def full(self) -> bool:
        """Whether there is no place for more."""
        return self.done == len(self.labels)

    def place(self, value: bytes) -> bool:
        """Fill the next item with a Datum message; False, and nothing is done, where it is not plain."""
        placed = bool(_place_value(np.frombuffer(value, np.uint8), self.done, self._batch))
        self.done += placed
        return placed

    def place_leaves(
        self, block: bytes, page_size: int, first: int, numbers: np.ndarray, start: int, most: int
    ) -> Swept:
        """Fill the next items with the values of leaf pages, up to the first that is not plain and on its page.

        Args:
            block: pages of the file, from page `first` on.
            numbers: of the leaves, in their order, int64; the first one that is not in the block, or not as it should
                be, ends this, too.
            start: the record of the first leaf to begin with.
            most: records that the leaves may have.
        """
        pages = np.frombuffer(block, np.uint8)
        swept = Swept(*_place_leaves(pages, page_size, first, numbers, start, most, self.done, self._batch))
        self.done += swept.taken
        return swept

    @staticmethod
    def skip_leaves(block: bytes, page_size: int, first: int, numbers: np.ndarray, most: int) -> tuple[int, int]:
        """How many leaves have no more than so many records together, and the records of all but the last of them.

        The arguments are as for `place_leaves`.
        """
        skipped, before = _skip_leaves(np.frombuffer(block, np.uint8), page_size, first, numbers, most)
        return skipped, before
