"""Nets, solvers and models in files: reading (and bringing up to date) and writing.

Text files are prototxt; binary files are caffemodel, solverstate and binaryproto. Paths that a message holds are left
as they are. Whatever is wrong with a file is a `NetError` that starts with FILE:LINE:COLUMN where there are lines.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError, EncodeError

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.compat import is_repeated
from blobmem.proto.diagnose import find_problem, position, tokens
from blobmem.proto.files import MAX_BINARY, MAX_TEXT, PathLike, read_bytes, write_atomic
from blobmem.proto.upgrade import Upgrade, upgrade_net, upgrade_solver
from blobmem.proto.wire import share_of

_log = logging.getLogger(__name__)

_HEAD = 4096  # bytes that tell text from binary
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x19\x1b-\x1f\x7f]")  # never in a text (0x1a: DOS's end of file)
_FIRST_FIELD = re.compile(r"""(\s|\#[^\n]*(\n|\Z))*[A-Za-z_]\w*\s*([{<]|:\s*[\w"'{<\[.+-])""")


def read_net(source: PathLike | Any) -> Any:
    """A NetParameter, up to date, from a prototxt file, the text of one, or a message (which is copied).

    A string is taken for text if it has several lines or starts as a net does (`name: "x"`, `layer {`) and no file has
    that name. What had to be upgraded is logged, one line. NetError for whatever is wrong.
    """
    net, where = _read(source, caffe_pb2.NetParameter)
    return _upgraded(net, where, upgrade_net)


def read_solver(source: PathLike | Any) -> Any:
    """A SolverParameter, up to date, from a prototxt file, the text of one, or a message; see `read_net`."""
    solver, where = _read(source, caffe_pb2.SolverParameter)
    return _upgraded(solver, where, upgrade_solver)


def read_net_binary(path: PathLike) -> Any:
    """A NetParameter, up to date, from a binary file (caffemodel). NetError for whatever is wrong."""
    return _upgraded(read_binary(path, caffe_pb2.NetParameter), os.fspath(path), upgrade_net)


def read_binary(path: PathLike, message_class: Any) -> Any:
    """A message of `message_class`, as it is, from a binary file.

    NetError if the file is missing, empty, text, cut short, or holds another kind of message.
    """
    data = read_bytes(path, MAX_BINARY)
    where = os.fspath(path)
    kind = message_class.DESCRIPTOR.name
    _refuse_foreign(data, where, kind)
    text = not is_binary(data)
    if text and _FIRST_FIELD.match(data[:_HEAD].decode("latin-1")):
        raise NetError(f"{where} is a text file (prototxt), expected a binary {kind} such as a caffemodel")
    message = message_class()
    try:
        message.ParseFromString(data)
        # protobuf keeps what it does not know and is silent about it: half is far from any true file.
        parsed = share_of(data, message_class.DESCRIPTOR) > 0.5
    except (DecodeError, RecursionError, ValueError):
        parsed = False
    if not parsed and text:
        raise NetError(f"{where} is a text file, expected a binary {kind}")
    if not parsed:
        raise NetError(f"{where} is not a {kind}{_guess(data, kind)}")
    if not _is_utf8(message):
        raise NetError(f"{where} has a text that is not UTF-8 (a name, say): it is damaged, or save it anew")
    missing = message.FindInitializationErrors()
    if missing:
        raise NetError(f"{where} lacks {', '.join(missing)}: it was not written by Caffe, or is damaged")
    return message


def _is_utf8(message: Any) -> bool:
    """Whether all strings are, at any depth: parsing takes others too, and hands them out as bytes."""
    for field, value in message.ListFields():
        values = value if is_repeated(field) else (value,)
        if field.message_type is not None:
            if not all(map(_is_utf8, values)):
                return False
        elif field.type == field.TYPE_STRING and not all(isinstance(text, str) for text in values):
            return False
    return True


def write_text(message: Any, path: PathLike) -> None:
    """Writes `message` as prototxt, all or nothing. NetError if it cannot be written."""
    write_atomic(path, text_format.MessageToString(message, as_utf8=True).encode())


def write_binary(message: Any, path: PathLike) -> None:
    """Writes `message` in binary form, all or nothing. NetError if it cannot be written or exceeds protobuf's 2 GiB."""
    kind = message.DESCRIPTOR.name
    try:
        data = message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise NetError(f"{os.fspath(path)}: this {kind} cannot be written: {error}") from error
    if len(data) > MAX_BINARY:
        raise NetError(f"{os.fspath(path)}: a {kind} beyond 2 GiB does not fit the format: use HDF5 instead")
    write_atomic(path, data)


def parse_text(text: str, message_class: Any, where: str = "<text>") -> Any:
    """A message of `message_class`, as it is, from text; `where` names the text in errors (NetError)."""
    message = message_class()
    failure: Exception | None = None
    try:
        text_format.Parse(text, message)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        failure = error
    if failure is None and message.IsInitialized():
        return message
    problem = find_problem(text, message_class.DESCRIPTOR)
    if problem is not None:
        raise NetError(f"{where}:{problem.line}:{problem.column}: {problem}")
    raise NetError(_in_protobufs_words(text, message, failure, where))


def _in_protobufs_words(text: str, message: Any, failure: Exception | None, where: str) -> str:
    """What is left to say of a text that protobuf refuses for a reason that `diagnose` does not know."""
    line = failure.GetLine() if isinstance(failure, text_format.ParseError) else None
    if not isinstance(failure, text_format.ParseError) or line is None:
        return f"{where}: {failure or ', '.join(message.FindInitializationErrors()) + ' missing'}"
    column = failure.GetColumn() or 1
    lines = text.split("\n")
    stop = sum(len(before) + 1 for before in lines[: line - 1]) + column - 1
    place = find_problem(text, message.DESCRIPTOR, stop)
    context = f"{place.context}: " if place and place.context else ""
    # protobuf puts the place, and sometimes the whole line, before its sentence.
    sentence = str(failure).removeprefix(f"{line}:{column} : ").removeprefix(f"'{lines[line - 1]}': ")
    return f"{where}:{line}:{column}: {context}{sentence}"


def _read(source: PathLike | Any, message_class: Any) -> tuple[Any, str]:
    """The message that `source` is, names or spells out, and how to call it in errors."""
    kind = message_class.DESCRIPTOR.name
    if hasattr(source, "DESCRIPTOR"):
        return _copy_message(source, message_class), f"<{kind}>"
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"expected a path, a text or a {kind}, got {type(source).__name__}")
    if isinstance(source, str) and not source.strip():
        raise NetError(f"the name of the {kind}'s file is empty")
    if isinstance(source, str) and is_text(source):
        return parse_text(source, message_class), "<text>"
    where = os.fspath(source)
    return parse_text(decode(read_bytes(source, MAX_TEXT), where, kind), message_class, where), where


def is_text(source: Any) -> bool:
    """Whether a source is prototxt itself rather than the path of a file."""
    if not isinstance(source, str):
        return False
    return "\n" in source or (bool(_FIRST_FIELD.match(source)) and not os.path.exists(source))


def _copy_message(source: Any, message_class: Any) -> Any:
    """`source` as one of our messages: it may come from another caffe.proto in the process."""
    ours = message_class.DESCRIPTOR
    if source.DESCRIPTOR.full_name != ours.full_name:
        raise NetError(f"expected a {ours.name}, got a {source.DESCRIPTOR.name}")
    return message_class.FromString(source.SerializePartialToString())


def _upgraded(message: Any, where: str, upgrade: Any) -> Any:
    try:
        done: Upgrade = upgrade(message)
    except NetError as error:
        raise NetError(f"{where}: {error}") from None
    if done:
        _log.log(logging.WARNING if done.ignored else logging.INFO, "%s: %s", where, done)
    return message


def _refuse_foreign(data: bytes, where: str, kind: str) -> None:
    """NetError for a file that is neither text nor a message."""
    if not data:
        raise NetError(f"{where} is empty, expected a {kind}")
    if data.startswith(b"\x89HDF\r\n"):
        raise NetError(f"{where} is an HDF5 file, expected a {kind}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NetError(f"{where} is a text file in UTF-16, expected a {kind}: save it as UTF-8")


def is_binary(data: bytes) -> bool:
    """Whether the contents of a file are not text."""
    return _CONTROL.search(data, 0, _HEAD) is not None


def decode(data: bytes, where: str, kind: str) -> str:
    """The text of a file. NetError for a binary one, or for one that is not UTF-8 outside of its comments."""
    _refuse_foreign(data, where, kind)
    if is_binary(data):
        raise NetError(
            f"{where} is a binary file, expected the text of a {kind} (prototxt); a caffemodel is given as weights"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    # Comments in another encoding are common and harmless; names and paths in one would come out wrong.
    for token in tokens(text):
        if not token.text.isascii():
            line, column = position(text, token.at)
            raise NetError(f"{where}:{line}:{column}: this text is not UTF-8: save the file as UTF-8")
    return text


def _guess(data: bytes, kind: str) -> str:
    """What binary data that is no `kind` might be instead."""
    for name, what in (
        ("NetParameter", "a net (caffemodel)"),
        ("SolverState", "a solver's state (solverstate)"),
        ("BlobProto", "a single array (binaryproto)"),
    ):
        if name != kind and share_of(data, getattr(caffe_pb2, name).DESCRIPTOR) == 1:
            return f": it looks like {what}"
    return f", or is cut short or damaged ({len(data)} bytes): copy or download it again"
