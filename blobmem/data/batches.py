"""Whole batches of a database, by position, into given arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from blobmem.data.database import Records
from blobmem.data.datum import RecordError, Shape, dims, parse, unpack
from blobmem.data.transform import Choice, Transformer, random_words
from blobmem.errors import NetError

_BLOCK = 2**16  # elements that are converted together: large enough for speed, small enough for a cache


class BatchLoader:
    """Batches of transformed records; what they hold depends on position, seed and name alone.

    Args:
        path: the database's folder.
        transformer: what happens to each record.
        name: what random choices depend on, besides the seed: the layer's name.
        where: how errors begin.

    Any thread may use it, one at a time. Raises NetError if the database cannot be opened.
    """

    def __init__(self, path: str, transformer: Transformer, name: str, where: str) -> None:
        self.transformer = transformer
        self._name = name
        self._where = where
        self._lock = threading.Lock()
        try:
            self._records = Records(path)
        except NetError as error:
            raise NetError(f"{where}: {error}") from None

    def __len__(self) -> int:
        """Number of records in the database."""
        return len(self._records)

    def shape(self, position: int) -> Shape:
        """The shape of the item that the record at `position` makes. Raises NetError naming the record if it is bad."""
        with self._lock:
            for key, value in self._read(position, 1):
                try:
                    return self.transformer.output_shape(unpack(parse(value), self.transformer.color)[0])
                except RecordError as error:
                    raise self._error(key, error) from None
        raise AssertionError("a database that opens has a record")

    def load(self, position: int, seed: int, data: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Fill `data` (items, channels, height, width) and `labels` (items,) from the records at `position` on.

        Raises NetError naming the record that is damaged or of another shape; the arrays then hold the items before it.
        """
        transformer = self.transformer
        count = len(data)
        block = max(1, _BLOCK * count // max(data.size, 1))
        with self._lock:
            choices = self._choices(seed, position, count)
            done = 0
            for index, (key, value) in enumerate(self._read(position, count)):
                try:
                    label = self._place(value, data[index], choices[index] if choices else (0, 0, 0, 0))
                except RecordError as error:
                    raise self._error(key, error) from None
                if labels is not None:
                    labels[index] = label
                if index + 1 - done == block:
                    transformer.finish(data[done : index + 1])
                    done = index + 1
            transformer.finish(data[done:])

    def _read(self, position: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from self._records.read(position, count)
        except NetError as error:
            raise NetError(f"{self._where}: {error}") from None

    def _place(self, value: bytes, out: np.ndarray, choice: Choice) -> int:
        datum = parse(value)
        shape, pixels = unpack(datum, self.transformer.color)
        made = self.transformer.output_shape(shape)
        if made != out.shape:
            raise RecordError(
                f"it makes an item of {dims(made)}, and the batch has {dims(out.shape)}: only records of one shape "
                "fit into a batch of more than 1 (crop_size makes them so)"
            )
        self.transformer.place(pixels(), out, choice)
        return datum.label

    def _choices(self, seed: int, position: int, count: int) -> Sequence[Choice]:
        return random_words(seed, self._name, position, count) if self.transformer.random else ()

    def _error(self, key: bytes, error: RecordError) -> NetError:
        return NetError(f"{self._where}: record {key!r} of {self._records.path} cannot be used: {error}")
