"""Softmax and its loss, and what losses share.

Arrays are as on the host. A label that is no class counts as one to ignore; the device raises NetError for it when it
next waits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.labels import bad_label, ignore_as_number, normalizer
from blobmem.ops.registry import ArraySpec, op

MOST_PARTS = 2048
"""Blocks of a launch that sums, at most: every one leaves a part of 16 bytes."""

_KERNELS = Kernels("loss")
_MOST = -math.log(1.1754943508222875e-38)  # the loss of a probability below the smallest normal float32
_IN_FLIGHT = 1 << 18  # threads that fill any card


@functools.lru_cache(4096)
def strips(positions: int, length: int, inner: int = 1) -> tuple[int, int]:
    """Threads that share a row, and blocks, for kernels over `strips` of `positions` rows.

    Neighbouring threads take neighbouring elements: of a row if inner is 1, else of as many rows as fill the card.
    """
    slices = 1
    while slices < THREADS and slices * 4 < length and (inner == 1 or positions * slices < _IN_FLIGHT):
        slices *= 2
    return slices, min(-(-positions // (THREADS // slices)), MOST_PARTS)


def blocks_for(n: int) -> int:
    """Blocks that sum over `n` elements."""
    return min(-(-n // (4 * THREADS)), MOST_PARTS)


def parts_bytes(blocks: int) -> int:
    """Bytes of workspace for the parts of a loss: a sum and a count for each block."""
    return 16 * max(1, blocks)


def strip_parts(x: ArraySpec, *_: ArraySpec | None, **attributes: Any) -> int:
    """The workspace rule of losses whose first operand is (outer, length), or (outer, length, inner)."""
    inner = x.shape[2] if len(x.shape) > 2 else 1
    return parts_bytes(strips(x.shape[0] * inner, x.shape[1], inner)[1])


def finish(ws: CudaArray, blocks: int, loss: CudaArray, divisor: float) -> None:
    """loss = what the blocks have left in ws, if there was more than one; each sum's last launch."""
    if blocks > 1:
        _KERNELS.run(loss, "finish", 1, THREADS, ws, blocks, loss, divisor)


def loss_divisor(normalization: str, outer: int, inner: int, ignore_label: int | None) -> float:
    """What a loss is divided by, as kernels take it: 0 for the number of labels that they count themselves."""
    if normalization == "VALID" and ignore_label is not None:
        return 0.0
    return normalizer(normalization, outer, inner, outer * inner)


def label_fault(x: CudaArray, layer: str, classes: int) -> tuple[Any, int]:
    """What `class_of` reports bad labels to, and with which code."""
    faults = x.device.faults
    return faults, faults.code(("label", layer, classes), functools.partial(bad_label, layer, classes))


def count_labels(label: CudaArray, classes: int, ignore: float, divisor: float, ws: CudaArray) -> int:
    """Leave counts of labels in ws for kernels with `gradient_scale`, if the divisor asks for them; how many."""
    if divisor > 0:
        return 0
    blocks = blocks_for(label.size)
    _KERNELS.run(label, "count_labels", blocks, THREADS, label, ws, label.size, classes, ignore)
    return blocks


def count_bytes(label: ArraySpec) -> int:
    """Bytes of workspace for `count_labels`."""
    return 8 * max(1, blocks_for(label.size))


@op(family="cuda")
def softmax_forward(x: CudaArray, y: CudaArray) -> None:
    """y = exp(x) over its sum along the classes; x and y may be the same memory, and of a half x y may be float32."""
    outer, classes, inner = x.shape
    if x.size:
        slices, blocks = strips(outer * inner, classes, inner)
        kernel = "softmax" if x.dtype == y.dtype else "softmax_exact"
        _KERNELS.run(x, kernel, blocks, THREADS, x, y, outer * inner, classes, inner, slices)


@op(family="cuda")
def softmax_backward(y: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = y * (dy - the sum of dy * y along the classes); dy and dx may be the same memory."""
    outer, classes, inner = y.shape
    if y.size:
        slices, blocks = strips(outer * inner, classes, inner)
        _KERNELS.run(y, "softmax_gradient", blocks, THREADS, y, dy, dx, outer * inner, classes, inner, slices)


@op(family="cuda", workspace=strip_parts)
def softmax_loss_forward(x: CudaArray, label: CudaArray, sums: CudaArray, loss: CudaArray, *, ignore_label: int | None,
                         normalization: str, layer: str, ws: CudaArray) -> None:  # fmt: skip
    """loss = the mean of -log softmax(x)[label] over what `normalization` counts.

    sums (outer, 2, inner) = the largest x along the classes, and the sum of exp(x - that), for the gradient.
    """
    outer, classes, inner = x.shape
    if not x.size:
        loss.zero()
        return
    slices, blocks = strips(outer * inner, classes, inner)
    divisor = loss_divisor(normalization, outer, inner, ignore_label)
    _KERNELS.run(x, "softmax_loss", blocks, THREADS, x, label, sums, loss, ws, outer * inner, classes, inner, slices,
                 ignore_as_number(ignore_label), _MOST, divisor, *label_fault(x, layer, classes))  # fmt: skip
    finish(ws, blocks, loss, divisor)


def _counts(x: ArraySpec, label: ArraySpec, *_: ArraySpec, **attributes: Any) -> int:
    return count_bytes(label)


@op(family="cuda", workspace=_counts)
def softmax_loss_backward(x: CudaArray, label: CudaArray, sums: CudaArray, dloss: CudaArray, dx: CudaArray, *,
                          ignore_label: int | None, normalization: str, layer: str,
                          ws: CudaArray) -> None:  # fmt: skip
    """dx = dloss * (softmax(x) - 1 at the label) over the normalizer, 0 at ignored labels.

    sums is what forward has made of x; x and dx may be the same memory.
    """
    outer, classes, inner = x.shape
    if not x.size:
        return
    slices, blocks = strips(outer * inner, classes, inner)
    ignore = ignore_as_number(ignore_label)
    divisor = loss_divisor(normalization, outer, inner, ignore_label)
    counts = count_labels(label, classes, ignore, divisor, ws)
    _KERNELS.run(x, "softmax_loss_gradient", blocks, THREADS, x, label, sums, dloss, dx, ws, counts, outer * inner,
                 classes, inner, slices, ignore, divisor, *label_fault(x, layer, classes))  # fmt: skip


@op(family="cuda", workspace=_counts)
def divide_by_labels(x: CudaArray, label: CudaArray, y: CudaArray, *, classes: int, ignore_label: int | None,
                     layer: str, ws: CudaArray) -> None:  # fmt: skip
    """y = x over how many labels are classes and not `ignore_label`, or 1 if none is; x and y are numbers."""
    counts = count_labels(label, classes, ignore_as_number(ignore_label), 0.0, ws)
    _KERNELS.run(x, "over_labels", 1, THREADS, x, y, ws, counts)
