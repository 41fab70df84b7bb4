"""The piece of an image that a window stands for, and its place in the square that the net sees."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from blobmem.data.datum import RecordError
from blobmem.data.window_file import Box


class Cut(NamedTuple):
    """What of an image goes where in a square: the image's rows and columns, the size they get, and its place.

    They begin and end (exclusive) inside the image; a height or width of 0 leaves the square empty.
    """

    top: int
    bottom: int
    left: int
    right: int
    height: int
    width: int
    down: int
    along: int


def cut_of(box: Box, image: tuple[int, int], size: int, pad: int, square: bool, mirrored: bool) -> Cut:
    """Where a window (x1, y1, x2, y2) of an image (height, width) goes in a square of `size` pixels.

    Without `pad` and `square` it is warped to fill the square. Otherwise the window is first made a square around its
    middle (`square`) and widened, so that `pad` pixels of context stand on each side of it in the result; what of it is
    outside of the image stays empty. Mirroring happens after the cut, and then the empty columns change sides too.
    Arithmetic is Caffe's, in single precision, with halves rounded away from zero. Raises RecordError if the window
    and the image have no pixel in common, or if it is not inside the image where it has to be.
    """
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        raise RecordError("the window's corners are in the wrong order")
    if not pad and not square:
        if x1 < 0 or y1 < 0 or y2 >= image[0] or x2 >= image[1]:
            raise RecordError(f"the window is not inside its image of {image[0]} x {image[1]} (height x width)")
        return Cut(y1, y2 + 1, x1, x2 + 1, size, size, 0, 0)
    half_height, half_width = np.float32((y2 - y1 + 1) / 2), np.float32((x2 - x1 + 1) / 2)
    middle_y, middle_x = np.float32(y1) + half_height, np.float32(x1) + half_width
    if square:
        half_height = half_width = max(half_height, half_width)
    widening = np.float32(size) / np.float32(size - 2 * pad)
    vertical = _Span.around(middle_y, half_height * widening, image[0], size)
    horizontal = _Span.around(middle_x, half_width * widening, image[1], size)
    along = horizontal.empty_after if mirrored else horizontal.empty_before
    down = vertical.empty_before
    height, width = min(vertical.length, size - down), min(horizontal.length, size - along)
    return Cut(
        vertical.first, vertical.stop, horizontal.first, horizontal.stop, max(height, 0), max(width, 0), down, along
    )


class _Span(NamedTuple):
    """One axis of a widened window: the part of it inside the image, and what becomes of it in the square."""

    first: int
    stop: int
    length: int
    empty_before: int
    empty_after: int

    @classmethod
    def around(cls, middle: np.float32, half: np.float32, limit: int, size: int) -> _Span:
        low, high = _round(middle - half), _round(middle + half)
        scale = np.float32(size) / np.float32(high - low + 1)
        before, after = max(0, -low), max(0, high - limit + 1)
        first, stop = low + before, high - after + 1
        if first >= stop:
            raise RecordError("the window and its image have no pixel in common")
        length, before, after = (_round(np.float32(pixels) * scale) for pixels in (stop - first, before, after))
        return cls(first, stop, length, before, after)


def _round(value: np.float32) -> int:
    """To the nearest integer, halves away from zero, as C's `round`."""
    return math.floor(abs(float(value)) + 0.5) * (1 if value >= 0 else -1)


def cut_out(pixels: np.ndarray, cut: Cut, mirrored: bool) -> np.ndarray:
    """The uint8 pixels (channels, cut.height, cut.width) of an image (channels, height, width)."""
    # imported late: `import blobmem` must not wait for the compiler
    from blobmem.data.resize import resize

    piece = resize(pixels[:, cut.top : cut.bottom, cut.left : cut.right], cut.height, cut.width)
    return piece[:, :, ::-1] if mirrored else piece
