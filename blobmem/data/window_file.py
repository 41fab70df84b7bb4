"""Window files, as R-CNN gives its regions to Caffe.

A window file has these lines for each image:

    # INDEX
    PATH
    CHANNELS
    HEIGHT
    WIDTH
    NUMBER_OF_WINDOWS
    CLASS OVERLAP X1 Y1 X2 Y2        (so many times; corners belong to the window, and count from 0)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from blobmem.errors import NetError
from blobmem.proto.files import PathLike

_DIGITS = 9  # of the numbers of an image, all below 2^31

Box = tuple[int, int, int, int]
Lines = Iterator[tuple[int, bytes]]
"""Lines that are not empty, with their numbers from 1."""


class Window(NamedTuple):
    """One window: the line that it is on, the number of its image in the file, its label and its corners."""

    line: int
    image: int
    label: int
    box: Box


class Windows:
    """The windows of a file that are objects or background, by their overlap with an object.

    Args:
        path: the window file.
        root: what stands before each image's path, as it is.
        foreground, background: an overlap of `foreground` or more makes an object, of its class; one below `background`
            makes background, of class 0; windows in between are left out.

    Attributes:
        images: paths, in the file's order.
        channels: of all images.
        foreground, background: the windows of both kinds, (number, 7): line, image, label, x1, y1, x2, y2.

    Raises NetError naming the file and the line that is wrong.
    """

    def __init__(self, path: PathLike, root: str, foreground: float, background: float) -> None:
        self.path = str(path)
        self.images: list[str] = []
        self.channels = 0
        self._root = root
        self._line = 0  # the last one read
        # compared in single precision, in which Caffe has them
        self._thresholds = np.float32(foreground), np.float32(background)
        found: tuple[list[np.ndarray], ...] = ([], [])
        lines = self._lines()
        for _, mark in lines:
            for windows, more in zip(found, self._take_image(mark, lines), strict=True):
                windows.append(more)
        if not self.images:
            raise NetError(f"{self.path} has no images: expected a window file, which begins with `# 0`")
        self.foreground, self.background = map(np.concatenate, found)

    def window(self, is_object: bool, index: int) -> Window:
        """Window `index` of the objects or of the background."""
        line, image, label, *box = (self.foreground if is_object else self.background)[index].tolist()
        return Window(line, image, label, (box[0], box[1], box[2], box[3]))

    def describe(self, window: Window) -> str:
        """A window for people."""
        path = self.images[window.image].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return f"{path}, window {' '.join(map(str, window.box))} (line {window.line} of {self.path})"

    def _lines(self) -> Lines:
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._line = number
                        yield number, line.strip()
        except OSError as error:
            raise NetError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _take_image(self, mark: bytes, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        """An image, from the line `# INDEX` on; the windows of both kinds on it."""
        if not mark.startswith(b"#"):
            raise self._error(self._line, "`# ` and the number of an image", mark)
        _, path = next(lines, (0, b""))
        if not path:
            raise self._error(self._line, "the path of an image", path)
        channels = self._number(lines, "channels")
        if channels not in (1, 3) or self.channels not in (0, channels):
            name = path.decode("utf-8", "replace")
            raise self._error(self._line, f"{self.channels or '1 or 3'} channels for {name}", b"%d" % channels)
        self.channels = channels
        self.images.append(self._root + path.decode("utf-8", "surrogateescape"))
        for what in ("height", "width"):  # the image itself says them too
            self._number(lines, what)
        count = self._number(lines, "number of windows")
        windows = list(islice(lines, count))
        if len(windows) < count:
            raise self._error(self._line, f"{count} windows of the last image, not {len(windows)}", b"")
        return self._take_windows(windows)

    def _number(self, lines: Lines, what: str) -> int:
        _, text = next(lines, (0, b""))
        if not text.isdigit() or len(text) > _DIGITS:
            raise self._error(self._line, f"the {what} of an image", text)
        return int(text)

    def _take_windows(self, lines: list[tuple[int, bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """The windows of both kinds on the last image."""
        values = self._numbers(lines)
        overlaps = values[:, 1].astype(np.float32)
        foreground, background = self._thresholds
        rows = np.empty((len(lines), 7), dtype=np.int32)
        rows[:, 0] = [number for number, _ in lines]
        rows[:, 1] = len(self.images) - 1
        rows[:, 2] = values[:, 0]
        rows[:, 3:] = values[:, 2:]
        objects, others = rows[overlaps >= foreground], rows[(overlaps < foreground) & (overlaps < background)]
        if len(objects) and objects[:, 2].min() < 1:
            wrong = objects[objects[:, 2].argmin()]
            raise self._error(int(wrong[0]), "a class of 1 or more for an object (0 is background)", b"%d" % wrong[2])
        others[:, 2] = 0
        return objects, others

    def _numbers(self, lines: list[tuple[int, bytes]]) -> np.ndarray:
        """The six numbers on each line. Raises NetError naming the line that has others."""
        try:
            # all at once: a file may have millions of windows
            values = np.array([text.split() for _, text in lines], dtype=np.float64).reshape(len(lines), 6)
            whole = values[:, (0, 2, 3, 4, 5)]
            if np.array_equal(whole, np.trunc(whole)) and np.abs(whole).max(initial=0) < 2**31:
                return values
        except ValueError:
            pass
        if len(lines) == 1:
            raise self._error(lines[0][0], "class, overlap and four corners of a window", lines[0][1])
        return np.concatenate([self._numbers([line]) for line in lines])

    def _error(self, line: int, expected: str, got: bytes) -> NetError:
        found = repr(got[:80].decode("utf-8", "replace")) if got else "the end of the file"
        return NetError(f"{self.path}:{line}: expected {expected}, got {found}")
