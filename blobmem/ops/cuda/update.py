"""What solvers do to parameters.

In every update g = scale * diff + decay * pull, where the pull is data itself for "L2" and its sign for "L1"; diff
stays as it is. Each is one pass over its arrays. They take the arrays of any number of parameters, those of one, in the
host op's order, after those of another, and have one launch for about a hundred parameters; every element comes out as
from its parameter alone. `multipliers` has for each parameter in turn what rate and decay are multiplied by, float32
numbers; with none they are all 1.

A parameter of halves has a master of float32, which takes data's part, and data becomes its rounding. Of float16 it is
one more array, and where data is no longer that, it begins with data. Of bfloat16, the upper half of a float32, one
more array of int16 is enough: what is to be added to data's bits, as upper half, for the master's; in the middle
between two, where it is rounded down, that is too large, and the master the next smaller one. With `scaled` each has,
as its last array, the scale of the losses (`next_scale`), by which diff is divided; where a gradient was found that is
no number, nothing happens. With `unless_wrong` nothing happens while a bad value that a kernel has found waits to be
raised; if that is the address of an int64 in page-locked memory of the host, 1 is then added there (GUARDED is none).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.sources import TABLE
from blobmem.dtypes import is_half
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import op

GUARDED = 1

_KERNELS = Kernels("update")
_CHUNK = 16 * THREADS  # elements for a block; of `sumsq`, a multiple of it
_MOST_PARTS = 1024  # of `sumsq`, about: more where there are many arrays


class _Launch(NamedTuple):
    """The blocks of a launch, and its table of so many entries."""

    blocks: int
    table: bytes
    entries: int


def _launches(
    width: int, arrays: Sequence[CudaArray], chunk: int = _CHUNK, multipliers: tuple[float, ...] = ()
) -> list[_Launch]:
    """What to launch for entries of `width` arrays of one size each, and of two multipliers, if there are any."""
    sizes = tuple([array.size for array in arrays[::width]])
    return _tables(width, chunk, sizes, tuple([array.address for array in arrays]), multipliers)


@functools.lru_cache(maxsize=64)
def _tables(
    width: int, chunk: int, sizes: tuple[int, ...], addresses: tuple[int, ...], multipliers: tuple[float, ...]
) -> list[_Launch]:
    """See `_launches`. Entries of different launches may share arrays, those of one may not."""
    more = struct.unpack(f"{len(multipliers) // 2}q", struct.pack(f"{len(multipliers)}f", *multipliers))
    entries = [
        (size, addresses[at * width : (at + 1) * width], more[at : at + 1]) for at, size in enumerate(sizes) if size
    ]
    apart = len({address for _, group, _ in entries for address in group}) == len(entries) * width
    most = TABLE // (2 + width + bool(more)) if apart else 1
    launches = []
    for at in range(0, len(entries), most):
        some = entries[at : at + most]
        firsts = list(accumulate((-(-size // chunk) for size, *_ in some), initial=0))
        words = [*firsts[:-1], *(size for size, *_ in some)]
        words += [word for _, group, last in some for word in (*group, *last)]
        launches.append(_Launch(firsts[-1], struct.pack(f"{len(words)}q", *words), len(some)))
    return launches


def _update(kernel: str, histories: int, arrays: Sequence[CudaArray], multipliers: tuple[float, ...],
            regularization: str, scaled: bool, unless_wrong: int, *numbers: float) -> None:  # fmt: skip
    """Run a kernel over all elements of the arrays, those of a parameter being gradient, data, histories and so on."""
    width, scaling = 2 + histories + is_half(arrays[0].dtype), None
    flag = arrays[0].device.faults.flag if unless_wrong else None
    if scaled:
        scaling = arrays[width]
        arrays = [array for at, array in enumerate(arrays) if at % (width + 1) < width]
    left_out = unless_wrong if unless_wrong != GUARDED else None
    multipliers = multipliers or (1.0, 1.0) * (len(arrays) // width)
    for blocks, table, count in _launches(width, arrays, _CHUNK, multipliers):
        given = table, count, _CHUNK, regularization == "L1", scaling, flag, left_out
        _KERNELS.run(arrays[0], kernel, blocks, THREADS, *given, *numbers)
        left_out = None


@op(family="cuda")
def sgd_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
               momentum: float, scaled: bool = False,
               multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """history = momentum * history + rate * g; data -= history."""
    _update("sgd", 1, arrays, multipliers, regularization, scaled, unless_wrong, decay, scale, rate, momentum)


@op(family="cuda")
def nesterov_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
                    momentum: float, scaled: bool = False,
                    multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """As `sgd_update`, but data -= (1 + momentum) * history - momentum * old history (Nesterov 1983)."""
    _update("nesterov", 1, arrays, multipliers, regularization, scaled, unless_wrong, decay, scale, rate, momentum)


@op(family="cuda")
def adagrad_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
                   delta: float, scaled: bool = False,
                   multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """history += g^2; data -= rate * g / (sqrt(history) + delta) (Duchi et al. 2011)."""
    _update("adagrad", 1, arrays, multipliers, regularization, scaled, unless_wrong, decay, scale, rate, delta)


@op(family="cuda")
def rmsprop_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
                   rms_decay: float, delta: float, scaled: bool = False,
                   multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """history = rms_decay * history + (1 - rms_decay) * g^2; data -= rate * g / (sqrt(history) + delta) (Tieleman and
    Hinton 2012)."""
    numbers = decay, scale, rate, rms_decay, delta
    _update("rmsprop", 1, arrays, multipliers, regularization, scaled, unless_wrong, *numbers)


@op(family="cuda")
def adadelta_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
                    momentum: float, delta: float, scaled: bool = False,
                    multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """gradients = momentum * gradients + (1 - momentum) * g^2; u = g * sqrt((updates + delta) / (gradients + delta));
    updates = momentum * updates + (1 - momentum) * u^2; data -= rate * u (Zeiler 2012)."""
    numbers = decay, scale, rate, momentum, delta
    _update("adadelta", 2, arrays, multipliers, regularization, scaled, unless_wrong, *numbers)


@op(family="cuda")
def adam_update(*arrays: CudaArray, decay: float, regularization: str, scale: float, rate: float,
                momentum: float, momentum2: float, delta: float, scaled: bool = False,
                multipliers: tuple[float, ...] = (), unless_wrong: int = 0) -> None:  # fmt: skip
    """first = momentum * first + (1 - momentum) * g; second = momentum2 * second + (1 - momentum2) * g^2;
    data -= rate * first / (sqrt(second) + delta) (Kingma and Ba 2015; the rate has the correction in it)."""
    numbers = decay, scale, rate, momentum, momentum2, delta
    _update("adam", 2, arrays, multipliers, regularization, scaled, unless_wrong, *numbers)


def _chunk(arrays: Sequence[Any]) -> int:
    """Elements for a block of `sumsq`: by the sizes alone, so that every card adds up in the same order."""
    return _CHUNK * max(1, -(-sum(array.size for array in arrays) // (_CHUNK * _MOST_PARTS)))


def _room(*specs: Any, **attributes: Any) -> int:
    diffs = specs[:-1]
    chunk = _chunk(diffs)
    return 8 * sum(-(-diff.size // chunk) for diff in diffs)


@op(family="cuda", workspace=_room)
def sumsq(*arrays: CudaArray, ws: CudaArray) -> None:
    """out[0] += the sum of the squares of all diffs, which come before it, itself taken in double precision; out is
    float32 or float64."""
    *diffs, out = arrays
    outs = (out, None) if out.dtype == np.float64 else (None, out)
    chunk = _chunk(diffs)
    launches = _launches(1, diffs, chunk)
    total = sum(launch.blocks for launch in launches)
    done = 0
    for blocks, table, count in launches:
        parts = ws.address + 8 * done if total > 1 else None
        _KERNELS.run(diffs[0], "sumsq", blocks, THREADS, table, count, chunk, parts, *outs)
        done += blocks
    if total > 1:
        _KERNELS.run(diffs[0], "add_parts", 1, THREADS, ws, total, *outs)


@op(family="cuda")
def fill_scaled(scaling: CudaArray, y: CudaArray, *, value: float) -> None:
    """y = value times the scale of the losses."""
    _KERNELS.over(y, "fill_scaled", y.size, scaling, y, y.size, value)


@op(family="cuda")
def find_bad(*arrays: CudaArray) -> None:
    """Have the last array, the scale of the losses, say so if those before it have an infinity, or what is no number;
    they are of one dtype."""
    *diffs, scaling = arrays
    for blocks, table, count in _launches(1, diffs):
        _KERNELS.run(diffs[0], "find_bad", blocks, THREADS, table, count, _CHUNK, scaling)


@op(family="cuda")
def next_scale(scaling: CudaArray) -> None:
    """The scale of the losses after a step: half of it if the step was left out, twice as much after 2000 good ones.

    scaling (4,), float32: the scale (0 stands for 2^15, to begin with), good steps since it was changed, 1 where
    `find_bad` found something, and how many steps were left out.
    """
    _KERNELS.run(scaling, "next_scale", 1, 1, scaling)
