"""Losses against class labels, softmax's own apart: hinge, multinomial logistic, infogain.

Large arrays are (batch, classes), or (outer, classes, inner) where it says so; labels are in the arrays' own dtype.
Every op raises NetError naming `layer` for a label that is no class (nor to be ignored), before anything is written.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.loss import count_labels, softmax_forward, sum_in_parts
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import ignore_as_number, normalizer
from blobmem.ops.registry import ArraySpec, op

_GRAIN = 32768
_LEAST = 1e-20  # below it the logarithm of a probability is that of this, as in Caffe


@kernel
def _hinge_losses(start, stop, x, label, classes, squared, parts):
    """parts[p] = the sum of max(0, margin), or of its square, over part p of the rows, for parts [start, stop)."""
    one = x.dtype.type(1)
    for part in range(start, stop):
        total = 0.0
        for i in range(label.size * part // parts.size, label.size * (part + 1) // parts.size):
            xs, true = x[i * classes : (i + 1) * classes], np.int64(label[i])
            for j in range(xs.size):
                margin = np.float64(one - xs[j] if j == true else one + xs[j])
                if not margin <= 0:  # not a number counts: a net that diverged must not look healthy
                    total += margin * margin if squared else margin
        parts[part] = total


@kernel
def _hinge_gradient(start, stop, x, label, dx, classes, squared, scale):
    """Rows [start, stop)."""
    t = x.dtype.type
    for i in range(start, stop):
        xs, dxs = x[i * classes : (i + 1) * classes], dx[i * classes : (i + 1) * classes]
        true = np.int64(label[i])
        for j in range(xs.size):
            sign = t(-1) if j == true else t(1)
            margin = t(1) + sign * xs[j]
            slope = sign * (t(2) * margin if squared else t(1))
            dxs[j] = t(0) if margin <= 0 else t(scale) * slope


@op
def hinge_loss_forward(x: np.ndarray, label: np.ndarray, loss: np.ndarray, *, norm: str, layer: str) -> None:
    """loss = the sum of max(0, 1 + x), 1 - x at the label, over the batch; with norm "L2" of its squares."""
    batch, classes = x.shape
    count_labels(label, classes, ignore_as_number(None), layer)
    total = sum_in_parts(_hinge_losses, x.size, x.reshape(-1), label.reshape(-1), classes, norm == "L2")
    loss.fill(total / max(1, batch))


@op
def hinge_loss_backward(
    x: np.ndarray, label: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *, norm: str, layer: str
) -> None:
    """dx = the gradient of `hinge_loss_forward` times dloss; 0 where the margin is kept, or just kept."""
    batch, classes = x.shape
    count_labels(label, classes, ignore_as_number(None), layer)
    scale = float(dloss.reshape(-1)[0]) / max(1, batch)
    parallel_for(_hinge_gradient, batch, x.reshape(-1), label.reshape(-1), dx.reshape(-1), classes, norm == "L2", scale,
                 grain=1 + _GRAIN // max(1, classes))  # fmt: skip


@kernel
def _true_losses(start, stop, prob, label, classes, least, parts):
    """parts[p] = the sum of -log max(prob[label], least) over part p of the rows, for parts [start, stop)."""
    for part in range(start, stop):
        total = 0.0
        for i in range(label.size * part // parts.size, label.size * (part + 1) // parts.size):
            p = np.float64(prob[i * classes + np.int64(label[i])])
            total -= math.log(p if not p < least else least)
        parts[part] = total


@kernel
def _true_gradient(start, stop, prob, label, dprob, classes, least, scale):
    """Rows [start, stop): scale / prob at the label, 0 elsewhere."""
    t = prob.dtype.type
    for i in range(start, stop):
        dprob[i * classes : (i + 1) * classes] = 0
        at = i * classes + np.int64(label[i])
        p = prob[at]
        dprob[at] = t(scale) / (p if not p < least else t(least))


@op
def multinomial_loss_forward(prob: np.ndarray, label: np.ndarray, loss: np.ndarray, *, layer: str) -> None:
    """loss = the mean over the batch of -log prob[label], of probabilities of 1e-20 or more."""
    batch, classes = prob.shape
    count_labels(label, classes, ignore_as_number(None), layer)
    total = sum_in_parts(_true_losses, batch, prob.reshape(-1), label.reshape(-1), classes, _LEAST)
    loss.fill(total / max(1, batch))


@op
def multinomial_loss_backward(prob: np.ndarray, label: np.ndarray, dloss: np.ndarray, dprob: np.ndarray, *,
                              layer: str) -> None:  # fmt: skip
    """dprob = -dloss / prob over the batch at the label, 0 elsewhere; 1e-20 stands for smaller probabilities."""
    batch, classes = prob.shape
    count_labels(label, classes, ignore_as_number(None), layer)
    scale = -float(dloss.reshape(-1)[0]) / max(1, batch)
    parallel_for(_true_gradient, batch, prob.reshape(-1), label.reshape(-1), dprob.reshape(-1), classes, _LEAST, scale,
                 grain=1 + _GRAIN // max(1, classes))  # fmt: skip


@kernel
def _infogain_losses(start, stop, prob, label, gain, classes, inner, ignore, least, parts):
    """parts[p] = the sum of -gain[label] . log prob over part p of the positions, for parts [start, stop)."""
    for part in range(start, stop):
        total = 0.0
        for at in range(label.size * part // parts.size, label.size * (part + 1) // parts.size):
            value = label[at]
            if value == ignore:
                continue
            gains = gain[np.int64(value) * classes : (np.int64(value) + 1) * classes]
            first = at // inner * classes * inner + at % inner
            for c in range(gains.size):
                if gains[c] != 0:
                    p = np.float64(prob[first + c * inner])
                    total -= gains[c] * math.log(p if not p < least else least)
        parts[part] = total


@kernel
def _infogain_gradient(start, stop, prob, label, gain, sums, dx, classes, inner, ignore, scale):
    """Outer indices [start, stop); sums are those of gain's rows."""
    t = prob.dtype.type
    for i in range(start, stop):
        labels = label[i * inner : (i + 1) * inner]
        for c in range(classes):
            first = (i * classes + c) * inner
            probs, dxs = prob[first : first + inner], dx[first : first + inner]
            for j in range(labels.size):
                if labels[j] == ignore:
                    dxs[j] = 0
                else:
                    true = np.int64(labels[j])
                    dxs[j] = t(scale) * (probs[j] * t(sums[true]) - gain[true * classes + c])


@op
def infogain_loss_forward(x: np.ndarray, label: np.ndarray, gain: np.ndarray, prob: np.ndarray, loss: np.ndarray, *,
                          ignore_label: int | None, normalization: str, layer: str) -> None:  # fmt: skip
    """prob = softmax of x; loss = the mean of -gain[label] . log prob over what `normalization` counts.

    x and prob (outer, classes, inner), label (outer, inner), gain (classes, classes), a row for each label;
    probabilities count as 1e-20 or more. With the identity as gain this is the softmax loss.
    """
    outer, classes, inner = x.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    softmax_forward(x, prob)
    total = sum_in_parts(_infogain_losses, x.size, prob.reshape(-1), label.reshape(-1), gain.reshape(-1), classes,
                         inner, ignore, _LEAST)  # fmt: skip
    loss.fill(total / normalizer(normalization, outer, inner, valid))


def _row_sums(prob: ArraySpec, label: ArraySpec, gain: ArraySpec, *_: ArraySpec, **attributes: object) -> int:
    return 8 * prob.shape[1]


@op(workspace=_row_sums)
def infogain_loss_backward(prob: np.ndarray, label: np.ndarray, gain: np.ndarray, dloss: np.ndarray, dx: np.ndarray, *,
                           ignore_label: int | None, normalization: str, layer: str,
                           ws: np.ndarray) -> None:  # fmt: skip
    """dx = dloss * (prob * the sum of gain[label] - gain[label]) over the normalizer, 0 at ignored labels."""
    outer, classes, inner = prob.shape
    ignore = ignore_as_number(ignore_label)
    valid = count_labels(label, classes, ignore, layer)
    scale = float(dloss.reshape(-1)[0]) / normalizer(normalization, outer, inner, valid)
    sums = ws[: 8 * classes].view(np.float64)
    np.sum(gain.reshape(classes, classes), axis=1, dtype=np.float64, out=sums)
    parallel_for(_infogain_gradient, outer, prob.reshape(-1), label.reshape(-1), gain.reshape(-1), sums,
                 dx.reshape(-1), classes, inner, ignore, scale,
                 grain=1 + _GRAIN // max(1, classes * inner))  # fmt: skip
