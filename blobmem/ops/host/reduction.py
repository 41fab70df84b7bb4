"""Rows of values reduced to one value each.

`operation` is SUM, ASUM (of absolute values), SUMSQ (of squares) or MEAN; the result is times `coeff`. Sums are taken
in double precision, in parts that depend on the shape alone.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.channels import spread_of, sum_of
from blobmem.ops.host.compiled import kernel, reducing_part
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_PARTS = 64
_RUN = 4096
_GRAIN = 32768
_SUM, _ASUM, _SUMSQ = 0, 1, 2
_KINDS = {"SUM": _SUM, "MEAN": _SUM, "ASUM": _ASUM, "SUMSQ": _SUMSQ}


def _scale(operation: str, coeff: float, size: int) -> float:
    """What a sum is multiplied by."""
    return coeff / max(1, size) if operation == "MEAN" else float(coeff)


@reducing_part
def _absolute_sum_of(x):
    total = 0.0
    for i in range(x.size):
        total += abs(x[i])
    return total


@kernel
def _reduce(start, stop, x, size, parts, kind, scale, out):
    """Items [start, stop), `parts` of about equal length to a row."""
    for item in range(start, stop):
        row, part = item // parts, item % parts
        end = row * size + size * (part + 1) // parts
        total = 0.0
        for first in range(row * size + size * part // parts, end, _RUN):
            run = x[first : min(first + _RUN, end)]
            if kind == _SUM:
                total += sum_of(run)
            elif kind == _ASUM:
                total += _absolute_sum_of(run)
            else:
                total += spread_of(run, 0.0)
        out[item] = total * scale


@op
def reduction_forward(x: np.ndarray, y: np.ndarray, *, operation: str, coeff: float) -> None:
    """y[n] = what the operation makes of x[n]; x (rows, values), y (rows,)."""
    rows, size = x.shape
    kind, scale = _KINDS[operation], _scale(operation, coeff, size)
    # a few long rows would keep only as many threads busy
    parts = max(1, _PARTS // max(1, rows))
    out = y if parts == 1 else np.empty(rows * parts)
    parallel_for(_reduce, rows * parts, x.reshape(-1), size, parts, kind, scale, out,
                 grain=1 + _GRAIN * parts // max(1, size))  # fmt: skip
    if parts > 1:
        y[...] = out.reshape(rows, parts).sum(axis=1)


@kernel
def _spread(start, stop, x, dy, dx, size, parts, kind, scale):
    """Items [start, stop), `parts` of about equal length to a row."""
    t = dx.dtype.type
    for item in range(start, stop):
        row, part = item // parts, item % parts
        first, end = row * size + size * part // parts, row * size + size * (part + 1) // parts
        value = t(dy[row] * scale)
        xs, dxs = x[first:end], dx[first:end]
        for i in range(dxs.size):
            if kind == _SUM:
                dxs[i] = value
            elif kind == _SUMSQ:
                dxs[i] = 2 * value * xs[i]
            else:
                dxs[i] = value if xs[i] > 0 else (-value if xs[i] < 0 else t(0))


@op
def reduction_backward(x: np.ndarray | None, dy: np.ndarray, dx: np.ndarray, *, operation: str, coeff: float) -> None:
    """dx (rows, values) of `reduction_forward` from dy (rows,); x is None for SUM and MEAN, which do not need it."""
    rows, size = dx.shape
    kind, scale = _KINDS[operation], _scale(operation, coeff, size)
    parts = max(1, size // _GRAIN)
    flat = dx.reshape(-1)
    parallel_for(_spread, rows * parts, flat if x is None else x.reshape(-1), dy, flat, size, parts, kind, scale,
                 grain=1 + _GRAIN * parts // max(1, size))  # fmt: skip
