"""Rows into HDF5 files: new files, all of them or nothing, and further rows for old ones."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blobmem.data.datum import dims
from blobmem.data.hdf5 import reason_of
from blobmem.errors import NetError
from blobmem.proto.files import PathLike

_CHUNK_BYTES = 2**18


class RowWriter:
    """Rows for the datasets of an open HDF5 file.

    Args:
        file: an h5py.File that can be written.
        path: what the file is called, or will be.
    """

    def __init__(self, file: Any, path: PathLike) -> None:
        self._file = file
        self._path = os.fspath(path)

    def put(self, start: int, tables: Mapping[str, np.ndarray]) -> None:
        """Have the datasets hold these rows (first axis) from row `start` on, and none after them.

        A dataset that is not there is made; it can grow. If anything goes wrong, the rows before `start` stay. Raises
        NetError if a dataset has rows of another shape or fewer than `start`, or if the disk is full.
        """
        datasets = {name: self._dataset(name, values, start) for name, values in tables.items()}
        try:
            with _write_errors(self._path):
                for name, values in tables.items():
                    datasets[name].resize(start + len(values), axis=0)
                    if values.size:
                        datasets[name][start:] = values
        except BaseException:
            with contextlib.suppress(Exception):
                for dataset in datasets.values():
                    dataset.resize(start, axis=0)
            raise

    def _dataset(self, name: str, values: np.ndarray, start: int) -> Any:
        """The dataset of that name, made for rows like those of `values` if it is not there."""
        import h5py

        item = values.shape[1:]
        if name not in self._file and not start:
            rows = max(1, _CHUNK_BYTES // max(1, values[:1].nbytes))
            chunks = (rows, *(max(1, length) for length in item))
            try:
                return self._file.create_dataset(name, (0, *item), values.dtype, maxshape=(None, *item), chunks=chunks)
            except (ValueError, TypeError) as error:
                raise NetError(f"{self._path}: there cannot be a dataset '{name}': {reason_of(error)}") from None
        dataset = self._file.get(name)
        wanted = f"rows of {dims(item) or 'one number'}, {start} of them or more"
        if not isinstance(dataset, h5py.Dataset):
            raise NetError(f"{self._path}: '{name}' should be a dataset of {wanted}, and is none")
        if dataset.shape[1:] != item or dataset.maxshape[:1] != (None,) or len(dataset) < start:
            raise NetError(f"{self._path}: dataset '{name}' should have {wanted}, and is {dims(dataset.shape)}")
        return dataset


@contextlib.contextmanager
def new_file(path: PathLike, *, overwrite: bool = False) -> Iterator[RowWriter]:
    """A new HDF5 file, which gets its name when the block ends without an exception.

    Whatever happens before, nothing has that name, or what had it stays. The folder around it is made if need be.
    Raises NetError if there is something of that name (a file is replaced with `overwrite`), or if it cannot be
    written.
    """
    import h5py

    target = Path(path)
    check_new_file(target, overwrite)
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with _write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = h5py.File(temporary, "x")
        with _closing(file, target):
            yield RowWriter(file, target)
        with _write_errors(target):
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


@contextlib.contextmanager
def old_file(path: PathLike) -> Iterator[RowWriter]:
    """An HDF5 file that is there, to be changed; closed when the block ends. Raises NetError if that cannot be done."""
    import h5py

    with _write_errors(path):
        file = h5py.File(path, "r+")
    with _closing(file, path):
        yield RowWriter(file, path)


def check_new_file(path: PathLike, overwrite: bool) -> None:
    """Raise NetError if a new file must not take this path."""
    target = Path(path)
    if os.path.lexists(target) and not (overwrite and target.is_file()):
        how = "" if overwrite else ", or overwrite it (overwrite=True; --overwrite on the command line)"
        what = "exists already" if target.is_file() else "exists already and is no file"
        raise NetError(f"{target} {what}: remove it, give another name{how}")


@contextlib.contextmanager
def _closing(file: Any, path: PathLike) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # what went wrong is said by the exception; HDF5 may find the same again
        with contextlib.suppress(Exception):
            file.close()
        raise
    with _write_errors(path):
        file.close()


@contextlib.contextmanager
def _write_errors(path: PathLike) -> Iterator[None]:
    """Errors of disk and HDF5 while a file is written, as NetError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise NetError(f"{os.fspath(path)} cannot be written: {reason}") from error
