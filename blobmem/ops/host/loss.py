"""Softmax and losses. Large arrays are (outer, classes, inner), labels (outer, inner) in the arrays' own dtype.

A loss is an array of one element. Its gradient, which carries the loss weight, is read from such an array too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.blocks import in_blocks
from blobmem.ops.host.loss_kernels import judge_labels, label_gradient, label_losses, softmax, softmax_gradient
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.update import sum_of_squares
from blobmem.ops.registry import op

_GRAIN = 4096
_CHUNK = 256
_PARTS = 64


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


def count_labels(label: np.ndarray, classes: int, ignore: float) -> int:
    """How many labels are not `ignore`. Raises ValueError for one that is no class."""
    result = np.zeros(2, np.int64)
    judge_labels(0, 1, label.reshape(-1), classes, ignore, result)
    bad = int(result[1])
    if bad >= 0:
        value = float(label.reshape(-1)[bad])
        raise ValueError(f"label {value:g} of item {bad} is no class: expected 0 to {classes - 1}; check the data and "
                         "num_output, or set ignore_label for items without a class")  # fmt: skip
    return int(result[0])


def ignore_as_number(ignore_label: int | None) -> float:
    """The label to ignore as kernels take it; no label equals not-a-number."""
    return float("nan") if ignore_label is None else float(ignore_label)


def _normalizer(normalization: str, outer: int, inner: int, valid: int) -> float:
    """What losses are divided by: all positions, those not ignored, the batch, or nothing; never below 1."""
    counts = {"FULL": outer * inner, "VALID": valid, "BATCH_SIZE": outer, "NONE": 1}
    return max(1.0, float(counts[normalization]))


@op
def softmax_loss_forward(x: np.ndarray, label: np.ndarray, prob: np.ndarray, loss: np.ndarray, *,
                         ignore_label: int | None, normalization: str) -> None:  # fmt: skip
    """prob = softmax of x; loss = the mean of -log prob[label] over what `normalization` counts.

    Raises ValueError for a label that is neither a class nor `ignore_label`, before anything is written.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore)
    softmax_forward(x, prob)
    parts = np.zeros(_PARTS)
    parallel_for(label_losses, _PARTS, prob.reshape(-1), label.reshape(-1), classes, inner, ignore, parts,
                 grain=1 + _PARTS * _GRAIN // max(1, label.size))  # fmt: skip
    loss.fill(parts.sum() / _normalizer(normalization, outer, inner, valid))


@op
def softmax_loss_backward(prob: np.ndarray, label: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *,
                          ignore_label: int | None, normalization: str) -> None:  # fmt: skip
    """dx = dloss * (prob - 1 at the label) over the normalizer, 0 at ignored labels. Raises as forward does."""
    outer, classes, inner = prob.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore)
    scale = float(dloss.reshape(-1)[0]) / _normalizer(normalization, outer, inner, valid)
    parallel_for(label_gradient, outer, prob.reshape(-1), label.reshape(-1), dx.reshape(-1), classes, inner,
                 ignore, scale, grain=1 + 8 * _GRAIN // max(1, classes * inner))  # fmt: skip


@op
def euclidean_loss_forward(a: np.ndarray, b: np.ndarray, diff: np.ndarray, loss: np.ndarray) -> None:
    """diff = a - b; loss = the sum of diff ** 2 over twice the batch (the first axis)."""
    in_blocks(lambda a, b, diff: np.subtract(a, b, out=diff), a, b, diff)
    loss.fill(sum_of_squares(diff) / (2 * max(1, a.shape[0])))


@op
def euclidean_loss_backward(diff: np.ndarray, dloss: np.ndarray, da: np.ndarray, *, sign: float) -> None:
    """da = sign * dloss * diff over the batch."""
    scale = sign * float(dloss.reshape(-1)[0]) / max(1, diff.shape[0])
    in_blocks(lambda diff, da: np.multiply(diff, scale, out=da), diff, da)
