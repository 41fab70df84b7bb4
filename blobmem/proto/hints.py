"""Sentences about what a text file says and what it should: used by `diagnose`, which finds the place."""

from __future__ import annotations

import difflib
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from blobmem.proto import caffe_pb2
from blobmem.proto.upgrade import V1_TYPES

INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""Least and greatest value of each kind of integer field."""

_FEW = 4  # messages beyond which a list of where a field belongs helps nobody
_MANY = 12  # and fields, beyond which a list of all of them does not
_LONGEST = 40  # characters of a value that are repeated in a message


def quoted(token: Any) -> str:
    """A token for a message: in quotes, shortened, and with what it probably is where it looks like something else."""
    if token.kind == "end":
        return "the end of the file"
    if token.kind == "string":
        return token.text if len(token.text) <= _LONGEST else token.text[:_LONGEST] + '..."'
    if token.text in ("\u201c", "\u201d", "\u2018", "\u2019"):
        return f"{token.text} (a typographic quote: use \" or ')"
    if token.text in ('"', "'"):
        return f"{token.text} (a text that does not end on its line)"
    return f"'{token.text[:_LONGEST]}'"


def expected(field: Any) -> str:
    """What a scalar field takes."""
    if field.cpp_type in INTEGERS:
        low, high = INTEGERS[field.cpp_type]
        return f"a whole number from {low} to {high}"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return "a number"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "true or false"
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return "one of " + ", ".join(value.name for value in field.enum_type.values) + ", without quotes"
    return "a text in quotes"


def bad_value(field: Any, token: Any) -> str:
    """What is wrong with `token` as a value of the scalar `field`."""
    if token.kind == "mark" and token.text in ("{", "<"):
        return f"{field.name} is a single value and holds no fields: expected {expected(field)}"
    if token.kind in ("end", "mark"):
        return f"{field.name} has no value: expected {expected(field)}, found {quoted(token)}"
    said = f"{field.name} is {quoted(token)}: expected {expected(field)}"
    word = token.text.strip("\"'")
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        if field.enum_type.name == "LayerType" and word in V1_TYPES.values():
            return f"{field.name} is {quoted(token)}: types in quotes go with `layer {{`, `layers {{` is the old form"
        near = _near_enum_value(field, word)
        return f"{said}; did you mean {near}?" if near else said
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and token.kind == "word":
        return f'{said}: write {field.name}: "{V1_TYPES.get(word) or word}"'
    return said


def unknown_field(name: str, path: list[Any]) -> str:
    """What to say of a field that the last of the message types in `path` does not have; the first is the file's."""
    descriptor = path[-1]
    said = f"unknown field '{name}' in {descriptor.name}"
    if any(name in outer.fields_by_name for outer in path[:-1]):
        return f"{said}: is a '}}' missing before it?"
    for other, what in (("SolverParameter", "solvers"), ("NetParameter", "nets")):
        if len(path) == 1 and name in getattr(caffe_pb2, other).DESCRIPTOR.fields_by_name:
            return f"{said}: it is a field of {what}, is this the right file?"
    inner = _inner_fields(descriptor)
    if len(inner.get(name, ())) in range(1, _FEW + 1):
        return f"{said}: it belongs in {_either(inner[name])}"
    near = difflib.get_close_matches(name, descriptor.fields_by_name, n=3)
    if near:
        return f"{said}; did you mean {_either(near)}?"
    near = difflib.get_close_matches(name, inner, n=1)
    if near:
        return f"{said}; did you mean '{near[0]}' in {_either(inner[near[0]][:_FEW])}?"
    if len(descriptor.fields) <= _MANY:
        return f"{said}, which has {', '.join(field.name for field in descriptor.fields)}"
    return said


def _inner_fields(descriptor: Any) -> dict[str, list[str]]:
    """Name of each field of the messages directly inside, to the fields that hold those messages."""
    inner: dict[str, list[str]] = {}
    for field in descriptor.fields:
        for name in field.message_type.fields_by_name if field.message_type is not None else ():
            inner.setdefault(name, []).append(field.name)
    return inner


def _either(names: list[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def _near_enum_value(field: Any, word: str) -> str:
    names = [value.name for value in field.enum_type.values]
    near = difflib.get_close_matches(word.upper(), names, n=1)
    return near[0] if near else ""
