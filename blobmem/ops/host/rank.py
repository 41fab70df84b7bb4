"""Accuracy and argmax."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.loss import check_labels
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op


@kernel
def _count_hits(start, stop, x, label, outer, classes, inner, top_k, ignore, seen, hits, result):
    """Per class, labels seen and hit; result[0] = the first label that is no class, or -1."""
    result[0] = -1
    for i in range(outer):
        for j in range(inner):
            value = label[i * inner + j]
            if value == ignore:
                continue
            if not (value >= 0 and value < classes):
                result[0] = i * inner + j
                return
            true = np.int64(value)
            least = x[(i * classes + true) * inner + j]
            better = -1
            for c in range(classes):
                if x[(i * classes + c) * inner + j] >= least:
                    better += 1
            seen[true] += 1
            hits[true] += 0 <= better < top_k


@op
def accuracy_forward(x: np.ndarray, label: np.ndarray, accuracy: np.ndarray, per_class: np.ndarray | None, *,
                     top_k: int, ignore_label: int | None) -> None:  # fmt: skip
    """The share of positions whose label is among the `top_k` largest; per_class (classes,) of each class's.

    x (outer, classes, inner), label (outer, inner). Another class with the same value counts as larger. Shares of
    nothing are 0. Raises ValueError for a label that is neither a class nor `ignore_label`.
    """
    outer, classes, inner = x.shape
    seen, hits, result = np.zeros(classes, np.int64), np.zeros(classes, np.int64), np.zeros(1, np.int64)
    ignore = math.nan if ignore_label is None else float(ignore_label)
    parallel_for(_count_hits, 1, x.reshape(-1), label.reshape(-1), outer, classes, inner, top_k, ignore, seen, hits,
                 result)  # fmt: skip
    check_labels(int(result[0]), label, classes)
    accuracy.fill(hits.sum() / max(1, seen.sum()))
    if per_class is not None:
        np.divide(hits, np.maximum(seen, 1), out=per_class.reshape(-1), casting="unsafe")


@kernel
def _largest(start, stop, x, size, inner, top_k, out_index, with_index, out_value, with_value, step, out_step):
    """Positions [start, stop): each largest is searched below the one before; of equals the later is larger."""
    for position in range(start, stop):
        outer, j = position // inner, position % inner
        base = outer * size * inner + j
        last, last_value = -1, x[base]
        for k in range(top_k):
            best = -1
            for c in range(size):
                value = x[base + c * inner]
                after = last < 0 or value < last_value or (value == last_value and c < last)
                if after and (best < 0 or value >= x[base + best * inner]):
                    best = c
            last, last_value = best, x[base + best * inner]
            at = outer * step + j + k * out_step
            if with_index:
                out_index[at] = last
            if with_value:
                out_value[at] = last_value


@op
def argmax_forward(x: np.ndarray, y: np.ndarray, *, top_k: int, out_max_val: bool, axis: int | None) -> None:
    """The `top_k` largest of each item, largest first; of equal values the one with the larger index comes first.

    With an axis, y has `top_k` there: indices, or values with `out_max_val`. Without, items are those of the first
    axis, and y has per item `top_k` indices, then with `out_max_val` as many values.
    """
    size = math.prod(x.shape[1:]) if axis is None else x.shape[axis]
    inner = 1 if axis is None else math.prod(x.shape[axis + 1 :])
    positions = x.size // max(1, size)
    flat, both = y.reshape(-1), axis is None and out_max_val
    step = top_k * inner * (2 if both else 1)
    values = flat[top_k:] if both else flat
    parallel_for(_largest, positions, x.reshape(-1), size, inner, top_k, flat, axis is None or not out_max_val, values,
                 out_max_val, step, inner, grain=1 + 32768 // max(1, size * top_k))  # fmt: skip
