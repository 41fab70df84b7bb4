"""Arrays in Caffe's messages. Arrays that come out are float64 (or uint8) copies of their own, as pycaffe's are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from blobmem.data.datum import unpack
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array, blob_shape, fill_blob


def blobproto_to_array(blob: Any, return_diff: bool = False) -> np.ndarray:
    """The values of a BlobProto, or its gradients, in its shape: the legacy one of four axes where it has it.

    Raises NetError, a ValueError, if their number is not that of the shape.
    """
    values = blob_array(blob, diff=return_diff)
    if values is None:
        shape = blob_shape(blob)
        if math.prod(shape):
            raise NetError(f"a BlobProto of shape {shape} has no {'gradients' if return_diff else 'values'}")
        return np.zeros(shape)
    return values.astype(np.float64)


def array_to_blobproto(arr: np.ndarray, diff: np.ndarray | None = None) -> Any:
    """A BlobProto in single precision with an array's shape and values, and with gradients if given.

    Raises NetError, a ValueError, if the two differ in shape.
    """
    arr = np.asarray(arr)
    blob = caffe_pb2.BlobProto()
    fill_blob(blob, arr.astype(np.float32))
    if diff is not None:
        if np.shape(diff) != arr.shape:
            raise NetError(f"an array of shape {arr.shape} with gradients of shape {np.shape(diff)}")
        fill_blob(blob, np.asarray(diff, dtype=np.float32), diff=True)
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[np.ndarray]) -> bytes:
    """A serialized BlobProtoVector of arrays."""
    vector = caffe_pb2.BlobProtoVector(blobs=[array_to_blobproto(array) for array in arraylist])
    data: bytes = vector.SerializeToString()
    return data


arraylist_to_blobprotovecor_str = arraylist_to_blobprotovector_str  # as older versions of pycaffe spell it


def blobprotovector_str_to_arraylist(str: bytes) -> list[np.ndarray]:
    """The arrays of a serialized BlobProtoVector. Raises NetError if it is none."""
    try:
        vector = caffe_pb2.BlobProtoVector.FromString(str)
    except (DecodeError, RecursionError):
        raise NetError(f"these {len(str)} bytes are no BlobProtoVector") from None
    return [blobproto_to_array(blob) for blob in vector.blobs]


def array_to_datum(arr: np.ndarray, label: int | None = None) -> Any:
    """A Datum with a (channels, height, width) array: uint8 as bytes, all others as floats, and with a label if given.

    Raises NetError, a ValueError, for another number of axes.
    """
    arr = np.asarray(arr)
    if arr.ndim != 3:
        raise NetError(f"a Datum holds an array of (channels, height, width), got one of shape {arr.shape}")
    channels, height, width = arr.shape
    datum = caffe_pb2.Datum(channels=channels, height=height, width=width)
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(np.float64).ravel().tolist())
    if label is not None:
        datum.label = int(label)
    return datum


def datum_to_array(datum: Any) -> np.ndarray:
    """The (channels, height, width) array of a Datum: uint8, or float64 where it holds floats.

    A compressed image is decoded, to blue, green, red. Raises ValueError if values and dimensions do not fit.
    """
    _, values = unpack(datum)
    array = values()
    return np.array(array, dtype=np.uint8 if array.dtype == np.uint8 else np.float64)
