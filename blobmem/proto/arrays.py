"""Arrays in messages: BlobProto to NumPy and back, in legacy shapes and double precision too.

protobuf hands repeated numbers to Python one object at a time, seconds for a net's worth of weights. Packed fields lie
in the wire format as plain little-endian arrays, so both directions go through that: at the speed of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.dtypes import is_half
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2, wire

_FIELDS = caffe_pb2.BlobProto.DESCRIPTOR.fields_by_name
_LEGACY_AXES = ("num", "channels", "height", "width")
_MAX_AXES = 32  # Caffe's limit


def is_legacy(proto: Any) -> bool:
    """Whether a BlobProto gives its shape as num, channels, height and width, as files did before `shape`."""
    return any(proto.HasField(axis) for axis in _LEGACY_AXES)


def blob_shape(proto: Any) -> tuple[int, ...]:
    """The shape of a BlobProto; a legacy one has four axes. NetError for axes below 0, or more than 32 of them."""
    shape = tuple(getattr(proto, axis) for axis in _LEGACY_AXES) if is_legacy(proto) else tuple(proto.shape.dim)
    if min(shape, default=0) < 0 or len(shape) > _MAX_AXES:
        found = f"shape {shape}" if len(shape) <= _MAX_AXES else f"{len(shape)} axes"
        raise NetError(f"an array of {found}: expected at most {_MAX_AXES} axes, none below 0")
    return shape


def shape_matches(proto: Any, shape: Sequence[int]) -> bool:
    """Whether a BlobProto's values fit an array of `shape`, axis by axis.

    A legacy shape also fits fewer axes, with ones in front (a bias of shape (20,) was written as 1, 1, 1, 20).
    """
    own, wanted = blob_shape(proto), tuple(shape)
    if is_legacy(proto) and len(wanted) < len(own):
        wanted = (1,) * (len(own) - len(wanted)) + wanted
    return own == wanted


def blob_array(proto: Any, *, diff: bool = False) -> np.ndarray | None:
    """The values (or with `diff` the gradients) of a BlobProto: read-only, float32 or float64, in `blob_shape`.

    None where it has none, as for gradients in most files. NetError if their number is not that of the shape.
    """
    if not has_values(proto, diff=diff):
        return None
    name = _field(proto, diff)
    values = np.frombuffer(_packed(proto, name), dtype="<f8" if name.startswith("double") else "<f4")
    return values.reshape(blob_shape(proto))


def has_values(proto: Any, *, diff: bool = False) -> bool:
    """Whether `blob_array` would give an array, without making it. NetError as there."""
    shape, count = blob_shape(proto), len(getattr(proto, _field(proto, diff)))
    if count not in (0, math.prod(shape)):
        raise NetError(f"an array of shape {shape} with {count} values: expected {math.prod(shape)}")
    return count > 0


def _field(proto: Any, diff: bool) -> str:
    """The field that holds the values: the double one where it has any."""
    suffix = "diff" if diff else "data"
    return f"double_{suffix}" if len(getattr(proto, f"double_{suffix}")) else suffix


def fill_blob(proto: Any, array: np.ndarray, *, diff: bool = False) -> None:
    """Sets a BlobProto's shape and its values (or with `diff` its gradients) to those of `array`.

    float64 and integers are written in double precision, float32 and halves in single; the other precision's values
    are removed, so that a reader finds one set. NetError beyond protobuf's 2 GiB.
    """
    suffix = "diff" if diff else "data"
    single = array.dtype == np.float32 or is_half(array.dtype)
    name = suffix if single else f"double_{suffix}"
    dtype = np.dtype("<f4" if single else "<f8")
    if array.size * dtype.itemsize >= 2**31:
        raise NetError(f"an array of shape {array.shape} is beyond the 2 GiB of a message: use HDF5 instead")
    for axis in _LEGACY_AXES:
        proto.ClearField(axis)
    proto.shape.SetInParent()
    proto.shape.dim[:] = array.shape
    proto.ClearField(suffix)
    proto.ClearField(f"double_{suffix}")
    if array.size:
        proto.MergeFromString(wire.packed_field(_FIELDS[name].number, array.astype(dtype, copy=False).tobytes()))


def _packed(proto: Any, name: str) -> memoryview:
    """The bytes of a packed field of `proto`."""
    number = _FIELDS[name].number
    for field in wire.fields(memoryview(proto.SerializePartialToString())):
        if field.number == number and field.kind == wire.LEN:
            return field.payload
    raise NetError(f"an array with fields that Caffe's format does not have, before its {name}: the file is damaged")
