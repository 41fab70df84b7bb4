"""The mean of the images in a database, which transform_param takes off as mean_file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from blobmem.data.convert import REPORT, Progress, in_order
from blobmem.data.database import Reader, open_records
from blobmem.data.datum import RecordError, dims, parse, unpack
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.proto.text import write_binary


class Mean(NamedTuple):
    """The mean of so many records, float64 (channels, height, width)."""

    image: np.ndarray
    records: int

    @property
    def channels(self) -> list[float]:
        """The mean of each channel: what mean_value takes."""
        result: list[float] = self.image.mean(axis=(1, 2)).tolist()
        return result


def compute(path: str | os.PathLike[str], progress: Progress | None = None) -> Mean:
    """The mean of all records of a database, compressed ones decoded as they are. Reads one after the other.

    `progress` is called with the records done, and those in all. Raises NetError naming a record that is damaged, or of
    another shape than the first.
    """
    reader = open_records(path)
    total: np.ndarray | None = None
    count = len(reader)
    for done, (key, values) in enumerate(in_order(_decode, _items(reader, count)), 1):
        if isinstance(values, RecordError):
            raise NetError(f"record {key!r} of {reader.path} cannot be used: {values}")
        if total is None:
            total = np.zeros(values.shape)
        if values.shape != total.shape:
            raise NetError(
                f"record {key!r} of {reader.path} is {dims(values.shape)}, and the first one {dims(total.shape)}: only "
                "records of one shape have a mean image (`blobmem convert images --resize` makes them so)"
            )
        np.add(total, values, out=total)
        if progress is not None and (done % REPORT == 0 or done == count):
            progress(done, count)
    assert total is not None
    total /= count
    return Mean(total, count)


def save(mean: Mean, path: str | os.PathLike[str]) -> None:
    """Write the mean image as a BlobProto of 1 x channels x height x width, as Caffe's tool does. Raises NetError."""
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, mean.image.astype(np.float32))
    proto.ClearField("shape")
    proto.num = 1
    proto.channels, proto.height, proto.width = mean.image.shape
    write_binary(proto, path)


def _items(reader: Reader, count: int) -> Iterator[tuple[bytes, bytes | RecordError]]:
    return islice(reader.items(0), count)


def _decode(item: tuple[bytes, bytes | RecordError]) -> tuple[bytes, np.ndarray | RecordError]:
    """A record's key and values, or what is wrong with it."""
    key, value = item
    try:
        if isinstance(value, RecordError):
            raise value
        return key, unpack(parse(value))[1]()
    except RecordError as error:
        return key, error
