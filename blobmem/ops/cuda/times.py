"""How long calls take on a GPU: measured when a net is trained in less memory than it needs, and kept with the plans
of convolutions."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from blobmem.dtypes import is_half
from blobmem.ops.call import Call
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import TIME, Choice, Registry
from blobmem.ops.cuda.cudnn import Cudnn


class Key(NamedTuple):
    """What a call's time depends on.

    Attributes:
        kind: the op, and a digest of all but how many items there are: shapes without their first axes, dtypes, which
            arrays lie channels last, attributes.
        nbytes: of its operands, which says how many.
        math: which file it is in, as of a convolution's key.
    """

    kind: str
    nbytes: int
    math: str

    @property
    def text(self) -> str:
        """The key in a file of its math."""
        return f"{TIME} {self.kind} {self.nbytes}"


def key_of(call: Call, device: Any) -> Key:
    """The key of a call of an op, as it runs on a device."""
    arrays: list[Any] = []
    nbytes, math = 0, device.math
    for operand in call.operands:
        if operand is None:
            arrays.append(None)
            continue
        shape, dtype = operand.op_shape, operand.blob.dtype
        size = dtype.itemsize
        for length in shape:
            size *= length
        nbytes += size
        name, half = _named(dtype)
        math = name if half else math
        arrays.append((shape[1:], name, operand.form is not None))
    names = (name for name, value in call.attributes.items() if name == "layout" or _matters(value))
    attributes = tuple((name, call.attributes[name]) for name in sorted(names))
    exact = getattr(device, "deterministic", False) and "conv_" in str(call.op)
    return Key(_kind(str(call.op), tuple(arrays), attributes, exact), nbytes, math)


@functools.cache
def _named(dtype: Any) -> tuple[str, bool]:
    """A dtype's name, and whether it is a half: NumPy takes long to say."""
    return dtype.name, is_half(dtype)


def _matters(value: Any) -> bool:
    """Whether a time may depend on an attribute: on sizes and switches, not on factors or names."""
    return isinstance(value, int) or (isinstance(value, tuple) and all(isinstance(each, int) for each in value))


@functools.lru_cache(1 << 14)
def _kind(op: str, *rest: Any) -> str:
    return f"{op} {hashlib.sha256(repr(rest).encode()).hexdigest()[:10]}"


class Known:
    """The times that are known of a GPU model: measured with any version of cuDNN, the newest first."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._of_math: dict[str, dict[str, dict[int, float]]] = {}

    def find(self, key: Key) -> tuple[int, float] | None:
        """The bytes that a call of that kind had, as nearly as many as the key as is known, and the ms that it took."""
        if key.math not in self._of_math:
            self._of_math[key.math] = self._read(key.math)
        times = self._of_math[key.math].get(key.kind)
        if times is None:
            return None
        nbytes = min(times, key=lambda nbytes: abs(nbytes - key.nbytes))
        return nbytes, times[nbytes]

    def _read(self, math: str) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for registry in reversed(algorithms.registries(self._model, math)):
            for text, choice in registry.choices().items():
                if choice.plan == TIME:
                    kind, _, nbytes = text.removeprefix(f"{TIME} ").rpartition(" ")
                    found[kind][int(nbytes)] = choice.ms
        return found


def add(device: Any, measured: Mapping[Key, Sequence[float]]) -> None:
    """Keep the median of the ms that calls took, and of what was known of the same."""
    by_math: dict[str, dict[str, Choice]] = defaultdict(dict)
    for key, ms in measured.items():
        before = _registry(device, key.math).choices().get(key.text)
        ms = [*ms, before.ms] if before else ms
        by_math[key.math][key.text] = Choice(TIME, 0, 0, round(median(ms), 5))
    for math, times in by_math.items():
        _registry(device, math).add(times)


def _registry(device: Any, math: str) -> Registry:
    return algorithms.registry(device.model, device.library("cudnn", Cudnn).version, math)
