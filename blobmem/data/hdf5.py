"""HDF5 files as tables: datasets of one length, whose first axis counts rows. `hdf5_write` makes them.

Only the rows asked for are read. A dataset in chunks (a compressed one, say) gives a whole chunk for any row of it, so
the chunks last used are kept, up to 64 MiB a dataset: random rows of a compressed file larger than that are slow.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.data.datum import dims
from blobmem.errors import NetError

_CHUNK_CACHE = 64 * 2**20  # bytes a dataset
_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)  # h5py's, for damaged files
_CHUNK_SLOTS = 10_007  # places in its hash table: a prime, far more than chunks


class Tables:
    """The rows of several HDF5 files that have datasets of the same names and shapes.

    Args:
        paths: the files.
        names: the datasets, of whole or floating-point numbers.

    Attributes:
        rows: number of rows in each file.
        shapes: shape of a row in each dataset.

    One thread at a time may use it, and others a `twin`. One file is open at a time; a process forked from this one
    opens it for itself.
    Raises NetError naming the file, and the dataset that it lacks or that differs from the first file's.
    """

    def __init__(self, paths: Sequence[str], names: Sequence[str]) -> None:
        self.paths = list(paths)
        self.names = list(names)
        self.rows: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self._open: tuple[int, int] | None = None  # index of the file, process
        self._file: Any = None
        self._datasets: list[Any] = []
        for index in range(len(self.paths)):
            self._use(index)
            self._examine(index)
        if not sum(self.rows):
            raise NetError(f"{', '.join(self.paths[:3])}: no rows in any file")

    def twin(self) -> Tables:
        """The same tables, to be read by another thread."""
        result = copy.copy(self)
        result._open, result._file, result._datasets = None, None, []
        return result

    def read(self, index: int, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Fill `out`, an array (rows, ...) for each dataset, with the rows of file `index`, in any order.

        Numbers are converted to the arrays' types. Raises NetError if the file is damaged or gone.
        """
        self._use(index)
        # a file gives ascending rows only
        order = np.argsort(rows, kind="stable")
        ascending = np.asarray(rows)[order]
        in_order = bool(np.all(order[1:] > order[:-1]))
        for name, dataset, values in zip(self.names, self._datasets, out, strict=True):
            try:
                if in_order:
                    _read(dataset, ascending, values)
                else:
                    sorted_values = np.empty_like(values)
                    _read(dataset, ascending, sorted_values)
                    values[order] = sorted_values
            except _FAILURES as error:
                raise NetError(f"{self.paths[index]} is damaged, dataset '{name}': {reason_of(error)}") from None

    def _use(self, index: int) -> None:
        """Have file `index` open, and no other."""
        if self._open == (index, os.getpid()):
            return
        self._open, self._file, self._datasets = None, None, []
        path = self.paths[index]
        self._file = open_file(path)
        self._datasets = [_dataset(self._file, path, name) for name in self.names]
        self._open = (index, os.getpid())

    def _examine(self, index: int) -> None:
        """Take down how many rows a file has. Raises NetError if it is not like those before it."""
        path = self.paths[index]
        lengths = {name: dataset.shape[0] for name, dataset in zip(self.names, self._datasets, strict=True)}
        rows = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise NetError(f"{path}: the datasets differ in their number of rows: {found}")
        shapes = [tuple(dataset.shape[1:]) for dataset in self._datasets]
        if not self.rows:
            self.shapes = shapes
        for name, shape, first in zip(self.names, shapes, self.shapes, strict=True):
            if shape != first:
                raise NetError(
                    f"{path}: a row of '{name}' is {dims(shape) or 'one number'}, and in {self.paths[0]} it is "
                    f"{dims(first) or 'one number'}: the files of a list must agree"
                )
        self.rows.append(rows)


def open_file(path: str) -> Any:
    """An HDF5 file, to read. Raises NetError saying what it is instead."""
    import h5py

    try:
        return h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE, rdcc_nslots=_CHUNK_SLOTS)
    except FileNotFoundError:
        start = "" if os.path.isabs(path) else f" (relative paths start at {os.getcwd()})"
        raise NetError(f"there is no file {path}{start}") from None
    except OSError as error:
        what = "cannot be read" if not os.path.isfile(path) or h5py.is_hdf5(path) else "is no HDF5 file"
        raise NetError(f"{path} {what}: {reason_of(error)}") from None


def _dataset(file: Any, path: str, name: str) -> Any:
    """A dataset of numbers with rows. Raises NetError if there is none of that name."""
    import h5py

    try:
        dataset = file.get(name)
    except _FAILURES as error:
        raise NetError(f"{path} is damaged, dataset '{name}': {reason_of(error)}") from None
    if not isinstance(dataset, h5py.Dataset):
        try:
            there = ", ".join(f"'{key}'" for key, item in file.items() if isinstance(item, h5py.Dataset)) or "none"
        except _FAILURES as error:
            there = f"its list is damaged: {reason_of(error)}"
        raise NetError(f"{path} has no dataset '{name}': a top is filled from the dataset of its name ({there})")
    try:
        dtype, shape, chunks, nbytes = dataset.dtype, dataset.shape, dataset.chunks, dataset.nbytes
    except _FAILURES as error:
        raise NetError(f"{path} is damaged, dataset '{name}': {reason_of(error)}") from None
    if dtype.kind not in "fiub":
        raise NetError(f"{path}, dataset '{name}': expected numbers, got values of type {dtype}")
    if not shape:
        raise NetError(f"{path}, dataset '{name}': expected rows (one axis or more), got a single value")
    chunk = math.prod(chunks or ()) * dtype.itemsize
    if chunk > max(_CHUNK_CACHE, nbytes):
        raise NetError(f"{path}, dataset '{name}': lies in chunks of {chunk} bytes, more than its {nbytes}")
    return dataset


def _read(dataset: Any, rows: np.ndarray, out: np.ndarray) -> None:
    """Ascending rows of a dataset, without an array in between."""
    if not out.size:
        return
    first, last = int(rows[0]), int(rows[-1])
    whole = last - first + 1 == len(rows)
    dataset.read_direct(out, np.s_[first : last + 1] if whole else rows, np.s_[0 : len(rows)])


def reason_of(error: Exception) -> str:
    """What HDF5 says, without its own name for the call."""
    text = (str(error).splitlines() or [type(error).__name__])[0].strip("'\"")
    before, bracket, inside = text.partition("(")
    return inside.rstrip(")") if bracket and before.startswith(("Unable", "Can't")) else text
