"""Tables in text (CSV) to databases or HDF5 files."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np

from blobmem.data.convert import Converted, Progress
from blobmem.data.hdf5_write import check_new_file, new_file
from blobmem.data.writer import check_target, new_database
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

HDF5_SUFFIXES = (".h5", ".hdf5")
"""Names that end so are HDF5 files, others are databases."""

_BLOCK = 4096  # rows that are converted together
_LARGEST = float(np.finfo(np.float32).max)

Line = tuple[int, list[str]]
"""The number of the line on which a row ends, and the row's cells."""

Put = Callable[[int, np.ndarray, np.ndarray | None], None]
"""put(start, data, labels): write rows from row `start` on."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    label: str | None = None,
    header: bool | None = None,
    separator: str = ",",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Make an LMDB database, or an HDF5 file where `target` ends in .h5, of the numbers in a table.

    A database has records of columns x 1 x 1 values in single precision and a label, keyed by the row's number in eight
    digits; a file has the datasets "data" (rows, columns) and, with a label column, "label" (rows,). What is made
    appears when it is complete. The table is read in pieces; its size does not matter.

    Args:
        label: the column of labels: its name in the header, or its number from 1 (from -1 backwards, the last). Labels
            in a database are whole numbers; without a column they are 0.
        header: whether the first row has names; None: if something in it is no number.
        separator: what stands between cells, one character.
        progress: called with the bytes read, and those in all.

    Raises NetError naming the line of a cell that is no finite number or of a row of another length, or if what is to
    be made exists (and not `overwrite`) or cannot be written.
    """
    path = Path(target)
    is_file = path.suffix.lower() in HDF5_SUFFIXES
    (check_new_file if is_file else check_target)(path, overwrite)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(source, "rb"))
        except OSError as error:
            raise NetError(f"{os.fspath(source)} cannot be read: {error.strerror or error}") from None
        size = os.fstat(file.fileno()).st_size
        table = _Table(os.fspath(source), file, separator, header, label, whole_labels=not is_file)
        put = _to_file(stack, path, overwrite) if is_file else _to_database(stack, path, overwrite)
        count = 0
        for data, labels in table:
            put(count, data, labels)
            count += len(data)
            if progress is not None:
                progress(file.tell(), size)
    return Converted.of(path, count)


def _to_file(stack: ExitStack, path: Path, overwrite: bool) -> Put:
    rows = stack.enter_context(new_file(path, overwrite=overwrite))

    def put(start: int, data: np.ndarray, labels: np.ndarray | None) -> None:
        rows.put(start, {"data": data} if labels is None else {"data": data, "label": labels.astype(np.float32)})

    return put


def _to_database(stack: ExitStack, path: Path, overwrite: bool) -> Put:
    writer = stack.enter_context(new_database(path, overwrite=overwrite))

    def put(start: int, data: np.ndarray, labels: np.ndarray | None) -> None:
        whole = np.zeros(len(data), np.int64) if labels is None else labels.astype(np.int64)
        for number, (row, label) in enumerate(zip(data.tolist(), whole.tolist(), strict=True), start):
            datum = caffe_pb2.Datum(channels=len(row), height=1, width=1, float_data=row, label=label)
            writer.put(b"%08d" % number, datum.SerializeToString())

    return put


class _Table:
    """The numbers of a table, in pieces: float32 (rows, columns), and float64 labels (rows,) where there is a column.

    Args as for `convert`; with `whole_labels`, labels have to be whole numbers below 2^31.
    """

    def __init__(
        self, path: str, file: IO[bytes], separator: str, header: bool | None, label: str | None, whole_labels: bool
    ) -> None:
        self._path = path
        self._whole_labels = whole_labels
        self._lines = self._read(file, separator)
        first = next(self._lines, None)
        if first is None:
            raise NetError(f"{path} has no rows")
        names = first[1] if header or (header is None and not all(map(_is_number, first[1]))) else []
        if not names:
            self._lines = chain([first], self._lines)
        self._columns = len(first[1])
        self._names = [name.strip() for name in names]
        self._label = None if label is None else self._column(label)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        empty = True
        while lines := list(islice(self._lines, _BLOCK)):
            empty = False
            values = self._values(lines)
            if self._label is None:
                yield values.astype(np.float32), None
            else:
                labels = values[:, self._label]
                self._check_labels(lines, labels)
                yield np.delete(values, self._label, axis=1).astype(np.float32), labels
        if empty:
            raise NetError(f"{self._path} has no rows below its header")

    def _read(self, file: IO[bytes], separator: str) -> Iterator[Line]:
        reader = csv.reader((line.decode("utf-8-sig", "replace") for line in file), delimiter=separator)
        try:
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
        except csv.Error as error:
            raise NetError(f"{self._path}:{reader.line_num}: this is no table: {error}") from None

    def _column(self, label: str) -> int:
        """The position of the column of labels. Raises NetError if there is none of that name or number."""
        if self._names.count(label) == 1:
            return self._names.index(label)
        number = int(label) if label.removeprefix("-").isdecimal() else 0
        if not 1 <= abs(number) <= self._columns or self._columns == 1:
            names = f": {', '.join(self._names)}" if self._names else ""
            raise NetError(f"{self._path} has no label column '{label}' beside others; it has {self._columns}{names}")
        return number - 1 if number > 0 else self._columns + number

    def _values(self, lines: list[Line]) -> np.ndarray:
        """The numbers of some rows, float64. Raises NetError naming the line that has something else."""
        try:
            values = np.array([row for _, row in lines], dtype=np.float64)
            if values.shape == (len(lines), self._columns) and np.abs(values).max(initial=0) <= _LARGEST:
                return values
        except ValueError:
            pass
        for number, row in lines:
            if len(row) != self._columns:
                raise NetError(f"{self._path}:{number}: expected {self._columns} cells as above, got {len(row)}")
            for column, cell in enumerate(row, 1):
                if not _is_number(cell):
                    name = f" ({self._names[column - 1]})" if self._names else ""
                    hint = "; classes need numbers, the same ones in all tables" if column - 1 == self._label else ""
                    raise NetError(f"{self._path}:{number}: column {column}{name}: {cell[:40]!r} is no number{hint}")
        raise AssertionError("numbers that are refused together are refused one by one")

    def _check_labels(self, lines: list[Line], labels: np.ndarray) -> None:
        wrong = (labels != np.trunc(labels)) | (np.abs(labels) >= 2**31)
        if self._whole_labels and wrong.any():
            at = int(wrong.argmax())
            where = f"{self._path}:{lines[at][0]}"
            raise NetError(f"{where}: a label in a database is a whole number, got {labels[at]:g} (HDF5 takes any)")


def _is_number(cell: str) -> bool:
    """Whether a cell is a number that single precision has."""
    try:
        return abs(float(cell)) <= _LARGEST
    except ValueError:
        return False
