"""Losses between two arrays of one shape: Euclidean, sigmoid cross-entropy, contrastive.

Large arrays are (batch, values). A loss is an array of one element; its gradient is read from such an array.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.blocks import in_blocks
from blobmem.ops.host.compiled import kernel, reducing_part
from blobmem.ops.host.loss import sum_in_parts
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.update import sum_of_squares
from blobmem.ops.labels import ignore_as_number, normalizer
from blobmem.ops.registry import op

_GRAIN = 32768
_NO_ZERO = 1e-4  # added to a distance that something is divided by, as in Caffe


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


@kernel
def _entropies(start, stop, x, target, ignore, parts):
    """parts[p] = the sum of cross-entropies over part p of the elements, for parts [start, stop)."""
    for part in range(start, stop):
        first, end = x.size * part // parts.size, x.size * (part + 1) // parts.size
        xs, targets = x[first:end], target[first:end]
        total = 0.0
        for i in range(xs.size):
            v, wanted = np.float64(xs[i]), np.float64(targets[i])
            if np.trunc(wanted) != ignore:
                # log(1 + exp(v)) - v * wanted, without overflow
                total += (v if not v < 0 else 0.0) - v * wanted + math.log1p(math.exp(-abs(v)))
        parts[part] = total


@kernel
def _count_valid(start, stop, target, ignore, parts):
    """parts[p] = the number of targets that are not ignored in part p, for parts [start, stop)."""
    for part in range(start, stop):
        targets = target[target.size * part // parts.size : target.size * (part + 1) // parts.size]
        count = 0
        for i in range(targets.size):
            count += np.trunc(targets[i]) != ignore
        parts[part] = count


@kernel
def _entropy_gradient(start, stop, x, target, dx, ignore, scale):
    """Elements [start, stop)."""
    t = x.dtype.type
    xs, targets, dxs = x[start:stop], target[start:stop], dx[start:stop]
    for i in range(xs.size):
        if np.trunc(targets[i]) == ignore:
            dxs[i] = 0
        else:
            small = math.exp(-abs(xs[i]))
            sigmoid = (small if xs[i] < 0 else t(1)) / (t(1) + small)
            dxs[i] = t(scale) * (sigmoid - targets[i])


def _divisor(target: np.ndarray, ignore_label: int | None, normalization: str) -> float:
    """What the sum of cross-entropies is divided by."""
    batch, values = target.shape
    valid = target.size
    if ignore_label is not None and normalization == "VALID":
        valid = int(sum_in_parts(_count_valid, target.size, target.reshape(-1), float(ignore_label)))
    return normalizer(normalization, batch, values, valid)


@op
def sigmoid_cross_entropy_forward(x: np.ndarray, target: np.ndarray, loss: np.ndarray, *, ignore_label: int | None,
                                  normalization: str) -> None:  # fmt: skip
    """loss = the sum of -(t log p + (1 - t) log(1 - p)) with p = sigmoid(x), over what `normalization` counts.

    As in Caffe, targets are ignored whose whole part is `ignore_label`.
    """
    total = sum_in_parts(_entropies, x.size, x.reshape(-1), target.reshape(-1), ignore_as_number(ignore_label))
    loss.fill(total / _divisor(target, ignore_label, normalization))


@op
def sigmoid_cross_entropy_backward(x: np.ndarray, target: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *,
                                   ignore_label: int | None, normalization: str) -> None:  # fmt: skip
    """dx = dloss * (sigmoid(x) - target) over the normalizer, 0 where the target is ignored."""
    scale = float(dloss.reshape(-1)[0]) / _divisor(target, ignore_label, normalization)
    parallel_for(_entropy_gradient, x.size, x.reshape(-1), target.reshape(-1), dx.reshape(-1),
                 ignore_as_number(ignore_label), scale, grain=_GRAIN // 8)  # fmt: skip


@reducing_part
def _squared_distance(a, b):
    """The squared distance of two runs, in double precision."""
    total = 0.0
    for i in range(a.size):
        difference = np.float64(a[i]) - np.float64(b[i])
        total += difference * difference
    return total


@kernel
def _contrasts(start, stop, a, b, similar, values, margin, legacy, parts):
    """parts[p] = the sum of losses over part p of the pairs, for parts [start, stop)."""
    for part in range(start, stop):
        total = 0.0
        for i in range(similar.size * part // parts.size, similar.size * (part + 1) // parts.size):
            squared = _squared_distance(a[i * values : (i + 1) * values], b[i * values : (i + 1) * values])
            if np.trunc(similar[i]) != 0:
                total += squared
            else:
                short = margin - (squared if legacy else math.sqrt(squared))
                if not short <= 0:  # not a number counts: a net that diverged must not look healthy
                    total += short if legacy else short * short
        parts[part] = total


@kernel
def _contrast_gradient(start, stop, a, b, similar, da, values, margin, legacy, scale):
    """Pairs [start, stop)."""
    t = a.dtype.type
    for i in range(start, stop):
        ones, others = a[i * values : (i + 1) * values], b[i * values : (i + 1) * values]
        factor = 1.0
        if np.trunc(similar[i]) == 0:
            squared = _squared_distance(ones, others)
            distance = math.sqrt(squared)
            short = margin - (squared if legacy else distance)
            factor = 0.0 if short <= 0 else (-1.0 if legacy else -short / (distance + _NO_ZERO))
        das = da[i * values : (i + 1) * values]
        for j in range(das.size):
            das[j] = t(scale * factor) * (ones[j] - others[j])


@op
def contrastive_loss_forward(a: np.ndarray, b: np.ndarray, similar: np.ndarray, loss: np.ndarray, *, margin: float,
                             legacy: bool) -> None:  # fmt: skip
    """loss = half the mean over pairs of d^2 where similar, else of max(0, margin - d)^2, or of max(0, margin - d^2).

    d is the distance of a's row to b's, `similar` (batch,), where a whole part of 0 says no; the last form is the
    legacy one. Hadsell, Chopra and LeCun 2006.
    """
    total = sum_in_parts(_contrasts, a.size, a.reshape(-1), b.reshape(-1), similar.reshape(-1), a.shape[1],
                         float(margin), legacy)  # fmt: skip
    loss.fill(total / (2 * max(1, a.shape[0])))


@op
def contrastive_loss_backward(a: np.ndarray, b: np.ndarray, similar: np.ndarray, dloss: np.ndarray, da: np.ndarray, *,
                              margin: float, legacy: bool) -> None:  # fmt: skip
    """da = the gradient of `contrastive_loss_forward` times dloss, that of b with the two exchanged."""
    scale = float(dloss.reshape(-1)[0]) / max(1, a.shape[0])
    parallel_for(_contrast_gradient, a.shape[0], a.reshape(-1), b.reshape(-1), similar.reshape(-1), da.reshape(-1),
                 a.shape[1], float(margin), legacy, scale, grain=1 + _GRAIN // max(1, a.shape[1]))  # fmt: skip
