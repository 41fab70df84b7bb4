"""What each place of a window sees, written out: a convolution's columns, and back.

x (images, channels, *spatial), y (images, channels * taps, *places), taps the window's elements, the last axis' next to
one another. `kernel`, `stride`, `pad` and `dilation` have an entry per spatial axis, of which there is one or more; the
number of places is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.compiled import kernel as compiled
from blobmem.ops.host.conv_direct import rows_seen, span
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

Shape = tuple[int, ...]

_GRAIN = 32768


@compiled
def _unroll(start, stop, x, y, table, plane_size, taps, stride, pad, dilation, x_size, y_size):
    """Planes [start, stop) of x. `table` says which row a tap sees from which row of places, as in `rows_seen`."""
    rows, tap_rows = table.shape
    for plane in range(start, stop):
        for tap in range(tap_rows * taps):
            shift = tap % taps * dilation - pad
            low, high = span(shift, stride, x_size, y_size)
            for r in range(rows):
                to = ((plane * tap_rows * taps + tap) * rows + r) * y_size
                line, source = y[to : to + y_size], table[r, tap // taps]
                if source < 0 or high <= low:
                    line[:] = 0
                    continue
                line[:low] = 0
                line[high:] = 0
                seen, values = line[low:high], x[plane * plane_size + source * x_size + shift + low * stride :]
                for j in range(seen.size):
                    seen[j] = values[j * stride]


@compiled
def _roll(start, stop, dx, dy, table, plane_size, taps, stride, pad, dilation, x_size, y_size):
    """Planes [start, stop) of dx."""
    rows, tap_rows = table.shape
    for plane in range(start, stop):
        dx[plane * plane_size : (plane + 1) * plane_size] = 0
        for tap in range(tap_rows * taps):
            shift = tap % taps * dilation - pad
            low, high = span(shift, stride, x_size, y_size)
            for r in range(rows):
                source = table[r, tap // taps]
                if source < 0 or high <= low:
                    continue
                at = ((plane * tap_rows * taps + tap) * rows + r) * y_size
                to = plane * plane_size + source * x_size + shift + low * stride
                seen, values = dy[at + low : at + high], dx[to:]
                for j in range(seen.size):
                    values[j * stride] += seen[j]


def _run(function: Callable[..., Any], x: np.ndarray, y: np.ndarray, kernel: Shape, stride: Shape, pad: Shape,
         dilation: Shape) -> None:  # fmt: skip
    table = rows_seen(x.shape[2:-1], y.shape[2:-1], kernel[:-1], stride[:-1], pad[:-1], dilation[:-1])
    planes = x.shape[0] * x.shape[1]
    last = kernel[-1], stride[-1], pad[-1], dilation[-1], x.shape[-1], y.shape[-1]
    parallel_for(function, planes, x.reshape(-1), y.reshape(-1), table, math.prod(x.shape[2:]), *last,
                 grain=1 + _GRAIN * planes // max(1, y.size))  # fmt: skip


@op
def im2col_forward(x: np.ndarray, y: np.ndarray, *, kernel: Shape, stride: Shape, pad: Shape, dilation: Shape) -> None:
    """y[:, (c, tap), place] = the element of channel c that the tap sees from there, 0 outside x."""
    _run(_unroll, x, y, kernel, stride, pad, dilation)


@op
def im2col_backward(dy: np.ndarray, dx: np.ndarray, *, kernel: Shape, stride: Shape, pad: Shape,
                    dilation: Shape) -> None:  # fmt: skip
    """dx = the sum of dy over the taps and places that see an element."""
    _run(_roll, dx, dy, kernel, stride, pad, dilation)
