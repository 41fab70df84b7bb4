"""The outermost layer of protobuf's wire format: which fields a serialized message has, and where their bytes are.

https://protobuf.dev/programming-guides/encoding says what is used here: a message is a run of (tag, payload), a tag is
a varint of (field number << 3 | kind), and the kinds are VARINT, I64, LEN (a varint of the length goes before) and I32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from blobmem.proto.compat import is_repeated

VARINT, I64, LEN, I32 = 0, 1, 2, 5

_FIXED = {FieldDescriptor.CPPTYPE_FLOAT: I32, FieldDescriptor.CPPTYPE_DOUBLE: I64}
_LONG = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)


class Field(NamedTuple):
    """A field in a serialized message: its number, its kind, and the bytes of its payload."""

    number: int
    kind: int
    payload: memoryview


def fields(wire: memoryview) -> Iterator[Field]:
    """The fields of a serialized message, in order, without a look inside; ends where the bytes stop making sense."""
    at = 0
    while at < len(wire):
        try:
            tag, at = _read_varint(wire, at)
            start = at
            kind = tag & 7
            if kind == VARINT:
                _, end = _read_varint(wire, at)
            elif kind == LEN:
                length, start = _read_varint(wire, at)
                end = start + length
            elif kind in (I32, I64):
                end = start + (4 if kind == I32 else 8)
            else:
                return
        except IndexError:
            return
        if end > len(wire):
            return
        yield Field(tag >> 3, kind, wire[start:end])
        at = end


def packed_field(number: int, payload: bytes) -> bytes:
    """A field of kind LEN, serialized."""
    return b"".join((_varint(number << 3 | LEN), _varint(len(payload)), payload))


def share_of(data: bytes, descriptor: Any) -> float:
    """How much of `data` lies in fields that a message of type `descriptor` has, from 0 to 1.

    A caffemodel is 1 as a NetParameter (less if a fork of Caffe added something), another message is close to 0.
    """
    known = total = 0
    for field in fields(memoryview(data)):
        size = 1 + len(field.payload)
        total += size
        expected = descriptor.fields_by_number.get(field.number)
        if expected is not None and field.kind in _kinds(expected):
            known += size
    return known / total if total else 0.0


def _kinds(field: Any) -> tuple[int, ...]:
    if field.cpp_type in _LONG:
        return (LEN,)
    plain = _FIXED.get(field.cpp_type, VARINT)
    return (plain, LEN) if is_repeated(field) else (plain,)


def _read_varint(wire: memoryview, at: int) -> tuple[int, int]:
    """The varint at offset `at` and the offset after it. IndexError where the bytes end first, or it is no varint."""
    value = 0
    for shift in range(0, 70, 7):
        byte = wire[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
