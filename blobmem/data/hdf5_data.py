"""The HDF5Data layer: batches of rows of HDF5 files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from blobmem.data.datum import dims
from blobmem.data.hdf5 import Tables
from blobmem.data.options import place_of
from blobmem.data.order import Orders
from blobmem.data.source import Batched
from blobmem.errors import NetError
from blobmem.layers.base import WANTED, register_layer
from blobmem.memory.blob import Blob
from blobmem.proto.files import MAX_TEXT, read_bytes


@register_layer
class HDF5Data(Batched):
    """Rows of the datasets that have the tops' names, file by file in the order of a list.

    With shuffle the files come in another order in every epoch, and so do the rows within each; rows of different
    files are not mixed, as in Caffe. A batch goes on with the next file where one ends.
    """

    type = "HDF5Data"
    tops = (1, None)
    top_kinds = (WANTED,)
    divisible = False  # rows of one file are best read together

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if self.param.HasField("transform_param"):
            raise self.error("transform_param", "none: this layer gives numbers as they are stored", "one")
        options = self.param.hdf5_data_param
        self.shuffle: bool = options.shuffle
        self._orders = Orders(self.name)
        self._files: Tables | None = None
        self._idle: list[Tables] = []  # those with which no thread reads at the moment
        shapes = self._stated() or self._tables().shapes
        batch: int = options.batch_size
        self.start(batch, [(batch, *shape) for shape in shapes], prefetch=self.param.data_param.prefetch)

    def load(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        tables = self._tables()
        self._check_shapes(tables)
        with self._reader(tables) as reader:
            done, count = 0, len(arrays[0])
            while done < count:
                file, rows = self._rows(tables, position + done, seed, count - done)
                try:
                    reader.read(file, rows, [array[done : done + len(rows)] for array in arrays])
                except NetError as error:
                    raise NetError(f"{place_of(self, 'source')}: {error}") from None
                done += len(rows)

    @contextlib.contextmanager
    def _reader(self, tables: Tables) -> Iterator[Tables]:
        """The tables, for this thread alone."""
        # without a lock, which a forked process might inherit held: whichever is taken is one
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = tables.twin()
        try:
            yield reader
        finally:
            self._idle.append(reader)

    def _check_shapes(self, tables: Tables) -> None:
        """Raise NetError unless the rows have the shapes that were stated for them."""
        for name, shape, top_shape in zip(self.param.top, tables.shapes, self.top_shapes, strict=True):
            if shape != tuple(top_shape[1:]):
                stated = dims(top_shape[1:]) or "one number"
                raise self.error(f"input shape of '{name}'", f"{dims(shape) or 'one number'}, as in the files", stated)

    def _rows(self, tables: Tables, position: int, seed: int, most: int) -> tuple[int, np.ndarray]:
        """The file that a position falls in, and the rows from it on that a batch takes of this file."""
        files = np.arange(len(tables.rows))
        epoch, index = divmod(position, sum(tables.rows))
        if self.shuffle:
            files = self._orders.order(seed, epoch, len(files), "files")
        stops = np.cumsum(np.asarray(tables.rows)[files])
        place = int(np.searchsorted(stops, index, side="right"))
        file = int(files[place])
        length = tables.rows[file]
        first = index - (int(stops[place]) - length)
        last = min(length, first + most)
        if self.shuffle:
            return file, self._orders.order(seed, epoch, length, f"rows/{file}")[first:last]
        return file, np.arange(first, last)

    def _stated(self) -> list[tuple[int, ...]] | None:
        """The rows' shapes, if the first top's is stated; a top without a stated shape then has one number a row."""
        known = self.context.input_shapes
        if self.param.top[0] not in known:
            return None
        return [tuple(known.get(name, ())) for name in self.param.top]

    def _tables(self) -> Tables:
        """The files, looked at in first use. Raises NetError naming the layer."""
        if self._files is None:
            try:
                self._files = Tables(self._paths(), list(self.param.top))
            except NetError as error:
                raise NetError(f"{place_of(self, 'source')}: {error}") from None
        return self._files

    def _paths(self) -> list[str]:
        """The lines of the list. Raises NetError if it is none."""
        source: str = self.param.hdf5_data_param.source
        if not source:
            raise NetError("expected a file that lists HDF5 files, one a line; got nothing")
        data = read_bytes(source, MAX_TEXT)
        if data.startswith(b"\x89HDF\r\n"):
            raise NetError(f"{source} is an HDF5 file itself: name it in a text file, one a line, and give that")
        text = data.decode("utf-8-sig", "surrogateescape")
        paths = [line.strip() for line in text.splitlines() if line.strip()]
        if not paths:
            raise NetError(f"{source} names no file: expected names of HDF5 files, one a line")
        return paths
