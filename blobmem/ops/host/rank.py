"""Accuracy and argmax."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part
from blobmem.ops.host.loss import count_labels
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import ignore_as_number
from blobmem.ops.registry import op


@kernel
def _count_hits(start, stop, x, label, outer, classes, inner, top_k, ignore, seen, hits):
    """Per class, labels seen and hit; labels have been checked."""
    for i in range(outer):
        for j in range(inner):
            value = label[i * inner + j]
            if value == ignore:
                continue
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
                     top_k: int, ignore_label: int | None, layer: str) -> None:  # fmt: skip
    """The share of positions whose label is among the `top_k` largest; per_class (classes,) of each class's.

    x (outer, classes, inner), label (outer, inner). Another class with the same value counts as larger. Shares of
    nothing are 0. Raises NetError naming `layer` for a label that is neither a class nor `ignore_label`.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    count_labels(label, classes, ignore, layer)
    seen, hits = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    parallel_for(_count_hits, 1, x.reshape(-1), label.reshape(-1), outer, classes, inner, top_k, ignore, seen,
                 hits)  # fmt: skip
    accuracy.fill(hits.sum() / max(1, seen.sum()))
    if per_class is not None:
        np.divide(hits, np.maximum(seen, 1), out=per_class.reshape(-1), casting="unsafe")


@part
def _ranked(value):
    """What a value is compared by: not a number is below everything."""
    return value if value == value else -np.inf


@kernel
def _largest(start, stop, x, size, inner, top_k, out_index, with_index, out_value, with_value, step, out_step):
    """Positions [start, stop): each largest is searched below the one before; of equals the later is larger."""
    for position in range(start, stop):
        outer, j = position // inner, position % inner
        base = outer * size * inner + j
        last, last_value = -1, _ranked(x[base])
        for k in range(top_k):
            best, best_value = -1, last_value
            for c in range(size):
                value = _ranked(x[base + c * inner])
                after = last < 0 or value < last_value or (value == last_value and c < last)
                if after and (best < 0 or value >= best_value):
                    best, best_value = c, value
            last, last_value = best, best_value
            at = outer * step + j + k * out_step
            if with_index:
                out_index[at] = best
            if with_value:
                out_value[at] = x[base + best * inner]


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
