"""Planes scaled and added; the gradients are `scale_backward_data`, `scale_backward_gamma` and a copy."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 32768


@kernel
def _axpy(start, stop, scale, x, y, out, inner):
    """Planes [start, stop) of `inner` elements."""
    for plane in range(start, stop):
        a = scale[plane]
        first, end = plane * inner, (plane + 1) * inner
        xs, ys, outs = x[first:end], y[first:end], out[first:end]
        for i in range(xs.size):
            outs[i] = a * xs[i] + ys[i]


@op
def axpy_forward(scale: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """out = scale * x + y; scale (planes,), the others (planes, inner); out may be the same memory as y."""
    planes, inner = x.shape
    parallel_for(_axpy, planes, scale.reshape(-1), x.reshape(-1), y.reshape(-1), out.reshape(-1), inner,
                 grain=1 + _GRAIN // max(1, inner))  # fmt: skip
