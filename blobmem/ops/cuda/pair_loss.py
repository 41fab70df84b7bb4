"""Losses between two arrays of one shape: Euclidean, sigmoid cross-entropy, contrastive.

Arrays are as on the host.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.loss import blocks_for, count_bytes, finish, loss_divisor, parts_bytes, strip_parts, strips
from blobmem.ops.labels import ignore_as_number
from blobmem.ops.registry import ArraySpec, op

_KERNELS = Kernels("pair_loss")
_NO_ZERO = 1e-4  # added to a distance that something is divided by, as in Caffe


def _parts(x: ArraySpec, *_: ArraySpec, **attributes: Any) -> int:
    return parts_bytes(blocks_for(x.size))


@op(family="cuda", workspace=_parts)
def euclidean_loss_forward(a: CudaArray, b: CudaArray, diff: CudaArray, loss: CudaArray, *, ws: CudaArray) -> None:
    """diff = a - b; loss = the sum of diff ** 2 over twice the batch (the first axis)."""
    if not a.size:
        loss.zero()
        return
    blocks, divisor = blocks_for(a.size), 2 * a.shape[0]
    _KERNELS.run(a, "euclidean_loss", blocks, THREADS, a, b, diff, loss, ws, a.size, divisor)
    finish(ws, blocks, loss, divisor)


@op(family="cuda")
def euclidean_loss_backward(diff: CudaArray, dloss: CudaArray, da: CudaArray, *, sign: float) -> None:
    """da = sign * dloss * diff over the batch."""
    _KERNELS.over(diff, "euclidean_gradient", diff.size, diff, dloss, da, diff.size, sign, max(1, diff.shape[0]))


@op(family="cuda", workspace=_parts)
def sigmoid_cross_entropy_forward(x: CudaArray, target: CudaArray, loss: CudaArray, *, ignore_label: int | None,
                                  normalization: str, ws: CudaArray) -> None:  # fmt: skip
    """loss = the sum of -(t log p + (1 - t) log(1 - p)) with p = sigmoid(x), over what `normalization` counts.

    As in Caffe, targets are ignored whose whole part is `ignore_label`.
    """
    if not x.size:
        loss.zero()
        return
    batch, values = target.shape
    blocks, divisor = blocks_for(x.size), loss_divisor(normalization, batch, values, ignore_label)
    _KERNELS.run(x, "sigmoid_cross_entropy", blocks, THREADS, x, target, loss, ws, x.size,
                 ignore_as_number(ignore_label), divisor)  # fmt: skip
    finish(ws, blocks, loss, divisor)


def _counts(x: ArraySpec, target: ArraySpec, *_: ArraySpec, **attributes: Any) -> int:
    return count_bytes(target)


@op(family="cuda", workspace=_counts)
def sigmoid_cross_entropy_backward(x: CudaArray, target: CudaArray, dloss: CudaArray, dx: CudaArray, *,
                                   ignore_label: int | None, normalization: str,
                                   ws: CudaArray) -> None:  # fmt: skip
    """dx = dloss * (sigmoid(x) - target) over the normalizer, 0 where the target is ignored."""
    batch, values = target.shape
    ignore, counts = ignore_as_number(ignore_label), 0
    divisor = loss_divisor(normalization, batch, values, ignore_label)
    if divisor == 0:
        counts = blocks_for(target.size)
        _KERNELS.run(target, "count_targets", counts, THREADS, target, ws, target.size, ignore)
    _KERNELS.over(x, "sigmoid_cross_entropy_gradient", x.size, x, target, dloss, dx, ws, counts, x.size, ignore,
                  divisor)  # fmt: skip


@op(family="cuda", workspace=strip_parts)
def contrastive_loss_forward(a: CudaArray, b: CudaArray, similar: CudaArray, loss: CudaArray, *, margin: float,
                             legacy: bool, ws: CudaArray) -> None:  # fmt: skip
    """loss = half the mean over pairs of d^2 where similar, else of max(0, margin - d)^2, or of max(0, margin - d^2).

    d is the distance of a's row to b's, `similar` (batch,), where a whole part of 0 says no; the last form is the
    legacy one. Hadsell, Chopra and LeCun 2006.
    """
    batch, values = a.shape
    if not batch:
        loss.zero()
        return
    slices, blocks = strips(batch, values)
    _KERNELS.run(a, "contrastive_loss", blocks, THREADS, a, b, similar, loss, ws, batch, values, slices, margin, legacy,
                 2 * batch)  # fmt: skip
    finish(ws, blocks, loss, 2 * batch)


@op(family="cuda")
def contrastive_loss_backward(a: CudaArray, b: CudaArray, similar: CudaArray, dloss: CudaArray, da: CudaArray, *,
                              margin: float, legacy: bool) -> None:  # fmt: skip
    """da = the gradient of `contrastive_loss_forward` times dloss, that of b with the two exchanged."""
    batch, values = a.shape
    if a.size:
        slices, blocks = strips(batch, values)
        _KERNELS.run(a, "contrastive_gradient", blocks, THREADS, a, b, similar, dloss, da, batch, values, slices,
                     margin, legacy, _NO_ZERO, batch)  # fmt: skip
