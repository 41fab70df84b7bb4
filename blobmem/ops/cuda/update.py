"""What solvers do to parameters.

In every update g = scale * diff + decay * pull, where the pull is data itself for "L2" and its sign for "L1"; diff
stays as it is. Each is one pass over its arrays.
"""

from __future__ import annotations

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("update")
_PART = 16 * THREADS  # elements for a block of `sumsq`, at least
_MOST_PARTS = 1024


def _update(kernel: str, arrays: tuple[CudaArray, ...], regularization: str, *numbers: float) -> None:
    """Run a kernel over all elements of arrays of one shape."""
    _KERNELS.map(kernel, arrays, regularization == "L1", *numbers)


@op(family="cuda")
def sgd_update(diff: CudaArray, data: CudaArray, history: CudaArray, *, decay: float, regularization: str,
               scale: float, rate: float, momentum: float) -> None:  # fmt: skip
    """history = momentum * history + rate * g; data -= history."""
    _update("sgd", (diff, data, history), regularization, decay, scale, rate, momentum)


@op(family="cuda")
def nesterov_update(diff: CudaArray, data: CudaArray, history: CudaArray, *, decay: float, regularization: str,
                    scale: float, rate: float, momentum: float) -> None:  # fmt: skip
    """As `sgd_update`, but data -= (1 + momentum) * history - momentum * old history (Nesterov 1983)."""
    _update("nesterov", (diff, data, history), regularization, decay, scale, rate, momentum)


@op(family="cuda")
def adagrad_update(diff: CudaArray, data: CudaArray, history: CudaArray, *, decay: float, regularization: str,
                   scale: float, rate: float, delta: float) -> None:  # fmt: skip
    """history += g^2; data -= rate * g / (sqrt(history) + delta) (Duchi et al. 2011)."""
    _update("adagrad", (diff, data, history), regularization, decay, scale, rate, delta)


@op(family="cuda")
def rmsprop_update(diff: CudaArray, data: CudaArray, history: CudaArray, *, decay: float, regularization: str,
                   scale: float, rate: float, rms_decay: float, delta: float) -> None:  # fmt: skip
    """history = rms_decay * history + (1 - rms_decay) * g^2; data -= rate * g / (sqrt(history) + delta) (Tieleman and
    Hinton 2012)."""
    _update("rmsprop", (diff, data, history), regularization, decay, scale, rate, rms_decay, delta)


@op(family="cuda")
def adadelta_update(diff: CudaArray, data: CudaArray, gradients: CudaArray, updates: CudaArray, *, decay: float,
                    regularization: str, scale: float, rate: float, momentum: float, delta: float) -> None:  # fmt: skip
    """gradients = momentum * gradients + (1 - momentum) * g^2; u = g * sqrt((updates + delta) / (gradients + delta));
    updates = momentum * updates + (1 - momentum) * u^2; data -= rate * u (Zeiler 2012)."""
    _update("adadelta", (diff, data, gradients, updates), regularization, decay, scale, rate, momentum, delta)


@op(family="cuda")
def adam_update(diff: CudaArray, data: CudaArray, first: CudaArray, second: CudaArray, *, decay: float,
                regularization: str, scale: float, rate: float, momentum: float, momentum2: float,
                delta: float) -> None:  # fmt: skip
    """first = momentum * first + (1 - momentum) * g; second = momentum2 * second + (1 - momentum2) * g^2;
    data -= rate * first / (sqrt(second) + delta) (Kingma and Ba 2015; the rate has the correction in it)."""
    _update("adam", (diff, data, first, second), regularization, decay, scale, rate, momentum, momentum2, delta)


def _parts(size: int) -> int:
    """Blocks of `sumsq`: by the size alone, so that every card adds up in the same order."""
    return min(-(-size // _PART), _MOST_PARTS)


@op(family="cuda", workspace=lambda diff, out, **attributes: 8 * _parts(diff.size))
def sumsq(diff: CudaArray, out: CudaArray, *, ws: CudaArray) -> None:
    """out[0] += the sum of diff's squares, itself taken in double precision; out is float32 or float64."""
    parts = _parts(diff.size)
    outs = (out, None) if out.dtype == np.float64 else (None, out)
    _KERNELS.run(diff, "sumsq", parts, THREADS, diff, diff.size, ws, *outs)
    if parts > 1:
        _KERNELS.run(diff, "add_parts", 1, THREADS, ws, parts, *outs)
