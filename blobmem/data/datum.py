"""A record to an array: Caffe's Datum message, whose bytes nobody vouches for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from blobmem.data import images
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

Shape = tuple[int, int, int]
Pixels = Callable[[], np.ndarray]


class RecordError(ValueError):
    """A record that cannot be used; says why, the one who knows its key says which."""


class Misfit(RecordError):
    """A record that is whole, but not one for these options or this batch."""


def unusable(where: str, what: str, error: RecordError) -> NetError:
    """The error that stops a run at an item: `what` names it and says why; where leaving it out would help, how to."""
    hint = "" if isinstance(error, Misfit) else "; with --skip-damaged (skip_damaged=True) the next one takes its place"
    return NetError(f"{where}: {what}{hint}")


def parse(value: bytes) -> Any:
    """The Datum in a record. Raises RecordError if it is none."""
    try:
        # a new message each time: one that is parsed into again and again keeps the memory of all its contents
        return caffe_pb2.Datum.FromString(value)
    except (DecodeError, RecursionError, ValueError):
        raise RecordError(f"its {len(value)} bytes are no Datum message") from None


def unpack(datum: Any, color: images.Color = None) -> tuple[Shape, Pixels]:
    """The (channels, height, width) of a Datum, and a function that gives its values in that shape.

    Values are uint8, or float32 where the Datum has float_data; a compressed image is decoded only by the function,
    to what `color` says. Raises RecordError where dimensions and values do not fit, as does the function.
    """
    if datum.encoded:
        return _unpack_image(datum.data, color)
    shape = (datum.channels, datum.height, datum.width)
    if min(shape) < 1:
        raise RecordError(f"its channels, height and width are {dims(shape)}, expected 1 or more each")
    raw = datum.data
    found = len(raw) or len(datum.float_data)
    expected = shape[0] * shape[1] * shape[2]
    if found != expected:
        kind = "bytes of data" if raw else "values of float_data" if found else "values"
        raise RecordError(f"it has {found} {kind}, expected {expected} for {dims(shape)}")
    if raw:
        return shape, lambda: np.frombuffer(raw, dtype=np.uint8).reshape(shape)
    return shape, lambda: np.array(datum.float_data, dtype=np.float32).reshape(shape)


def holds_bytes(datum: Any) -> bool:
    """Whether the values that `unpack` gives are bytes."""
    return bool(datum.encoded or datum.data)


def _unpack_image(data: bytes, color: images.Color) -> tuple[Shape, Pixels]:
    try:
        image = images.CompressedImage(data, color)
    except images.ImageError as error:
        raise RecordError(str(error)) from None

    def pixels() -> np.ndarray:
        try:
            return image.pixels()
        except images.ImageError as error:
            raise RecordError(str(error)) from None

    return image.shape, pixels


def dims(shape: tuple[int, ...]) -> str:
    """A shape for people: "3 x 227 x 227"."""
    return " x ".join(map(str, shape))
