"""Where and why a text does not parse as a message: for people who write prototxt by hand.

protobuf's own parser decides what is valid; its complaints name a column and a type and differ from release to
release. When it has refused a text, `find_problem` reads the text once more, with the schema at hand, up to the first
thing that is wrong, and says it in the terms of the file: which layer, which field, what was expected, what is near.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from blobmem.proto import hints
from blobmem.proto.compat import is_repeated, is_required

# The words and strings of protobuf's text format; comments and blanks between them; any other character by itself.
_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[A-Za-z_][\w+-]*|(?:[\d+-]|\.\d)[\w.+-]*)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_LONG = 100_000  # tokens of a layer, beyond all without weights
_LAYERS = ("layer", "layers")


class Problem(NamedTuple):
    """The first thing wrong in a text.

    Attributes:
        line, column: where, both counted from 1.
        context: the layer and the message inside it, as in "layer 'conv1', convolution_param"; empty at the top.
        what: what is wrong and what to do; empty where only the place was asked for.
    """

    line: int
    column: int
    context: str
    what: str

    def __str__(self) -> str:
        return f"{self.context}: {self.what}" if self.context else self.what


class Token(NamedTuple):
    """A piece of text: its kind (string, word, mark or end), itself, and its offset."""

    kind: str
    text: str
    at: int


class _Frame(NamedTuple):
    """A message that is open while reading: its field's name, type, first offset, and rank among its siblings."""

    name: str
    descriptor: Any
    body: int
    rank: int


class _Found(Exception):
    def __init__(self, at: int, what: str) -> None:
        self.at = at
        self.what = what


def tokens(text: str, start: int = 0) -> Iterator[Token]:
    """The tokens of `text` from offset `start` on, without blanks and comments, then a token of kind "end"."""
    for match in _TOKEN.finditer(text, start):
        if match.lastgroup != "skip":
            yield Token(str(match.lastgroup), match.group(), match.start())
    yield Token("end", "", len(text))


def position(text: str, at: int) -> tuple[int, int]:
    """Line and column, from 1, of an offset in `text`."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def find_problem(text: str, descriptor: Any, stop: int | None = None) -> Problem | None:
    """The first problem of `text` as a message of type `descriptor`, None if there is none that this module knows.

    `stop`, an offset: if nothing is wrong before it, a Problem with the context there and without a sentence.
    """
    reader = _Reader(text, descriptor, stop)
    try:
        reader.read()
    except _Found as found:
        line, column = position(text, found.at)
        return Problem(line, column, reader.context(), found.what)
    return None


class _Reader:
    """Reads a text along the schema until something is wrong; `path` then tells where it was."""

    def __init__(self, text: str, descriptor: Any, stop: int | None) -> None:
        self.text = text
        self.stop = stop
        self.path = [_Frame("", descriptor, 0, 0)]
        self.stream = tokens(text)
        self.token = next(self.stream)

    def read(self) -> None:
        self._fields("", 0)

    def context(self) -> str:
        """What `Problem.context` holds, for the place where reading ended."""
        for depth, frame in enumerate(self.path):
            if depth and frame.name in _LAYERS:
                inner = ".".join(inner.name for inner in self.path[depth + 1 :] if inner.name != "layer")
                name = _layer_name(self.text, frame)
                label = f"layer '{name}'" if name else f"unnamed {frame.name} {frame.rank}"
                return f"{label}, {inner}" if inner else label
        return ".".join(frame.name for frame in self.path[1:])

    def _fail(self, at: int, what: str) -> NoReturn:
        raise _Found(at, what)

    def _next(self) -> Token:
        token = self.token
        if self.stop is not None and token.at >= self.stop:
            self._fail(token.at, "")
        if token.kind != "end":
            self.token = next(self.stream)
        return token

    def _accept(self, *marks: str) -> bool:
        if self.token.kind == "mark" and self.token.text in marks:
            self._next()
            return True
        return False

    def _fields(self, closer: str, opened: int) -> None:
        """Reads the fields of the innermost message, through its closing bracket (or, at the top, all the text)."""
        descriptor = self.path[-1].descriptor
        seen: dict[str, int] = {}
        while True:
            token = self._next()
            if token.kind == "end" and closer:
                self._fail(opened, f"this bracket is never closed: a '{closer}' is missing")
            if token.kind == "end" or (token.kind == "mark" and token.text == closer):
                break
            self._field(descriptor, token, seen)
            if not self._accept(","):
                self._accept(";")
        for field in descriptor.fields:
            if is_required(field) and field.name not in seen:
                self._fail(token.at, f"'{field.name}' is missing: {descriptor.name} cannot do without it")

    def _field(self, descriptor: Any, token: Token, seen: dict[str, int]) -> None:
        if token.kind == "mark" and token.text in ("}", ">"):
            self._fail(token.at, f"'{token.text}' closes nothing that is open: remove it, or look for a bracket above")
        if token.kind != "word":
            self._fail(token.at, f"expected the name of a field, found {hints.quoted(token)}")
        field = descriptor.fields_by_name.get(token.text)
        if field is None:
            self._fail(token.at, hints.unknown_field(token.text, [frame.descriptor for frame in self.path]))
        rank = seen[field.name] = seen.get(field.name, 0) + 1
        if rank > 1 and not is_repeated(field):
            self._fail(token.at, f"'{field.name}' is given twice: it takes one value, remove one of the two")
        if not self._accept(":") and field.message_type is None:
            self._fail(self.token.at, f"expected ':' after '{field.name}', found {hints.quoted(self.token)}")
        if is_repeated(field) and self._accept("["):
            self._list(field, rank)
        else:
            self._value(field, rank)

    def _list(self, field: Any, rank: int) -> None:
        if self._accept("]"):
            return
        while True:
            self._value(field, rank)
            if self._accept("]"):
                return
            if not self._accept(","):
                self._fail(self.token.at, f"expected ',' or ']' in {field.name}, found {hints.quoted(self.token)}")

    def _value(self, field: Any, rank: int) -> None:
        token = self._next()
        if field.message_type is None:
            self._scalar(field, token)
        elif token.kind == "mark" and token.text in ("{", "<"):
            self.path.append(_Frame(field.name, field.message_type, token.at + 1, rank))
            self._fields("}" if token.text == "{" else ">", token.at)
            self.path.pop()
        else:
            self._fail(token.at, f"expected '{{' after '{field.name}', which holds fields, found {hints.quoted(token)}")

    def _scalar(self, field: Any, token: Token) -> None:
        if not _accepts(field, token):
            self._fail(token.at, hints.bad_value(field, token))
        while token.kind == "string" and self.token.kind == "string":  # pieces of one string
            self._next()


def _accepts(field: Any, token: Token) -> bool:
    """Whether protobuf's parser takes `token` as a value of a scalar field."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return token.kind == "string"
    try:
        if field.cpp_type in hints.INTEGERS:
            low, high = hints.INTEGERS[field.cpp_type]
            text_format.ParseInteger(token.text, is_signed=low < 0, is_long=high > 2**32)
        elif field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            text_format.ParseFloat(token.text)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            text_format.ParseBool(token.text)
        else:
            text_format.ParseEnum(field, token.text)
    except ValueError:
        return False
    return True


def _layer_name(text: str, frame: _Frame) -> str:
    """The name that a layer gives itself in its body, perhaps after the problem; empty if none, or only far below."""
    inside: list[str] = []
    last = before = Token("mark", "", 0)
    for token in itertools.islice(tokens(text, frame.body), _LONG):
        # V0 keeps a layer's name one message further inside.
        if token.kind == "string" and (before.text, last.text) == ("name", ":") and inside in ([], ["layer"]):
            return token.text[1:-1]
        if token.kind == "mark" and token.text in ("{", "<"):
            inside.append(before.text if last.text == ":" else last.text)
        elif token.kind == "mark" and token.text in ("}", ">"):
            if not inside:
                return ""
            inside.pop()
        before, last = last, token
    return ""
