"""Softmax and its loss, and what losses share.

Large arrays are (outer, classes, inner), labels (outer, inner) in the arrays' own dtype. A loss is an array of one
element. Its gradient, which carries the loss weight, is read from such an array too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.loss_kernels import judge_labels, label_gradient, label_losses, softmax, softmax_gradient
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import bad_label, ignore_as_number, normalizer
from blobmem.ops.registry import op

PARTS = 64
"""Parts of about equal length that a sum is taken in, so that it does not depend on the number of threads."""

_GRAIN = 4096
_CHUNK = 256
_LEAST = 1.1754943508222875e-38  # the smallest normal float32, for the logarithm of a probability that vanished


def _softmax(kernel: Callable[..., Any], *arrays: np.ndarray) -> None:
    outer, classes, inner = arrays[0].shape
    if arrays[0].size == 0:
        return
    chunk = min(inner, _CHUNK)
    parallel_for(kernel, outer * -(-inner // chunk), *(a.reshape(-1) for a in arrays), classes, inner, chunk,
                 grain=1 + _GRAIN // (classes * chunk), scratch_of=(2 * chunk, arrays[0].dtype))  # fmt: skip


@op
def softmax_forward(x: np.ndarray, y: np.ndarray) -> None:
    """y = exp(x) over its sum along the classes; x and y may be the same memory."""
    _softmax(softmax, x, y)


@op
def softmax_backward(y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = y * (dy - the sum of dy * y along the classes); dy and dx may be the same memory."""
    _softmax(softmax_gradient, y, dy, dx)


def count_labels(label: np.ndarray, classes: int, ignore: float, layer: str = "") -> int:
    """How many labels are not `ignore`. Raises NetError naming the layer for one that is no class."""
    result = np.zeros(2, np.int64)
    judge_labels(0, 1, label.reshape(-1), classes, ignore, result)
    bad = int(result[1])
    if bad >= 0:
        raise bad_label(layer, classes, bad, float(label.reshape(-1)[bad]))
    return int(result[0])


def sum_in_parts(kernel: Callable[..., Any], size: int, *args: Any) -> float:
    """The sum of `PARTS` doubles that `kernel(start, stop, *args, parts)` computes from `size` elements."""
    parts = np.zeros(PARTS)
    parallel_for(kernel, PARTS, *args, parts, grain=1 + PARTS * _GRAIN // max(1, size))
    return float(parts.sum())


@op
def softmax_loss_forward(x: np.ndarray, label: np.ndarray, prob: np.ndarray, loss: np.ndarray, *,
                         ignore_label: int | None, normalization: str, layer: str) -> None:  # fmt: skip
    """prob = softmax of x; loss = the mean of -log prob[label] over what `normalization` counts.

    Raises NetError naming `layer` for a label that is neither a class nor `ignore_label`, before anything is written.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    softmax_forward(x, prob)
    total = sum_in_parts(label_losses, label.size, prob.reshape(-1), label.reshape(-1), classes, inner, ignore, _LEAST)
    loss.fill(total / normalizer(normalization, outer, inner, valid))


@op
def softmax_loss_backward(prob: np.ndarray, label: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *,
                          ignore_label: int | None, normalization: str, layer: str) -> None:  # fmt: skip
    """dx = dloss * (prob - 1 at the label) over the normalizer, 0 at ignored labels. Raises as forward does."""
    outer, classes, inner = prob.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    scale = float(dloss.reshape(-1)[0]) / normalizer(normalization, outer, inner, valid)
    parallel_for(label_gradient, outer, prob.reshape(-1), label.reshape(-1), dx.reshape(-1), classes, inner,
                 ignore, scale, grain=1 + 8 * _GRAIN // max(1, classes * inner))  # fmt: skip


@op
def divide_by_labels(x: np.ndarray, label: np.ndarray, y: np.ndarray, *, classes: int, ignore_label: int | None,
                     layer: str) -> None:  # fmt: skip
    """y = x over how many labels are not `ignore_label`, or 1 if all are; x and y are numbers. Raises as losses do."""
    np.divide(x, max(1, count_labels(label, classes, ignore_as_number(ignore_label), layer)), out=y)
