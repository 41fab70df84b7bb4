"""Python values into messages: dictionaries, sequences, NumPy's numbers and names of enum values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from blobmem.errors import NetError
from blobmem.proto.compat import is_repeated
from blobmem.proto.hints import expected, unknown_field


class FieldError(NetError, AttributeError):
    """A message has no field of that name."""


def assign_proto(proto: Any, name: str, val: Any) -> None:
    """Set a field of a message: a dictionary fills a message, a sequence is added to a repeated field.

    One value for a repeated field is a sequence of one. Enum values may be numbers or names. Raises FieldError if there
    is no such field, NetError if the value does not fit it.
    """
    field = proto.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        # two of them: the first in the list would be a file's message, of which it says what file to look at
        raise FieldError(unknown_field(name, [proto.DESCRIPTOR] * 2))
    if is_repeated(field):
        for item in val if _is_sequence(val) else (val,):
            _add(proto, field, item)
    elif field.message_type is not None:
        _fill(getattr(proto, name), field, val)
    else:
        try:
            setattr(proto, name, _scalar(field, val))
        except (TypeError, ValueError):
            raise _misfit(field, val) from None


def _add(proto: Any, field: Any, item: Any) -> None:
    """Append to a repeated field."""
    values = getattr(proto, field.name)
    if field.message_type is not None:
        _fill(values.add(), field, item)
        return
    try:
        values.append(_scalar(field, item))
    except (TypeError, ValueError):
        raise _misfit(field, item) from None


def _fill(message: Any, field: Any, value: Any) -> None:
    """Set fields of a message to those of a dictionary or of another message."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            assign_proto(message, name, item)
    elif isinstance(value, Message) and value.DESCRIPTOR.full_name == message.DESCRIPTOR.full_name:
        # by way of bytes: it may come from another caffe.proto in the process
        message.MergeFromString(value.SerializePartialToString())
    else:
        raise _misfit(field, value)


def _scalar(field: Any, value: Any) -> Any:
    """A value as protobuf takes it: no NumPy types, no names of enum values. ValueError for a name that is none."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if field.enum_type is not None and isinstance(value, str):
        if value not in field.enum_type.values_by_name:
            raise ValueError(value)
        return field.enum_type.values_by_name[value].number
    return value


def _is_sequence(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0:  # NumPy's numbers look iterable
        return False
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Message)


def _misfit(field: Any, value: Any) -> NetError:
    if field.message_type is not None:
        wanted = f"a dictionary of {field.message_type.name}'s fields"
    elif field.enum_type is not None:
        wanted = "one of " + ", ".join(field.enum_type.values_by_name)
    elif field.cpp_type == field.CPPTYPE_STRING:
        wanted = "a str"
    else:
        wanted = expected(field)
    return NetError(f"{field.name}: expected {wanted}, got {value!r}")
