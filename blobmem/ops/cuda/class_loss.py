"""Losses against class labels, softmax's own apart: hinge, multinomial logistic, infogain.

Arrays are as on the host; labels that are no class are dealt with as in `blobmem.ops.cuda.loss`.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.loss import (
    blocks_for,
    count_bytes,
    count_labels,
    finish,
    label_fault,
    loss_divisor,
    parts_bytes,
    strip_parts,
    strips,
)
from blobmem.ops.labels import ignore_as_number
from blobmem.ops.registry import ArraySpec, op

_KERNELS = Kernels("class_loss")
_LEAST = 1e-20  # below it the logarithm of a probability is that of this, as in Caffe


@op(family="cuda", workspace=strip_parts)
def hinge_loss_forward(x: CudaArray, label: CudaArray, loss: CudaArray, *, norm: str, layer: str,
                       ws: CudaArray) -> None:  # fmt: skip
    """loss = the sum of max(0, 1 + x), 1 - x at the label, over the batch; with norm "L2" of its squares."""
    batch, classes = x.shape
    if not x.size:
        loss.zero()
        return
    slices, blocks = strips(batch, classes)
    _KERNELS.run(x, "hinge_loss", blocks, THREADS, x, label, loss, ws, batch, classes, slices, norm == "L2", batch,
                 *label_fault(x, layer, classes))  # fmt: skip
    finish(ws, blocks, loss, batch)


@op(family="cuda")
def hinge_loss_backward(
    x: CudaArray, label: CudaArray, dloss: CudaArray, dx: CudaArray, *, norm: str, layer: str
) -> None:
    """dx = the gradient of `hinge_loss_forward` times dloss; 0 where the margin is kept, or just kept."""
    batch, classes = x.shape
    if x.size:
        slices, blocks = strips(batch, classes)
        _KERNELS.run(x, "hinge_gradient", blocks, THREADS, x, label, dloss, dx, batch, classes, slices, norm == "L2",
                     batch, *label_fault(x, layer, classes))  # fmt: skip


def _row_parts(prob: ArraySpec, *_: ArraySpec, **attributes: Any) -> int:
    return parts_bytes(blocks_for(prob.shape[0]))


@op(family="cuda", workspace=_row_parts)
def multinomial_loss_forward(prob: CudaArray, label: CudaArray, loss: CudaArray, *, layer: str, ws: CudaArray) -> None:
    """loss = the mean over the batch of -log prob[label], of probabilities of 1e-20 or more."""
    batch, classes = prob.shape
    if not prob.size:
        loss.zero()
        return
    blocks = blocks_for(batch)
    _KERNELS.run(prob, "multinomial_loss", blocks, THREADS, prob, label, loss, ws, batch, classes, _LEAST, batch,
                 *label_fault(prob, layer, classes))  # fmt: skip
    finish(ws, blocks, loss, batch)


@op(family="cuda")
def multinomial_loss_backward(prob: CudaArray, label: CudaArray, dloss: CudaArray, dprob: CudaArray, *,
                              layer: str) -> None:  # fmt: skip
    """dprob = -dloss / prob over the batch at the label, 0 elsewhere; 1e-20 stands for smaller probabilities."""
    batch, classes = prob.shape
    if prob.size:
        slices, blocks = strips(batch, classes)
        _KERNELS.run(prob, "multinomial_gradient", blocks, THREADS, prob, label, dloss, dprob, batch, classes, slices,
                     _LEAST, batch, *label_fault(prob, layer, classes))  # fmt: skip


@op(family="cuda", workspace=strip_parts)
def infogain_loss_forward(x: CudaArray, label: CudaArray, gain: CudaArray, prob: CudaArray, loss: CudaArray, *,
                          ignore_label: int | None, normalization: str, layer: str,
                          ws: CudaArray) -> None:  # fmt: skip
    """prob = softmax of x; loss = the mean of -gain[label] . log prob over what `normalization` counts."""
    outer, classes, inner = x.shape
    if not x.size:
        loss.zero()
        return
    slices, blocks = strips(outer * inner, classes, inner)
    divisor = loss_divisor(normalization, outer, inner, ignore_label)
    _KERNELS.run(x, "infogain_loss", blocks, THREADS, x, label, gain, prob, loss, ws, outer * inner, classes, inner,
                 slices, ignore_as_number(ignore_label), _LEAST, divisor,
                 *label_fault(x, layer, classes))  # fmt: skip
    finish(ws, blocks, loss, divisor)


def _sums_and_counts(prob: ArraySpec, label: ArraySpec, *_: ArraySpec, **attributes: Any) -> int:
    return 8 * prob.shape[1] + count_bytes(label)


@op(family="cuda", workspace=_sums_and_counts)
def infogain_loss_backward(prob: CudaArray, label: CudaArray, gain: CudaArray, dloss: CudaArray, dx: CudaArray, *,
                           ignore_label: int | None, normalization: str, layer: str,
                           ws: CudaArray) -> None:  # fmt: skip
    """dx = dloss * (prob * the sum of gain[label] - gain[label]) over the normalizer, 0 at ignored labels."""
    outer, classes, inner = prob.shape
    if not prob.size:
        return
    slices, blocks = strips(outer * inner, classes, inner)
    ignore = ignore_as_number(ignore_label)
    divisor = loss_divisor(normalization, outer, inner, ignore_label)
    parts = ws.part(8 * classes, (ws.nbytes - 8 * classes,))
    counts = count_labels(label, classes, ignore, divisor, parts)
    _KERNELS.run(gain, "gain_sums", classes, THREADS, gain, ws, classes)
    _KERNELS.run(dx, "infogain_gradient", blocks, THREADS, prob, label, gain, dloss, dx, ws, parts, counts,
                 outer * inner, classes, inner, slices, ignore, divisor,
                 *label_fault(prob, layer, classes))  # fmt: skip
