"""Images in files to a database of Datum records, as Caffe's tools make it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from blobmem.data.convert import REPORT, Converted, Progress, in_order
from blobmem.data.datum import RecordError, Shape, dims
from blobmem.data.image_list import Entry, ImageList, decode, pixels_of, read_image_file
from blobmem.data.order import permutation
from blobmem.data.source import Damaged
from blobmem.data.writer import check_target, new_database
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.files import write_atomic

Encoding = Literal["jpg", "png"] | None

_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".webp"))
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"BM": "bmp"}
_FORMATS = {"jpg": "JPEG", "png": "PNG"}
_QUALITY = 95  # of JPEG, OpenCV's
_KEY_BYTES = 511  # that LMDB takes


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an image becomes a record.

    Attributes:
        size: (height, width) to resize to, or None.
        gray: one channel instead of three.
        encoded: store compressed images. A file's own bytes are kept where they need no change.
        encoding: what other images are compressed as; as their file where None, or PNG where that is another kind.
    """

    size: tuple[int, int] | None = None
    gray: bool = False
    encoded: bool = False
    encoding: Encoding = None


class Folder:
    """The images in a folder of class folders, by class and path; a list of images like `ImageList`.

    Attributes:
        classes: the class folders' names, in the order of their numbers.

    Files that no suffix marks as images do not count, nor do names that begin with a dot. Raises NetError if there is
    no image.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != ".")
        self._names: list[str] = []
        self._labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = [os.path.relpath(file, path) for file in _images_in(os.path.join(path, name))]
            self._names += found
            self._labels += [label] * len(found)
        if not self._names:
            kinds = ", ".join(sorted(_SUFFIXES))
            raise NetError(
                f"{self.path} has no folders with images in them: expected CLASS/FILE with a suffix of {kinds}"
            )

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Entry:
        return Entry(0, os.path.join(self.path, self._names[index]), self._labels[index])

    def name(self, index: int) -> bytes:
        """The path below the folder."""
        return os.fsencode(self._names[index])

    def describe(self, entry: Entry) -> str:
        """An entry for people."""
        return entry.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _images_in(folder: str) -> list[str]:
    """The paths of all images in a folder and those below it, sorted."""
    return sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name[0] != "." and os.path.splitext(name)[1].lower() in _SUFFIXES
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    recipe: Recipe,
    *,
    root: str | os.PathLike[str] = "",
    shuffle: bool = False,
    seed: int = 0,
    check_size: bool = False,
    skip_damaged: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Make an LMDB database of the images that a list names, or of those in a folder of class folders.

    A list has lines `path label`; its paths start at `root`. In a folder each folder is a class, numbered from 0 by
    name; `labels_file(target)` then says their names, one a line. Keys are the images' numbers in eight digits, `_` and
    their paths. The database appears when it is complete.

    Args:
        shuffle: put the images in an order that is a function of `seed`.
        check_size: raise NetError for an image whose record has another shape than the first.
        skip_damaged: warn of images that cannot be read, and go on.
        progress: called with the images done, and those in all.

    Raises NetError naming the list and the line, or the file, of an image that cannot be read, or if the database
    exists (and not `overwrite`) or cannot be written.
    """
    path, labels = Path(target), labels_file(target)
    check_target(path, overwrite)
    listed = Folder(source) if os.path.isdir(source) else ImageList(source, os.path.join(root, "") if root else "")
    classes = listed.classes if isinstance(listed, Folder) else []
    if classes and labels.exists() and not overwrite:
        raise NetError(f"{labels} exists already: remove it, or overwrite it (overwrite=True; --overwrite)")
    count = len(listed)
    order = permutation(seed, "convert", 0, count).tolist() if shuffle else range(count)
    records = in_order(partial(_record, listed, recipe), order)
    check = _Check(listed, check_size, skip_damaged)
    with new_database(path, overwrite=overwrite) as writer:
        for done, (number, record) in enumerate(zip(order, records, strict=True), 1):
            if check.accepts(number, record):
                # as Caffe's tool, but for LMDB's limit
                writer.put((b"%08d_%b" % (done - 1, listed.name(number)))[:_KEY_BYTES], record.value)
            if progress is not None and (done % REPORT == 0 or done == count):
                progress(done, count)
        if not writer.count:
            raise NetError(f"{listed.path}: none of the {count} images can be used")
    if classes:
        write_atomic(labels, "".join(f"{name}\n" for name in classes).encode("utf-8", "surrogateescape"))
    return Converted.of(path, writer.count)


def labels_file(target: str | os.PathLike[str]) -> Path:
    """The file beside a database that names its classes, one a line, from class 0 on."""
    path = Path(target)
    return path.with_name(f"{path.name}_labels.txt")


# ---------------------------------------------------------------- one image


class _Record(NamedTuple):
    """A Datum message as bytes, and the shape of its image; or what is wrong with the image."""

    value: bytes = b""
    shape: Shape = (0, 0, 0)
    error: RecordError | None = None


class _Check:
    """Which records go into the database: those without an error, and of one shape if that is asked for."""

    def __init__(self, listed: ImageList | Folder, same_shape: bool, skip_damaged: bool) -> None:
        self._listed = listed
        self._same_shape = same_shape
        self._damaged = Damaged(listed.path) if skip_damaged else None
        self._first: Shape | None = None

    def accepts(self, number: int, record: _Record) -> bool:
        """False for a damaged image that is skipped. Raises NetError for one that is not, or of another shape."""
        what = self._listed.describe(self._listed[number])
        if record.error is not None:
            if self._damaged is None:
                raise NetError(f"{what} cannot be used: {record.error}")
            self._damaged.skip(number, f"{what} cannot be used: {record.error}")
            return False
        self._first = self._first or record.shape
        if self._same_shape and record.shape != self._first:
            raise NetError(f"{what} is {dims(record.shape)}, and the first image is {dims(self._first)}")
        return True


def _record(listed: ImageList | Folder, recipe: Recipe, number: int) -> _Record:
    """The record of an image. What is wrong with it is part of the answer."""
    entry = listed[number]
    try:
        data = read_image_file(entry.path)
        image = decode(data, "gray" if recipe.gray else "color")
        pixels = pixels_of(image, *(recipe.size or (0, 0)))
        if not recipe.encoded:
            channels, height, width = pixels.shape
            datum = caffe_pb2.Datum(
                channels=channels, height=height, width=width, data=pixels.tobytes(), label=entry.label
            )
        else:
            own = next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "")
            # decoded as it is, it must give what was asked for
            kept = own and recipe.encoding in (None, own) and decode(data, None).shape == pixels.shape
            data = data if kept else _compress(pixels, recipe.encoding or (own if own in _FORMATS else "png"))
            datum = caffe_pb2.Datum(data=data, label=entry.label, encoded=True)
    except RecordError as error:
        return _Record(error=error)
    return _Record(datum.SerializeToString(), pixels.shape)


def _compress(pixels: np.ndarray, kind: str) -> bytes:
    """A compressed image of uint8 pixels (1 or 3, height, width), blue first."""
    from PIL import Image

    rows = pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels[::-1].transpose(1, 2, 0))
    file = io.BytesIO()
    Image.fromarray(rows).save(file, _FORMATS[kind], **({"quality": _QUALITY} if kind == "jpg" else {}))
    return file.getvalue()
