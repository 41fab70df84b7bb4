"""Lists of images, a line `path label` for each, and the images that they name."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from blobmem.data import images
from blobmem.data.datum import RecordError
from blobmem.errors import NetError
from blobmem.proto.files import PathLike, read_bytes

_MAX_LIST = 2**31 - 1  # bytes


class Entry(NamedTuple):
    """One line of a list: which, and what it says."""

    line: int
    path: str
    label: int


class ImageList:
    """The lines of a list file, `path label`; paths may have spaces in them, empty lines do not count.

    Args:
        path: the list.
        root: what stands before each path, as it is (a folder therefore ends in a slash).

    Held as the file's bytes and a few numbers a line. Raises NetError naming a line that is none, or if there is none
    at all.
    """

    def __init__(self, path: PathLike, root: str = "") -> None:
        self.path = str(path)
        self._root = root
        self._text = read_bytes(path, _MAX_LIST).removeprefix(b"\xef\xbb\xbf")
        self._lines, self._starts, self._ends = array("Q"), array("Q"), array("Q")
        self._labels = array("i")
        start = 0
        for number, line in enumerate(self._text.split(b"\n"), 1):
            if line.strip():
                self._take(number, start, line)
            start += len(line) + 1
        if not self._lines:
            raise NetError(f"{self.path} names no image: expected lines `path label`")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Entry:
        path = self.name(index).decode("utf-8", "surrogateescape")
        return Entry(self._lines[index], self._root + path, self._labels[index])

    def name(self, index: int) -> bytes:
        """The path as the list says it."""
        return self._text[self._starts[index] : self._ends[index]]

    def describe(self, entry: Entry) -> str:
        """An entry for people."""
        path = entry.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return f"{path} (line {entry.line} of {self.path})"

    def _take(self, number: int, start: int, line: bytes) -> None:
        parts = line.rsplit(None, 1)
        try:
            path, label = parts[0].strip(), int(parts[1])
            self._labels.append(label)
        except (IndexError, ValueError, OverflowError):
            shown = line.strip()[:80].decode("utf-8", "replace")
            raise NetError(
                f"{self.path}:{number}: expected a path and a label (a whole number), got {shown!r}"
            ) from None
        first = start + line.index(path)
        self._lines.append(number)
        self._starts.append(first)
        self._ends.append(first + len(path))


def open_image(path: PathLike, color: images.Color) -> images.CompressedImage:
    """The image in a file, its pixels not yet decoded. Raises RecordError saying why there is none."""
    return decode(read_image_file(path), color)


def read_image_file(path: PathLike) -> bytes:
    """The bytes of an image's file. Raises RecordError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise RecordError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None


def decode(data: bytes, color: images.Color) -> images.CompressedImage:
    """The image in a file's bytes. Raises RecordError if it is none."""
    try:
        return images.CompressedImage(data, color, images.FILE_FORMATS)
    except images.ImageError as error:
        raise RecordError(str(error)) from None


def pixels_of(image: images.CompressedImage, height: int = 0, width: int = 0) -> Any:
    """uint8 pixels (channels, height, width) of an image, resized unless height is 0. Raises RecordError for damage."""
    # imported late: `import blobmem` must not wait for the compiler
    from blobmem.data.resize import resize

    try:
        pixels = image.pixels()
    except images.ImageError as error:
        raise RecordError(str(error)) from None
    return resize(pixels, height, width) if height else pixels
