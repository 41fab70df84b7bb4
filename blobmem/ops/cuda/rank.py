"""Accuracy and argmax."""

from __future__ import annotations

import math
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.loss import finish, label_fault, strip_parts, strips
from blobmem.ops.labels import ignore_as_number
from blobmem.ops.registry import ArraySpec, op

_KERNELS = Kernels("rank")


def _tallies(x: ArraySpec, *operands: ArraySpec | None, **attributes: Any) -> int:
    return 8 * x.shape[1] + strip_parts(x)


@op(family="cuda", workspace=_tallies)
def accuracy_forward(x: CudaArray, label: CudaArray, accuracy: CudaArray, per_class: CudaArray | None, *, top_k: int,
                     ignore_label: int | None, layer: str, ws: CudaArray) -> None:  # fmt: skip
    """The share of positions whose label is among the `top_k` largest; per_class (classes,) of each class's.

    x (outer, classes, inner), label (outer, inner). Another class with the same value counts as larger. Shares of
    nothing are 0. A label that is neither a class nor `ignore_label` counts as that; the device raises NetError for it
    when it next waits.
    """
    outer, classes, inner = x.shape
    if not x.size:
        accuracy.zero()
        if per_class is not None:
            per_class.zero()
        return
    slices, blocks = strips(outer * inner, classes, inner)
    tally, parts = ws.part(0, (8 * classes,)), ws.part(8 * classes, (ws.nbytes - 8 * classes,))
    if per_class is not None:
        tally.zero()
    _KERNELS.run(x, "accuracy", blocks, THREADS, x, label, accuracy, parts, None if per_class is None else tally,
                 outer * inner, classes, inner, slices, top_k, ignore_as_number(ignore_label),
                 *label_fault(x, layer, classes))  # fmt: skip
    finish(parts, blocks, accuracy, 0)
    if per_class is not None:
        _KERNELS.over(x, "class_shares", classes, tally, per_class, classes)


@op(family="cuda")
def argmax_forward(x: CudaArray, y: CudaArray, *, top_k: int, out_max_val: bool, axis: int | None) -> None:
    """The `top_k` largest of each item, largest first; of equal values the one with the larger index comes first.

    With an axis, y has `top_k` there: indices, or values with `out_max_val`. Without, items are those of the first
    axis, and y has per item `top_k` indices, then with `out_max_val` as many values.
    """
    if not x.size:
        return
    size = math.prod(x.shape[1:]) if axis is None else x.shape[axis]
    inner = 1 if axis is None else math.prod(x.shape[axis + 1 :])
    positions = x.size // size
    both = axis is None and out_max_val
    indices = y if axis is None or not out_max_val else None
    values = (y.address + both * top_k * y.dtype.itemsize) if out_max_val else None
    slices, blocks = strips(positions, size, inner)
    _KERNELS.run(x, "largest", blocks, THREADS, x, indices, values, positions, size, inner, slices, top_k,
                 top_k * inner * (1 + both), -math.inf)  # fmt: skip
