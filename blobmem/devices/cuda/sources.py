"""Kernel sources: where they are, which kernels they have, and what each is called with. Needs no GPU.

A source is C++ in which `D` is what the net's arrays are made of, and `T`, float or double, what is reckoned with (see
common.cuh). The kernels' parameters are read off the source itself, so that what a launch packs cannot differ from what
the kernel takes.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

FOLDER = Path(__file__).parents[2] / "ops" / "cuda" / "source"
DEFINES = {"float32": [], "float64": ["DOUBLE"], "float16": ["FLOAT16"], "bfloat16": ["BFLOAT16"]}
"""The macros to define, by the name of a net's dtype."""

DIMS = 8  # of `Dims` in common.cuh
TABLE = 500  # of `Table` in update.cu

_SHARED = r"WITH_SHARED\((?P<shared>\w+)\)\s+"
_BOUNDS = rf"(?:IN_CLUSTERS\s+)?(?:{_SHARED})?__launch_bounds__\([^()]*(?:\([^()]*\)[^()]*)?\)\s*"
_KERNEL = re.compile(rf'extern\s+"C"\s+__global__\s+void\s+(?:{_BOUNDS})?(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)')
_FORMATS = {
    "i64": "q", "int": "i", "unsigned": "I", "float": "f", "double": "d",
    "Dims": f"0q{8 * DIMS}s", "Table": f"0q{8 * TABLE}s",  # on an address that an i64 could have
}  # fmt: skip


class Signature:
    """What a kernel takes.

    Attributes:
        types: a word for each parameter: "*" for a pointer, else one of i64, int, unsigned, float, double, T, Dims,
            Table.
        shared: bytes of shared memory that a launch gives it, beside what it has by itself.
        flat: gives the arguments of a launch as the packer wants them.
    """

    __slots__ = ("flat", "name", "shared", "types")

    def __init__(self, name: str, types: tuple[str, ...], shared: int = 0) -> None:
        self.name = name
        self.types = types
        self.shared = shared
        self.flat = _flattener(name, types)

    def packer(self, dtype: np.dtype) -> struct.Struct:
        """Packs a launch's arguments as the kernel finds them, Dims and a Table as bytes."""
        formats = {**_FORMATS, "*": "P", "T": "d" if dtype == np.float64 else "f"}
        return struct.Struct("".join(formats[word] for word in self.types))


def _flattener(kernel: str, types: tuple[str, ...]) -> Callable[[Sequence[Any]], list[Any]]:
    """What gives a launch's arguments as the packer wants them. TypeError if there are not as many as parameters.

    Written out for each kernel: it is called for every launch, and a loop over the parameters takes twice as long.
    """

    def wrong(count: int) -> NoReturn:
        raise TypeError(f"kernel {kernel} takes {len(types)} arguments, not {count}")

    shapes = {
        "*": "(a if type(a := given[{}]) is int else 0 if a is None else a.address)",
        "Dims": "(a if type(a := given[{}]) is bytes else dims(tuple(a)))",
    }
    items = ", ".join(shapes.get(word, "given[{}]").format(place) for place, word in enumerate(types))
    code = f"lambda given: [{items}] if len(given) == {len(types)} else wrong(len(given))"
    flat: Callable[[Sequence[Any]], list[Any]] = eval(code, {"dims": dims, "wrong": wrong})
    return flat


@functools.lru_cache(4096)
def dims(values: tuple[int, ...]) -> bytes:
    """Up to 8 integers as the bytes of a Dims."""
    return struct.pack(f"{DIMS}q", *values, *[0] * (DIMS - len(values)))


def names() -> list[str]:
    """All sources, by the name that `read` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@functools.cache
def read(name: str) -> str:
    """The source's text, its own headers put in their places."""
    text = (FOLDER / f"{name}.cu").read_text("utf-8")
    seen: set[str] = set()

    def put(match: re.Match[str]) -> str:
        header = match[1]
        if header in seen:
            return ""
        seen.add(header)
        return _INCLUDE.sub(put, (FOLDER / header).read_text("utf-8"))

    return _INCLUDE.sub(put, text)


_INCLUDE = re.compile(r'(?m)^#include "([\w.]+)"$')


@functools.cache
def signatures(name: str) -> dict[str, Signature]:
    """The kernels of a source."""
    text = re.sub(r"//[^\n]*", "", read(name))
    return {match["name"]: _signature(match, text) for match in _KERNEL.finditer(text)}


def _signature(match: re.Match[str], text: str) -> Signature:
    name, shared = match["name"], match["shared"] or "0"
    stated = re.search(rf"(?m)^#define {shared} +(\d+)", text)
    return Signature(name, _types(name, match["parameters"]), int(stated[1] if stated else shared))


def _types(kernel: str, parameters: str) -> tuple[str, ...]:
    words = []
    for parameter in filter(None, (part.strip() for part in parameters.split(","))):
        word = "*" if "*" in parameter else parameter.removeprefix("const ").split()[0]
        if word not in ("*", "T", *_FORMATS):
            raise ValueError(f"kernel {kernel}: a parameter is a pointer, T, {', '.join(_FORMATS)}; not '{parameter}'")
        words.append(word)
    return tuple(words)
