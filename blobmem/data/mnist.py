"""MNIST's idx files to LMDB databases as Caffe's tools make them."""

from __future__ import annotations

import contextlib
import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from blobmem.data.convert import Converted, Progress
from blobmem.data.writer import check_target, new_database
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

DATABASES = {"mnist_train_lmdb": "train", "mnist_test_lmdb": "t10k"}
"""Name of each database, and how the names of its two files begin."""

_UNSIGNED_BYTES = 8
_REPORT = 1000  # records between two reports of progress


def convert(
    source_dir: str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    progress: Progress | None = None,
    overwrite: bool = False,
) -> list[Converted]:
    """Make `mnist_train_lmdb` and `mnist_test_lmdb` in `target_dir` from the four idx files, gzipped or not.

    Keys are the images' numbers in eight digits, values Datum messages of 1 x rows x columns bytes and a label.
    Both databases appear when both are complete. `progress` is called with records done and records in all.
    Raises NetError if a file is missing or damaged, a database exists (and not `overwrite`) or cannot be written.
    """
    source, target = Path(source_dir), Path(target_dir)
    for name in DATABASES:
        check_target(target / name, overwrite)
    sets = {name: _read_set(source, prefix) for name, prefix in DATABASES.items()}
    total = sum(len(labels) for _, labels in sets.values())
    done = 0
    with contextlib.ExitStack() as stack:
        for name, (pictures, labels) in sets.items():
            writer = stack.enter_context(new_database(target / name, overwrite=overwrite))
            for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
                writer.put(b"%08d" % number, _datum(picture, int(label)))
                done += 1
                if progress is not None and (done % _REPORT == 0 or done == total):
                    progress(done, total)
    return [Converted.of(target / name, len(labels)) for name, (_, labels) in sets.items()]


def read_idx(path: str | os.PathLike[str], axes: int) -> np.ndarray:
    """The uint8 array in an idx file, gzipped or not.

    An idx file begins with two zero bytes, the type (8 for unsigned bytes) and the number of axes; each axis' length
    follows as a big-endian 32-bit number, then the values. Raises NetError if the file is missing, another kind of
    file, has another number of axes, or is longer or shorter than it says.
    """
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return _read_values(raw, path, axes)
            with gzip.GzipFile(fileobj=raw) as file:
                return _read_values(file, path, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NetError(f"{path} is damaged or cut short ({error}): download it again") from None
    except OSError as error:
        raise NetError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_values(file: IO[bytes] | gzip.GzipFile, path: Any, axes: int) -> np.ndarray:
    head = file.read(4)
    if len(head) < 4 or head[:3] != bytes((0, 0, _UNSIGNED_BYTES)):
        raise NetError(f"{path} is no idx file of unsigned bytes: is it one of MNIST's four files?")
    if head[3] != axes:
        kind = {1: "labels", 3: "images"}
        raise NetError(
            f"{path} holds {kind.get(head[3], 'an array')} ({head[3]} axes), expected {kind[axes]} ({axes} axes): "
            "are the files' names mixed up?"
        )
    lengths = file.read(4 * axes)
    if len(lengths) < 4 * axes:
        raise NetError(f"{path} ends within its header: download it again")
    shape = struct.unpack(f">{axes}I", lengths)
    if min(shape) < 1:
        raise NetError(f"{path} holds nothing, its shape is {shape}: download it again")
    expected = int(np.prod(shape, dtype=object))
    values = _read_at_most(file, expected + 1)
    if len(values) != expected:
        found = f"only {len(values)}" if len(values) < expected else "more"
        raise NetError(
            f"{path} should hold {' x '.join(map(str, shape))} values, {expected}, but has {found}: download it again"
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _read_at_most(file: IO[bytes] | gzip.GzipFile, count: int) -> bytearray:
    """Up to `count` bytes; memory grows with what is there, not with what a header promises."""
    result = bytearray()
    while len(result) < count:
        part = file.read(min(count - len(result), 2**20))
        if not part:
            break
        result += part
    return result


def _read_set(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, rows, columns) and labels (count,) of one of the two sets."""
    picture_path, label_path = _find(folder, f"{prefix}-images", "idx3"), _find(folder, f"{prefix}-labels", "idx1")
    pictures, labels = read_idx(picture_path, 3), read_idx(label_path, 1)
    if len(pictures) != len(labels):
        raise NetError(
            f"{picture_path} has {len(pictures)} images and {label_path} {len(labels)} labels: "
            "they do not belong together, download both again"
        )
    return pictures, labels


def _find(folder: Path, stem: str, kind: str) -> Path:
    """The file of that name as it is published, or as other programs unpack it. Raises NetError if there is none."""
    names = [f"{stem}{dash}{kind}-ubyte{end}" for end in (".gz", "") for dash in "-."]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    wanted = ", ".join(f"{p}-{k}" for p in DATABASES.values() for k in ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"))
    missing = "there is no folder" if not folder.is_dir() else f"there is no {names[0]} in"
    raise NetError(f"{missing} {folder}: give the folder that holds MNIST's four files ({wanted})")


def _datum(picture: np.ndarray, label: int) -> bytes:
    rows, columns = picture.shape
    datum: Any = caffe_pb2.Datum(channels=1, height=rows, width=columns, data=picture.tobytes(), label=label)
    return datum.SerializeToString()
