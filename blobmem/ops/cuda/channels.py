"""Sums by channel of arrays (outer, channels, inner), for whichever op needs one.

    def _folded(dy, db):
        return dy.shape[0], db.size, math.prod(dy.shape[2:])

    @op(family="cuda", workspace=lambda dy, db, **_: channels.workspace_bytes(_folded(dy, db)))
    def conv_backward_bias(dy, db, *, accumulate, ws):
        channels.sum_per_channel(_folded(dy, db), dy, None, db, ws, accumulate=accumulate)

Sums of the columns of a matrix are those of (rows, columns, 1), of its rows those of (1, rows, columns). Sums are taken
in T by each thread and in double precision across threads, in an order that depends on the shape alone.
"""

from __future__ import annotations

import functools

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels

_KERNELS = Kernels("channels")

PLAIN, ABSOLUTE, SQUARE, PRODUCT, PRODUCT_BELOW = range(5)
"""What is summed: x, |x|, x ** 2, x * y, or x * y where x is not positive (for a PReLU's slope)."""

BLOCKS = 2048  # enough to fill any card, about twice over
_LEAST = 16384  # elements that are worth a block
_LEAST_ROWS = 256  # the same, of 32 neighbouring channels without runs
_WORTH_ADDING = 4  # parts of a channel; fewer are summed sooner by one block of more threads
_SHORT = 1024  # elements of a channel that are not worth a block
_LONG = 8192  # elements of a channel that keep 1024 threads busy

Folded = tuple[int, int, int]


@functools.lru_cache(4096)
def splits(shape: Folded, least: int = _LEAST) -> int:
    """In how many parts a channel of (outer, channels, inner) is cut: enough, and of `least` elements or more."""
    outer, channels, inner = shape
    return max(1, min(-(-BLOCKS // max(1, channels)), outer * inner // least))


def _column_splits(shape: Folded) -> int:
    return splits((shape[0], -(-shape[1] // 32), 1), _LEAST_ROWS)


@functools.lru_cache(4096)
def _parts(shape: Folded) -> int:
    if shape[2] == 1 and shape[1] > 1:
        return _column_splits(shape)
    parts = splits(shape)
    return parts if parts >= _WORTH_ADDING else 1


def workspace_bytes(shape: Folded) -> int:
    """What `sum_per_channel` needs for a shape (outer, channels, inner); the same for every kind and dtype."""
    parts = _parts(shape)
    return 8 * shape[1] * parts if parts > 1 else 0


def sum_per_channel(shape: Folded, x: CudaArray, y: CudaArray | None, total: CudaArray, ws: CudaArray | None, *,
                    accumulate: bool, kind: int = PLAIN, factor: float = 1.0) -> None:  # fmt: skip
    """total[c] (+)= factor * the sum over channel c of x, or of what `kind` says; one launch, or two for long channels.

    shape is (outer, channels, inner), whatever the shapes of x and y (None for the kinds of x alone); total has
    `channels` elements, of x's dtype or of T; ws at least `workspace_bytes(shape)` bytes (None where those are 0).
    """
    outer, channels, inner = shape
    if outer * inner == 0:
        if not accumulate:
            total.zero()
        return
    parts = _parts(shape)
    if parts > 1 and ws is None:
        raise ValueError(f"sums of {shape} need a workspace of {workspace_bytes(shape)} bytes")
    pair, last = (x, x if y is None else y), (kind, factor, accumulate, total.dtype != x.dtype)
    if inner == 1 and channels > 1:
        blocks = -(-channels // 32) * parts
        _KERNELS.run(x, "sum_columns", blocks, THREADS, *pair, total, ws, outer, channels, parts, *last)
    elif outer * inner <= _SHORT:
        blocks = -(-channels // (THREADS // 32))
        _KERNELS.run(x, "sum_short_channels", blocks, THREADS, *pair, total, outer, channels, inner, *last)
    else:
        blocks, size = channels * parts, 4 * THREADS if parts < splits(shape) else THREADS
        _KERNELS.run(x, "sum_channels", blocks, size, *pair, total, ws, outer, channels, inner, parts, *last)
    if parts > 1 and ws is not None:
        add_parts(ws, total, parts, accumulate=accumulate, factor=factor)


def relu_gradient(x: CudaArray, dy: CudaArray, dx: CudaArray, total: CudaArray, ws: CudaArray | None, *, slope: float,
                  accumulate: bool, more: CudaArray | None = None) -> None:  # fmt: skip
    """dx = the gradient of a ReLU, as `neuron.relu_backward` has it, of dy and `more`, if that is given; total[c] (+)=
    the sum over channel c of dx.

    Arrays are (rows, channels) in memory. ws is what `sum_per_channel` of (rows, channels, 1) wants, to whose bits it
    comes.
    """
    shape = dx.size // max(1, total.size), total.size, 1
    if dx.size == 0:
        sum_per_channel(shape, dx, None, total, ws, accumulate=accumulate)
        return
    parts = _column_splits(shape)
    blocks = -(-shape[1] // 32) * parts
    sizes = *shape[:2], parts, slope, accumulate
    if more is None:
        _KERNELS.run(dx, "relu_gradient_columns", blocks, THREADS, x, dy, dx, total, ws, *sizes)
    else:
        _KERNELS.run(dx, "summed_relu_gradient_columns", blocks, THREADS, x, dy, more, dx, total, ws, *sizes)
    if parts > 1 and ws is not None:
        add_parts(ws, total, parts, accumulate=accumulate)


def add_parts(parts: CudaArray, total: CudaArray, each: int, *, accumulate: bool, factor: float = 1.0) -> None:
    """total[i] (+)= factor * the sum of `each` doubles, from i * each on."""
    blocks = -(-total.size // (THREADS // 32))
    _KERNELS.run(total, "add_parts", blocks, THREADS, parts, total, total.size, each, factor, accumulate)


def threads(shape: Folded, parts: int) -> int:
    """How many threads a block should have that does all it has to do to one of the `parts` parts of a channel."""
    count = shape[0] * shape[2]
    if parts == 1 and count >= _LONG:
        return 4 * THREADS
    return THREADS if count > _SHORT // 4 else 32


def part_moments(shape: Folded, x: CudaArray, parts: int, ws: CudaArray) -> None:
    """Mean and sum of squared distances from it, two doubles for each of the `parts` parts of each channel, into ws."""
    outer, channels, inner = shape
    _KERNELS.run(x, "part_moments", channels * parts, THREADS, x, ws, outer, channels, inner, parts)
