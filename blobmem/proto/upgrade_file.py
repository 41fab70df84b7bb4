"""Files of nets and solvers in old formats, written anew in today's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.diagnose import tokens
from blobmem.proto.files import MAX_BINARY, MAX_TEXT, PathLike, read_bytes, write_atomic
from blobmem.proto.text import decode, is_binary, parse_text, read_binary, write_binary, write_text
from blobmem.proto.upgrade import Upgrade, upgrade_net, upgrade_solver
from blobmem.proto.wire import share_of

NET, SOLVER = caffe_pb2.NetParameter, caffe_pb2.SolverParameter


@dataclass(slots=True)
class Upgraded:
    """What became of a file.

    Attributes:
        kind: "net" or "solver".
        binary: whether the two files are binary (caffemodel) rather than text (prototxt).
        done: what was brought up to date, and what was ignored.
    """

    kind: str
    binary: bool
    done: Upgrade


def upgrade_file(source: PathLike, target: PathLike) -> Upgraded:
    """Write the net or the solver in `source` to `target` in today's format: text as text, binary as binary.

    Which of them it is, its contents say. Where nothing has to be brought up to date `target` gets the very bytes of
    `source`, otherwise the comments of a text are lost. The two may be one file. NetError if `source` cannot be read,
    or `target` not written; `target` is then as it was.
    """
    data = read_bytes(source, MAX_BINARY)
    where = os.fspath(source)
    binary = is_binary(data)
    message_class = (_class_of_binary if binary else _class_of_text)(data, where)
    if binary:
        message = read_binary(source, message_class)
    else:
        message = parse_text(decode(data, where, message_class.DESCRIPTOR.name), message_class, where)
    kind = "net" if message_class is NET else "solver"
    try:
        done = upgrade_net(message) if kind == "net" else upgrade_solver(message)
    except NetError as error:
        raise NetError(f"{where}: {error}") from None
    if not done.steps:
        write_atomic(target, data)
    else:
        (write_binary if binary else write_text)(message, target)
    return Upgraded(kind, binary, done)


def _class_of_binary(data: bytes, where: str) -> Any:
    """The message that most of the file's fields fit; a net where several do. NetError for a solver's state."""
    result = max((NET, SOLVER, caffe_pb2.SolverState), key=lambda kind: share_of(data, kind.DESCRIPTOR))
    if result is caffe_pb2.SolverState:
        raise NetError(f"{where} looks like a solver's state (solverstate), which has had one format: use it as it is")
    return result


def _class_of_text(data: bytes, where: str) -> Any:
    """The message whose own fields are more in the text; a net where neither's are."""
    if len(data) > MAX_TEXT:
        raise NetError(f"{where} is larger than {MAX_TEXT / 2**20:.0f} MiB, the most that is read of a text")
    net, solver = (set(kind.DESCRIPTOR.fields_by_name) for kind in (NET, SOLVER))
    names = set(_top_fields(data.decode("latin-1")))
    return SOLVER if len(names & (solver - net)) > len(names & (net - solver)) else NET


def _top_fields(text: str) -> Iterator[str]:
    """The words outside of all braces: names of fields, and now and then a value."""
    depth = 0
    for token in tokens(text):
        if token.kind == "mark":
            depth += (token.text in "{<[") - (token.text in "}>]")
        elif token.kind == "word" and depth == 0:
            yield token.text
