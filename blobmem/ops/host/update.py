"""What solvers do to parameters.

In every update g = scale * diff + decay * pull, where the pull is data itself for "L2" and its sign for "L1"; diff
stays as it is. Each is one pass over its arrays. Rate and decay are first multiplied by the parameter's `multipliers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blobmem.dtypes import FIRST_SCALE
from blobmem.ops.host.channels import spread_of
from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 32768
_PARTS = 64
_RUN = 4096


@part
def _gradient(t, diff, value, decay, l1, scale):
    """scale * diff + decay * pull; the pull is the value itself, or with `l1` its sign."""
    sign = t(1) if value > 0 else (t(-1) if value < 0 else t(0))
    return diff * t(scale) + t(decay) * (sign if l1 else value)


@kernel
def _sgd(start, stop, diff, data, history, l1, decay, scale, rate, momentum):
    t = diff.dtype.type
    diffs, values, steps = diff[start:stop], data[start:stop], history[start:stop]
    for i in range(diffs.size):
        step = t(momentum) * steps[i] + t(rate) * _gradient(t, diffs[i], values[i], decay, l1, scale)
        steps[i] = step
        values[i] -= step


@kernel
def _nesterov(start, stop, diff, data, history, l1, decay, scale, rate, momentum):
    t = diff.dtype.type
    diffs, values, steps = diff[start:stop], data[start:stop], history[start:stop]
    for i in range(diffs.size):
        before = steps[i]
        step = t(momentum) * before + t(rate) * _gradient(t, diffs[i], values[i], decay, l1, scale)
        steps[i] = step
        values[i] -= (t(1) + t(momentum)) * step - t(momentum) * before


@kernel
def _adagrad(start, stop, diff, data, history, l1, decay, scale, rate, delta):
    t = diff.dtype.type
    diffs, values, squares = diff[start:stop], data[start:stop], history[start:stop]
    for i in range(diffs.size):
        gradient = _gradient(t, diffs[i], values[i], decay, l1, scale)
        square = squares[i] + gradient * gradient
        squares[i] = square
        values[i] -= t(rate) * (gradient / (math.sqrt(square) + t(delta)))


@kernel
def _rmsprop(start, stop, diff, data, history, l1, decay, scale, rate, rms_decay, delta):
    t = diff.dtype.type
    diffs, values, squares = diff[start:stop], data[start:stop], history[start:stop]
    for i in range(diffs.size):
        gradient = _gradient(t, diffs[i], values[i], decay, l1, scale)
        square = t(rms_decay) * squares[i] + (t(1) - t(rms_decay)) * (gradient * gradient)
        squares[i] = square
        values[i] -= t(rate) * (gradient / (math.sqrt(square) + t(delta)))


@kernel
def _adadelta(start, stop, diff, data, gradients, updates, l1, decay, scale, rate, momentum, delta):
    t = diff.dtype.type
    keep, take = t(momentum), t(1) - t(momentum)
    diffs, values, squares, moves = diff[start:stop], data[start:stop], gradients[start:stop], updates[start:stop]
    for i in range(diffs.size):
        gradient = _gradient(t, diffs[i], values[i], decay, l1, scale)
        square = keep * squares[i] + take * (gradient * gradient)
        squares[i] = square
        update = gradient * math.sqrt((moves[i] + t(delta)) / (square + t(delta)))
        moves[i] = keep * moves[i] + take * (update * update)
        values[i] -= t(rate) * update


@kernel
def _adam(start, stop, diff, data, first, second, l1, decay, scale, rate, momentum, momentum2, delta):
    t = diff.dtype.type
    diffs, values, means, squares = diff[start:stop], data[start:stop], first[start:stop], second[start:stop]
    for i in range(diffs.size):
        gradient = _gradient(t, diffs[i], values[i], decay, l1, scale)
        mean = t(momentum) * means[i] + (t(1) - t(momentum)) * gradient
        square = t(momentum2) * squares[i] + (t(1) - t(momentum2)) * (gradient * gradient)
        means[i] = mean
        squares[i] = square
        values[i] -= t(rate) * (mean / (math.sqrt(square) + t(delta)))


def _update(kernel, arrays, regularization, multipliers, decay, scale, rate, *numbers):
    """Run a kernel over all elements of arrays of one shape."""
    flat = [array.reshape(-1) for array in arrays]
    numbers = decay * multipliers[1], scale, rate * multipliers[0], *numbers
    parallel_for(kernel, flat[0].size, *flat, regularization == "L1", *map(float, numbers), grain=_GRAIN)


@op
def sgd_update(diff: np.ndarray, data: np.ndarray, history: np.ndarray, *, decay: float, regularization: str,
               scale: float, rate: float, momentum: float,
               multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """history = momentum * history + rate * g; data -= history."""
    _update(_sgd, (diff, data, history), regularization, multipliers, decay, scale, rate, momentum)


@op
def nesterov_update(diff: np.ndarray, data: np.ndarray, history: np.ndarray, *, decay: float, regularization: str,
                    scale: float, rate: float, momentum: float,
                    multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """As `sgd_update`, but data -= (1 + momentum) * history - momentum * old history: the step is taken back, and
    taken further from where the gradient is known (Nesterov 1983, in the form of Sutskever et al. 2013)."""
    _update(_nesterov, (diff, data, history), regularization, multipliers, decay, scale, rate, momentum)


@op
def adagrad_update(diff: np.ndarray, data: np.ndarray, history: np.ndarray, *, decay: float, regularization: str,
                   scale: float, rate: float, delta: float,
                   multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """history += g^2; data -= rate * g / (sqrt(history) + delta) (Duchi et al. 2011)."""
    _update(_adagrad, (diff, data, history), regularization, multipliers, decay, scale, rate, delta)


@op
def rmsprop_update(diff: np.ndarray, data: np.ndarray, history: np.ndarray, *, decay: float, regularization: str,
                   scale: float, rate: float, rms_decay: float, delta: float,
                   multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """history = rms_decay * history + (1 - rms_decay) * g^2; data -= rate * g / (sqrt(history) + delta) (Tieleman and
    Hinton 2012)."""
    _update(_rmsprop, (diff, data, history), regularization, multipliers, decay, scale, rate, rms_decay, delta)


@op
def adadelta_update(diff: np.ndarray, data: np.ndarray, gradients: np.ndarray, updates: np.ndarray, *, decay: float,
                    regularization: str, scale: float, rate: float, momentum: float, delta: float,
                    multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """gradients = momentum * gradients + (1 - momentum) * g^2; u = g * sqrt((updates + delta) / (gradients + delta));
    updates = momentum * updates + (1 - momentum) * u^2; data -= rate * u (Zeiler 2012)."""
    _update(
        _adadelta, (diff, data, gradients, updates), regularization, multipliers, decay, scale, rate, momentum, delta
    )


@op
def adam_update(diff: np.ndarray, data: np.ndarray, first: np.ndarray, second: np.ndarray, *, decay: float,
                regularization: str, scale: float, rate: float, momentum: float, momentum2: float,
                delta: float,
                multipliers: Sequence[float] = (1, 1)) -> None:  # fmt: skip
    """first = momentum * first + (1 - momentum) * g; second = momentum2 * second + (1 - momentum2) * g^2;
    data -= rate * first / (sqrt(second) + delta) (Kingma and Ba 2015; the rate has the correction in it)."""
    _update(
        _adam, (diff, data, first, second), regularization, multipliers, decay, scale, rate, momentum, momentum2, delta
    )


@kernel
def _sum_squares(start, stop, x, parts):
    """Of parts [start, stop) of about equal length."""
    for index in range(start, stop):
        end = x.size * (index + 1) // parts.size
        total = 0.0
        for first in range(x.size * index // parts.size, end, _RUN):
            total += spread_of(x[first : min(first + _RUN, end)], 0.0)
        parts[index] = total


def sum_of_squares(x: np.ndarray) -> float:
    """The sum of squares, the same for any number of threads."""
    parts = np.zeros(_PARTS)
    parallel_for(_sum_squares, _PARTS, x.reshape(-1), parts, grain=max(1, _PARTS * _GRAIN // max(1, x.size)))
    return float(parts.sum())


@op
def sumsq(diff: np.ndarray, out: np.ndarray) -> None:
    """out[0] += the sum of diff's squares, itself taken in double precision."""
    out.reshape(-1)[0] += sum_of_squares(diff)


# What losses of halves are multiplied by; scaling is (scale, good steps, 1 for a bad one, steps left out), as on a GPU,
# where such nets compute.
_LEAST, _LARGEST, _GOOD_STEPS = 2.0**-16, 2.0**24, 2000


@op
def fill_scaled(scaling: np.ndarray, y: np.ndarray, *, value: float) -> None:
    """y = value times the scale of the losses."""
    y.fill(value * (scaling[0] or FIRST_SCALE))


@op
def find_bad(*arrays: np.ndarray) -> None:
    """Have the last array, the scale of the losses, say so if there is an infinity, or what is no number, before it."""
    *diffs, scaling = arrays
    if not all(np.isfinite(sum_of_squares(diff)) for diff in diffs):
        scaling[2] = 1


@op
def next_scale(scaling: np.ndarray) -> None:
    """The scale of the losses after a step: half of it if the step was left out, twice as much after 2000 good ones."""
    scale, good, bad, left_out = scaling[0] or FIRST_SCALE, scaling[1] + 1, scaling[2] != 0, scaling[3]
    if bad:
        scaling[:] = scale / 2 if scale > _LEAST else scale, 0, 0, left_out + 1
    elif good == _GOOD_STEPS:
        scaling[:] = min(2 * scale, _LARGEST), 0, 0, left_out
    else:
        scaling[:] = scale, good, 0, left_out
