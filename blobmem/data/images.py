"""Compressed images to arrays, by Pillow, in the order in which Caffe's nets know channels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Color = Literal["color", "gray"] | None
"""Three channels, one channel, or what the image has."""

FORMATS = ("JPEG", "PNG", "BMP")
"""What is decoded; images come from strangers, and further decoders are further ways in."""

FILE_FORMATS = (*FORMATS, "PPM", "TIFF", "WEBP")
"""What is decoded besides where a list names files, as OpenCV does."""

_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


class ImageError(ValueError):
    """Bytes that are no image that can be used."""


class CompressedImage:
    """A compressed image; its header is read at once, its pixels when asked for.

    Attributes:
        shape: (channels, height, width) of the pixels.

    Raises ImageError if it is none of `formats` or has more than 8 bits a channel.
    """

    def __init__(self, data: bytes, color: Color = None, formats: Sequence[str] = FORMATS) -> None:
        opener = _pillow()
        try:
            self._image = opener.open(io.BytesIO(data), formats=formats)
            self._mode = _mode(self._image, color)
            width, height = self._image.size
        except ImageError:
            raise
        # a decoder over broken bytes may raise anything
        except Exception as error:
            kinds = " or ".join(formats)
            raise ImageError(f"its {len(data)} bytes are no image in {kinds} ({_first_line(error)})") from None
        self.shape = (_CHANNELS[self._mode], height, width)

    def pixels(self) -> np.ndarray:
        """uint8 values in `shape`; colours are in the order blue, green, red (then opacity), as Caffe's nets expect."""
        try:
            image = self._image if self._image.mode == self._mode else self._image.convert(self._mode)
            bands = image.split()
        except Exception as error:
            raise ImageError(f"its image is damaged ({_first_line(error)})") from None
        values = np.empty(self.shape, dtype=np.uint8)
        for channel, band in zip(values, (*bands[2::-1], *bands[3:]), strict=True):
            channel[...] = np.asarray(band)
        return values


def _mode(image: Any, color: Color) -> str:
    """Pillow's name for the pixels wanted."""
    mode = image.mode
    if mode.startswith(("I", "F")):
        raise ImageError(f"its image has more than 8 bits a channel (mode {mode}): convert it to 8")
    if color is not None:
        return "RGB" if color == "color" else "L"
    if mode in ("1", "L"):
        return "L"
    transparent = mode in ("RGBA", "LA", "PA") or (mode == "P" and "transparency" in image.info)
    return "RGBA" if transparent else "RGB"


def _pillow() -> Any:
    # imported late: `import blobmem` must stay quick
    import PIL.Image

    return PIL.Image


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
