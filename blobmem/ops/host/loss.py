"""Softmax and its loss, and what losses share.

Large arrays are (outer, classes, inner), labels (outer, inner) in the arrays' own dtype. A loss is an array of one
element. Its gradient, which carries the loss weight, is read from such an array too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.loss_kernels import (
    judge_labels,
    score_gradient,
    score_losses,
    softmax,
    softmax_gradient,
    softmax_sums,
)
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import bad_label, ignore_as_number, normalizer
from blobmem.ops.registry import op

PARTS = 64
"""Parts of about equal length that a sum is taken in, so that it does not depend on the number of threads."""

_GRAIN = 4096
_CHUNK = 256
_MOST = -math.log(1.1754943508222875e-38)
"""The loss of a probability below the smallest normal float32."""


def _softmax(kernel: Callable[..., Any], *arrays: np.ndarray, scratch: int = 2, more: tuple[float, ...] = ()) -> None:
    """Run a kernel over items of neighbouring positions, with `scratch` numbers for each of these."""
    outer, classes, inner = arrays[0].shape
    if arrays[0].size == 0:
        return
    chunk = min(inner, _CHUNK)
    parallel_for(kernel, outer * -(-inner // chunk), *(a.reshape(-1) for a in arrays), classes, inner, chunk, *more,
                 grain=1 + _GRAIN // (classes * chunk),
                 scratch_of=(scratch * chunk, arrays[0].dtype) if scratch else None)  # fmt: skip


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
def softmax_loss_forward(x: np.ndarray, label: np.ndarray, sums: np.ndarray, loss: np.ndarray, *,
                         ignore_label: int | None, normalization: str, layer: str) -> None:  # fmt: skip
    """loss = the mean of -log softmax(x)[label] over what `normalization` counts.

    sums (outer, 2, inner) = the largest x along the classes, and the sum of exp(x - that), for the gradient. Raises
    NetError naming `layer` for a label that is neither a class nor `ignore_label`, before anything is written.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    _softmax(softmax_sums, x, sums, scratch=0)
    total = sum_in_parts(score_losses, label.size, x.reshape(-1), label.reshape(-1), sums.reshape(-1), classes, inner,
                         ignore, _MOST)  # fmt: skip
    loss.fill(total / normalizer(normalization, outer, inner, valid))


@op
def softmax_loss_backward(x: np.ndarray, label: np.ndarray, sums: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *,
                          ignore_label: int | None, normalization: str, layer: str) -> None:  # fmt: skip
    """dx = dloss * (softmax(x) - 1 at the label) over the normalizer, 0 at ignored labels.

    sums is what forward has made of x; x and dx may be the same memory. Raises as forward does.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    scale = float(dloss.reshape(-1)[0]) / normalizer(normalization, outer, inner, valid)
    _softmax(score_gradient, x, label, sums, dx, scratch=1, more=(ignore, scale))


@op
def divide_by_labels(x: np.ndarray, label: np.ndarray, y: np.ndarray, *, classes: int, ignore_label: int | None,
                     layer: str) -> None:  # fmt: skip
    """y = x over how many labels are not `ignore_label`, or 1 if all are; x and y are numbers. Raises as losses do."""
    np.divide(x, max(1, count_labels(label, classes, ignore_as_number(ignore_label), layer)), out=y)
