"""What solvers do to parameters."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.channels import spread_of
from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 32768
_PARTS = 64
_RUN = 4096


@kernel
def _sgd(start, stop, diff, data, history, rate, momentum, decay, l1, scale):
    """Elements [start, stop)."""
    t = diff.dtype.type
    diffs, values, steps = diff[start:stop], data[start:stop], history[start:stop]
    for i in range(diffs.size):
        value = values[i]
        sign = t(1) if value > 0 else (t(-1) if value < 0 else t(0))
        pull = sign if l1 else value
        step = t(momentum) * steps[i] + t(rate) * (diffs[i] * t(scale) + t(decay) * pull)
        steps[i] = step
        values[i] = value - step


@op
def sgd_update(diff: np.ndarray, data: np.ndarray, history: np.ndarray, *, rate: float, momentum: float, decay: float,
               regularization: str, scale: float) -> None:  # fmt: skip
    """history = momentum * history + rate * (scale * diff + decay * pull); data -= history.

    The pull is data itself for "L2", its sign for "L1". diff stays as it is.
    """
    parallel_for(_sgd, diff.size, diff.reshape(-1), data.reshape(-1), history.reshape(-1), float(rate), float(momentum),
                 float(decay), regularization == "L1", float(scale), grain=_GRAIN)  # fmt: skip


@kernel
def _sum_squares(start, stop, x, parts):
    """Of parts [start, stop) of about equal length."""
    for part in range(start, stop):
        end = x.size * (part + 1) // parts.size
        total = 0.0
        for first in range(x.size * part // parts.size, end, _RUN):
            total += spread_of(x[first : min(first + _RUN, end)], 0.0)
        parts[part] = total


def sum_of_squares(x: np.ndarray) -> float:
    """The sum of squares, the same for any number of threads."""
    parts = np.zeros(_PARTS)
    parallel_for(_sum_squares, _PARTS, x.reshape(-1), parts, grain=max(1, _PARTS * _GRAIN // max(1, x.size)))
    return float(parts.sum())


@op
def sumsq(diff: np.ndarray, out: np.ndarray) -> None:
    """out[0] += the sum of diff's squares, itself taken in double precision."""
    out.reshape(-1)[0] += sum_of_squares(diff)
