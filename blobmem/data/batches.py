"""Whole batches of a database, by position, into given arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blobmem.data.database import Reader, Records, open_records
from blobmem.data.datum import Misfit, RecordError, Shape, dims, holds_bytes, parse, unpack, unusable
from blobmem.data.lmdb_tree import Item
from blobmem.data.source import Damaged
from blobmem.data.transform import Choice, Transformer, random_array, random_words
from blobmem.errors import NetError

_BLOCK = 2**16  # elements that are converted together: large enough for speed, small enough for a cache
_NO_CHOICE: Choice = (0, 0, 0, 0)


class NotBytes(Exception):
    """A record holds numbers that are no bytes."""


class BatchLoader:
    """Batches of transformed records; what they hold depends on position, seed and name alone.

    Args:
        path: the database's folder.
        transformer: what happens to each record.
        name: what random choices depend on, besides the seed: the layer's name.
        where: how errors begin.
        skip_damaged: in place of a damaged record comes the next good one, which then comes again in its own place.
            A record that is whole but does not fit the options or the batch is an error all the same.

    Any number of threads may use it at once. Raises NetError if the database cannot be opened.
    """

    def __init__(
        self, path: str, transformer: Transformer, name: str, where: str, *, skip_damaged: bool = False
    ) -> None:
        self.path = path
        self.transformer = transformer
        self._name = name
        self._where = where
        self._damaged = Damaged(where) if skip_damaged else None
        # those with which nobody reads at the moment, and the position that each has reached
        self._readers: list[tuple[int, Reader]] = []
        with self._reader(0, 0):
            pass  # what is wrong with the database shows now

    def __len__(self) -> int:
        """Number of records in the database."""
        with self._reader(0, 0) as reader:
            return len(reader)

    def shape(self, position: int) -> Shape:
        """The shape of the item at `position`. Raises NetError naming its record if that is bad."""
        return self.transformer.crop_of(self.record(position)[0])

    def record(self, position: int) -> tuple[Shape, bool]:
        """The shape of the record at `position`, and whether its values are bytes. Raises NetError as `shape` does."""
        with self._reader(position, 1) as reader:
            for run, (key, value) in enumerate(self._items(reader, position), 1):
                try:
                    datum = _datum(value)
                    shape, pixels = unpack(datum, self.transformer.color)
                    if self._damaged is not None:
                        pixels()  # `load` takes another record where this fails
                    self.transformer.output_shape(shape)
                    return shape, holds_bytes(datum)
                except RecordError as error:
                    self._leave_out(key, error, run, reader)
        raise AssertionError("a reader's records have no end")

    def load(
        self,
        position: int,
        seed: int,
        data: np.ndarray,
        labels: np.ndarray | None = None,
        cuts: np.ndarray | None = None,
    ) -> None:
        """Fill `data` (items, channels, height, width) and `labels` (items,) from the records at `position` on.

        With `cuts` (items, 3), `data` takes bytes as they are in the records, and `cuts` says what is to become of
        them (`Transformer.cut`). Raises NetError naming the record that is damaged or of another shape; `data` then
        holds the items before it. Raises NotBytes where bytes are wanted and a record has none.
        """
        count, item = len(data), data.shape[1:]
        block = max(1, _BLOCK * count // max(data.size, 1))
        transformer = self.transformer
        found: list[int] = []  # labels, one for each place that is filled
        with self._reader(position, count) as reader:
            if cuts is not None:
                placed = self._load_plain(reader, position, seed, data, cuts)
                if len(placed) == count:
                    if labels is not None:
                        labels[...] = placed
                    return
                found = placed.tolist()
            done = plain = len(found)
            choices = random_words(seed, self._name, position, count) if transformer.random and plain < count else None
            items = self._items(reader, position + plain) if plain < count else ()
            for number, (key, value) in enumerate(items, plain + 1):
                filled = len(found)
                try:
                    label, values = self._unpack(value, item)
                    if cuts is not None and values.dtype != np.uint8:
                        raise NotBytes
                except RecordError as error:
                    self._leave_out(key, error, number - filled, reader)
                    continue
                # one place, or several after records that were left out
                for place in range(filled, number if number < count else count):
                    choice = _NO_CHOICE if choices is None else choices[place]
                    if cuts is None:
                        transformer.place(values, data[place], choice)
                    else:
                        cuts[place] = transformer.cut(values, data[place], choice)
                    found.append(label)
                if len(found) - done >= block or len(found) == count:
                    if cuts is None:
                        transformer.finish(data[done : len(found)])
                    done = len(found)
                    if done == count:
                        break
        if labels is not None:
            labels[...] = found

    # ---------------------------------------------------------------- the parts

    def _load_plain(self, reader: Reader, position: int, seed: int, data: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        """Fill the first places of a batch of bytes, up to the first record that is not plain; the labels."""
        if not isinstance(reader, Records):
            return np.empty(0, np.int64)
        # imported late: `import blobmem` must not wait for the compiler
        from blobmem.data.plain import Placer

        random = self.transformer.random
        words = random_array(seed, self._name, position, len(data)) if random else np.empty((0, 4), np.uint64)
        placer = Placer(self.transformer, data, cuts, words)
        # what is wrong comes again, and is told, when the record is read by itself
        with contextlib.suppress(NetError):
            reader.place(position, placer)
        return placer.labels[: placer.done]

    @contextlib.contextmanager
    def _reader(self, position: int, count: int) -> Iterator[Reader]:
        """A reader that nobody else reads with, for so many records: the one that has least to skip."""
        readers = self._readers
        try:
            # without a lock, which a forked process might inherit held: whichever is taken is one
            _, reader = readers.pop(_nearest(readers, position))
        except IndexError:
            reader = self._open()
        try:
            yield reader
        finally:
            readers.append((position + count, reader))

    def _open(self) -> Reader:
        try:
            return open_records(self.path)
        except NetError as error:
            raise NetError(f"{self._where}: {error}") from None

    def _items(self, reader: Reader, position: int) -> Iterator[Item]:
        try:
            yield from reader.items(position)
        except NetError as error:
            raise NetError(f"{self._where}: {error}") from None

    def _unpack(self, value: bytes | RecordError, item: tuple[int, ...]) -> tuple[int, np.ndarray]:
        """Label and values of a record. Raises RecordError if it is damaged or makes another shape than `item`."""
        datum = _datum(value)
        shape, pixels = unpack(datum, self.transformer.color)
        values = pixels()  # first: what is damaged need not fit
        made = self.transformer.output_shape(shape)
        if made != item:
            raise Misfit(
                f"it makes an item of {dims(made)}, and the batch has {dims(item)}: only records of one shape fit "
                "into a batch of more than 1 (crop_size makes them so)"
            )
        return datum.label, values

    def _leave_out(self, key: bytes, error: RecordError, run: int, reader: Reader) -> None:
        """Warn that a record, the `run`-th in succession, is skipped. Raises NetError unless that was asked for."""
        what = f"record {key!r} of {self.path} cannot be used: {error}"
        if self._damaged is None or isinstance(error, Misfit):
            raise unusable(self._where, what, error) from None
        self._damaged.skip(key, what)
        if run >= len(reader):
            raise NetError(f"{self._where}: all {run} records of {self.path} are damaged; the last: {error}") from None


def _datum(value: bytes | RecordError) -> Any:
    if isinstance(value, RecordError):
        raise value
    return parse(value)


def _nearest(readers: Sequence[tuple[int, Reader]], position: int) -> int:
    """Which of these has least to skip: the furthest of those that come before `position`; without any, the last."""
    before = [(start, at) for at, (start, _) in enumerate(list(readers)) if start <= position]
    return max(before)[1] if before else -1
