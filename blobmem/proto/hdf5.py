"""HDF5 files of arrays, numbers and strings: making one, and reading one that anybody may have made.

Only what Caffe writes is read: arrays of numbers that lie in the file itself. h5py is imported where it is used, as it
takes longer than all the rest.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.proto.files import PathLike, read_bytes

ENDING = ".h5"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_VERSIONS = ("earliest", "v108")  # of the format: HDF5 1.8, which Caffe asks for, reads them
_MAX_CHUNK = 16 * 2**20  # bytes of a chunk, which is read as a whole, unless the array itself is larger
_MAX_TEXT = 64 * 2**10
_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError)
"""What h5py raises for files that are damaged, by the place of the damage."""


def is_hdf5(path: PathLike) -> bool:
    """Whether a file is to be read as HDF5: for its name, which is what Caffe goes by, or for its first bytes."""
    name = os.fspath(path)
    if name.endswith(ENDING):
        return True
    if not os.path.isfile(name):  # opening a pipe would wait for its writer
        return False
    try:
        with open(name, "rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


def is_name(name: str) -> bool:
    """Whether a name can stand in a path: HDF5 takes a slash for a group, and drops empty parts and dots."""
    return "\0" not in name and all(part not in ("", ".") for part in name.split("/"))


# -------------------------------------------------------------------- writing


def encode(items: Iterable[tuple[str, np.ndarray | int | str | None]]) -> bytes:
    """The bytes of a file with these items, in the types that Caffe writes.

    Args:
        items: paths, as "data/conv1/0", with what is there: an array, a number (32 bits), a string (not empty), or None
            for a group. Groups on the way to an item are made.

    Raises NetError for a path that HDF5 cannot hold, or that is an array's and a group's at once.
    """
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=_VERSIONS) as file:
        for path, value in items:
            if not is_name(path):
                raise NetError(f"'/{path}' cannot be a path in an HDF5 file: no part of it may be empty or a dot")
            try:
                _put(file, path, value)
            except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
                raise NetError(
                    f"'/{path}' has no place in the HDF5 file: an array has this path or one that it starts with "
                    f"({error}); a slash in a layer's name makes a group, so rename one of the layers"
                ) from error
    return buffer.getvalue()


def _put(file: Any, path: str, value: np.ndarray | int | str | None) -> None:
    if value is None:
        file.require_group(path)
    elif isinstance(value, int):
        file.create_dataset(path, data=np.array([value], np.int32))
    elif isinstance(value, str):
        data = os.fsencode(value)
        file.create_dataset(path, data=np.array(data, f"S{len(data) + 1}"))  # with the 0 that C ends it by
    else:
        file.create_dataset(path, data=value)


# -------------------------------------------------------------------- reading


class File:
    """An HDF5 file open for reading, in a `with`.

    Nothing in it is trusted: links and arrays that lead out of the file are refused, and nothing is allocated for an
    array before `Dataset.read`.

    Raises NetError if it is missing, cut short, or no HDF5 file.
    """

    def __init__(self, path: PathLike) -> None:
        import h5py

        self.path = os.fspath(path)
        _require_file(self.path)
        try:
            self._file = h5py.File(self.path, "r")
        except _FAILURES as error:
            raise NetError(
                f"{self.path} cannot be read as HDF5; it is of another kind, cut short or damaged ({error})"
            ) from error

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def members(self, path: str) -> dict[str, bool] | None:
        """The names in a group, with whether each is a group itself; None if there is no such group."""
        import h5py

        with _naming(self._where(path)):
            group = self._find(path)
            if not isinstance(group, h5py.Group):
                return None
            # a name that is not UTF-8 comes as bytes
            names = [name if isinstance(name, str) else name.decode(errors="surrogateescape") for name in group]
            return {name: self._is_group(group, name) for name in names}

    def dataset(self, path: str) -> Dataset:
        """The array of numbers at a path. NetError if there is none in this file."""
        import h5py

        return self._dataset(path, (h5py.h5t.INTEGER, h5py.h5t.FLOAT), "numbers")

    def integer(self, path: str) -> int:
        """The one whole number at a path. NetError if there is none."""
        import h5py

        dataset = self._dataset(path, (h5py.h5t.INTEGER,), "one whole number")
        if math.prod(dataset.shape) != 1:
            raise NetError(f"{dataset.where} has shape {dataset.shape}, expected one whole number")
        return int(dataset.read(np.int64).reshape(-1)[0])

    def text(self, path: str) -> str | None:
        """The string at a path; None if there is nothing. NetError for anything else than one of fixed length."""
        import h5py

        with _naming(self._where(path)):
            if self._find(path) is None:
                return None
        dataset = self._dataset(path, (h5py.h5t.STRING,), "a string")
        kind = dataset.id.get_type()
        if math.prod(dataset.shape) != 1 or kind.is_variable_str() or kind.get_size() > _MAX_TEXT:
            raise NetError(f"{dataset.where}: expected one string of fixed length, up to {_MAX_TEXT} bytes")
        return os.fsdecode(bytes(dataset.read(f"S{kind.get_size()}").reshape(-1)[0]).split(b"\0")[0])

    def _dataset(self, path: str, classes: tuple[int, ...], expected: str) -> Dataset:
        import h5py

        where = self._where(path)
        with _naming(where):
            found = self._find(path)
            if found is None:
                raise NetError(f"{where} is missing")
            if not isinstance(found, h5py.Dataset):
                raise NetError(f"{where} is a {type(found).__name__.lower()}, expected an array of {expected}")
            plan = found.id.get_create_plist()
            if plan.get_layout() == h5py.h5d.VIRTUAL or plan.get_external_count():
                raise NetError(f"{where} has its values in other files, which are not read")
            if found.id.get_type().get_class() not in classes:
                raise NetError(f"{where} is of another type, expected {expected}")
            if found.shape is None:
                raise NetError(f"{where} has no values")
            return Dataset(where, found.id, tuple(found.shape))

    def _where(self, path: str) -> str:
        return f"{self.path}: /{path}"

    def _find(self, path: str) -> Any:
        """The object at a path, None if there is none. NetError for a link to another path or file on the way."""
        import h5py

        if not is_name(path):
            return None
        place = self._file
        for name in path.split("/"):
            key = name.encode()
            if not isinstance(place, h5py.Group) or not place.id.links.exists(key):
                return None
            if place.id.links.get_info(key).type != h5py.h5l.TYPE_HARD:
                raise NetError(f"{self._where(path)}: '{name}' is a link to another place, which is not followed")
            place = place[name]
        return place

    def _is_group(self, group: Any, name: str) -> bool:
        import h5py

        hard = group.id.links.get_info(name.encode(errors="surrogateescape")).type == h5py.h5l.TYPE_HARD
        return hard and group.get(name, getclass=True) is h5py.Group


@dataclass(frozen=True, slots=True)
class Dataset:
    """An array in a file that is open.

    Attributes:
        where: file and path, for messages.
        id: h5py's handle.
        shape: as the file says: to be checked before `read`, which allocates it.
    """

    where: str
    id: Any
    shape: tuple[int, ...]

    def read(self, dtype: Any) -> np.ndarray:
        """The values in another dtype. NetError if the file has not got them all, or they cannot be read."""
        import h5py

        with _naming(self.where):
            self._check_storage()
            values = np.empty(self.shape, dtype)
            if values.size:
                self.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
            return values

    def _check_storage(self) -> None:
        """Raise NetError where HDF5 would put zeros in silence, or need far more memory than the values."""
        import h5py

        count, plan = math.prod(self.shape), self.id.get_create_plist()
        nbytes, held = count * self.id.get_type().get_size(), self.id.get_storage_size()
        complete = held >= nbytes
        if plan.get_layout() == h5py.h5d.CHUNKED and count:
            chunk = plan.get_chunk()
            size = math.prod(chunk) * self.id.get_type().get_size()
            if size > max(_MAX_CHUNK, nbytes):
                raise NetError(f"{self.where} lies in chunks of {size} bytes, more than the array's {nbytes}")
            if plan.get_nfilters():  # compressed: bytes say nothing, but there is a chunk for every part
                wanted = math.prod(-(-n // step) for n, step in zip(self.shape, chunk, strict=True))
                complete = self.id.get_num_chunks() >= wanted
        if not complete:
            raise NetError(f"{self.where} has shape {self.shape}, but not all of its values: {held} bytes are there")


def _require_file(path: str) -> None:
    """Raise NetError for a missing file, a folder, or a pipe (opening one would wait for its writer)."""
    if os.path.isfile(path):
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise NetError(f"{path} is a pipe or a device, expected an HDF5 file")
    read_bytes(path, 0)  # says which


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put what h5py says of a damaged file into one NetError with the place."""
    try:
        yield
    except NetError:
        raise
    except _FAILURES as error:
        raise NetError(f"{where} cannot be read, the file is damaged: {error}") from error
