"""How ops are declared, and found by name.

    from blobmem.ops.registry import op

    @op
    def relu_forward(x, y, *, slope): ...

    @op(workspace=lambda x, w, b, y, **attributes: 4 * w.size)
    def conv_forward(x, w, b, y, *, ws, stride): ...

An op takes its operands positionally (C-contiguous arrays, None for an absent one) and its attributes as keywords.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

Workspace = Callable[..., int]

FAMILIES = {"host": "blobmem.ops.host", "cuda": "blobmem.ops.cuda"}
"""Device family -> its package, whose MODULES register the ops when they are imported."""

_tables: dict[str, dict[str, Op]] = {}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array's shape and dtype without its memory: what a workspace rule is asked with, before anything is allocated.

    A NumPy array has the same attributes, so a rule serves both.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, array: Any) -> ArraySpec:
        """The spec of anything that has `shape` and `dtype`."""
        return cls(tuple(array.shape), np.dtype(array.dtype))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that such an array takes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one device family."""

    name: str
    fn: Callable[..., None]
    workspace: Workspace | None = None
    family: str = "host"
    captures: bool = True
    before: Callable[..., int] | None = None
    takes: Callable[..., bool] | None = None

    def __call__(self, *operands: Any, **attributes: Any) -> None:
        self.fn(*operands, **attributes)

    def workspace_bytes(self, *operands: Any, **attributes: Any) -> int:
        """Bytes of scratch that the call needs while it runs; 0 where the op declares none (it then takes no `ws`).

        The operands are `ArraySpec` (or arrays), None for an absent one.
        """
        return 0 if self.workspace is None else int(self.workspace(*operands, **attributes))


@overload
def op(fn: Callable[..., None]) -> Callable[..., None]: ...
@overload
def op(
    *,
    workspace: Workspace | None = None,
    family: str = "host",
    captures: bool = True,
    before: Callable[..., int] | None = None,
    takes: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]: ...
def op(
    fn: Callable[..., None] | None = None,
    *,
    workspace: Workspace | None = None,
    family: str = "host",
    captures: bool = True,
    before: Callable[..., int] | None = None,
    takes: Callable[..., bool] | None = None,
) -> Any:
    """Register a function as the op of its name, and hand the function back unchanged.

    `workspace` maps the call's operands and attributes to bytes (of any family but "host" also a keyword `device`);
    the op then takes a keyword `ws`, a uint8 array of at least that many bytes, aligned to 64, whose contents are
    undefined. With `captures` what the op queues on a device depends on nothing but its arguments. Without, `before`
    may be what it does first, called with the same: told a number that this gave (or -1, of which nothing is to come)
    as the keyword `begun`, the op only queues kernels, the same in every run, whose arguments follow from that number.
    Where the op runs in place of several others, `takes` may say, asked as `workspace` is, whether it does for these
    operands on that device.
    Raises ValueError when the name is taken.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        table = _tables.setdefault(family, {})
        if name in table and table[name].fn.__module__ != function.__module__:
            other = table[name].fn.__module__
            raise ValueError(f"{family} has two ops named {name!r}: {other} and {function.__module__}; rename one")
        table[name] = Op(name, function, workspace, family, captures, before, takes)
        return function

    return register if fn is None else register(fn)


@functools.cache
def table(family: str = "host") -> dict[str, Op]:
    """All ops of a device family by name. The first call imports them (for "host", the compiler: about half a second).

    Raises KeyError for a family that is not known.
    """
    if family not in FAMILIES:
        raise KeyError(f"no ops for device family {family!r}; known are {', '.join(sorted(FAMILIES))}")
    for module in importlib.import_module(FAMILIES[family]).MODULES:
        importlib.import_module(f"{FAMILIES[family]}.{module}")
    return _tables[family]
