"""Runs of plain records to batches of bytes, compiled: what `BatchLoader` does for records that are as they should be.

With Python for every record, threads that make batches of small images would take the interpreter from the pass that
they work for. Whatever is not plain (a compressed image, floats, another shape, damage) is left to Python.
"""

from __future__ import annotations

import numpy as np

from blobmem.data.transform import Transformer
from blobmem.ops.host.compiled import kernel, part

_HEADER, _LOWER, _NODE, _LONGEST_KEY = 16, 12, 8, 511  # of LMDB's pages and nodes, in bytes


@kernel
def plain_values(page, start, values):  # type: ignore[no-untyped-def]
    """Where values begin and end in a leaf page of LMDB, from its record `start` on, up to the first that is elsewhere.

    The page's bounds of offsets are right. Returns the number of values.
    """
    for n in range(len(values)):
        at = _HEADER + 2 * (start + n)
        node = np.int64(page[at]) | np.int64(page[at + 1]) << 8
        if node + _NODE > len(page):
            return n
        size = np.int64(0)
        for byte in range(4):
            size |= np.int64(page[node + byte]) << (8 * byte)
        flags = page[node + 4] | page[node + 5]
        key_size = np.int64(page[node + 6]) | np.int64(page[node + 7]) << 8
        value = node + _NODE + key_size
        if flags or key_size > _LONGEST_KEY or value + size > len(page):
            return n
        values[n, 0] = value
        values[n, 1] = value + size
    return len(values)


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


@kernel
def _place(raw, values, first, data, labels, cuts, words, crop, random_crop, mirror, mean):  # type: ignore[no-untyped-def]
    _, channels, rows, columns = data.shape
    fields = np.zeros(6, np.int64)
    for n in range(len(values)):
        place = first + n
        if place == len(data) or not _parse(raw, values[n, 0], values[n, 1], fields):
            return n
        height, width = fields[1], fields[2]
        if fields[0] != channels or height < rows or width < columns:
            return n
        if not crop and (height != rows or width != columns):
            return n
        if len(mean) and (channels != mean[0] or height != mean[1] or width != mean[2]):
            return n
        top, left = (height - rows) // 2, (width - columns) // 2
        if crop and random_crop:
            top = np.int64(words[place, 1] % np.uint64(height - rows + 1))
            left = np.int64(words[place, 2] % np.uint64(width - columns + 1))
        for c in range(channels):
            for y in range(rows):
                source = fields[4] + (c * height + top + y) * width + left
                row, out = raw[source : source + columns], data[place, c, y]
                for x in range(columns):
                    out[x] = row[x]
        cuts[place, 0], cuts[place, 1], cuts[place, 2] = top, left, 0
        if mirror:
            cuts[place, 2] = np.int32(words[place, 0] & np.uint64(1))
        labels[place] = fields[3]
    return len(values)


class Placer:
    """Puts plain records into one batch of bytes.

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
        shape = np.array(() if mean is None else mean.shape, np.int64)
        self.done = 0
        self.labels = np.zeros(len(data), np.int64)
        options = transformer.crop > 0, transformer.random_crop, transformer.mirror
        self._arguments = data, self.labels, cuts, words, *options, shape

    def place(self, raw: np.ndarray, values: np.ndarray) -> bool:
        """Fill the next items with the Datum messages at `values` (n, 2) in `raw`; whether there is place for more.

        Ends, and there is none, before the first that is not plain.
        """
        placed = _place(raw, values, self.done, *self._arguments)
        self.done += placed
        return bool(placed == len(values) and self.done < len(self.labels))
