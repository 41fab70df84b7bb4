"""Convolution and its transpose, over any number of spatial axes, in groups.

Operands are (images, channels, *spatial); weights (outputs, channels / group, *kernel), for deconvolution (channels,
outputs / group, *kernel). `stride`, `pad` and `dilation` are tuples with an entry per spatial axis, `group` an integer.
The sizes are the caller's: outputs of a convolution are (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1.

Products are our own (`products`): columns are packed straight from the image, no image is ever unrolled as a whole.
The gradient for the data reads the weights in another order, which is the only use of a workspace: their size, rounded
up to 8 channels. Sums over long runs are taken in blocks (`conv_plan`), so no result depends on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blobmem.ops.host import conv_plan as plan
from blobmem.ops.host.channels import sum_channels
from blobmem.ops.host.conv_direct import direct_backward_data, direct_backward_weights, direct_forward
from blobmem.ops.host.conv_kernels import columns_product, fill_channels, pack_weights, weights_product
from blobmem.ops.host.conv_scatter import cheaper, scatter_backward_data
from blobmem.ops.host.parallel import num_threads, parallel_for
from blobmem.ops.host.tile import ROWS
from blobmem.ops.registry import op

Shape = tuple[int, ...]

_LEAST_ROWS = 32  # outputs for which packing columns anew is still worth it


def _problem(x: Any, w: Any, y: Any, stride: Shape, pad: Shape, dilation: Shape, group: int) -> plan.Problem:
    """For the convolution x -> y, whichever of the arrays is given and whichever wanted."""
    return plan.Problem(
        images=x.shape[0], groups=group, channels=x.shape[1] // group, out_channels=y.shape[1] // group,
        source=plan.fold(x.shape[2:], 1), out=plan.fold(y.shape[2:], 1), kernel=plan.fold(w.shape[2:], 1),
        stride=plan.fold(stride, 1), pad=plan.fold(pad, 0), dilation=plan.fold(dilation, 1),
        itemsize=np.dtype(x.dtype).itemsize,
    )  # fmt: skip


def _is_direct(x: Any, w: Any, group: int) -> bool:
    """Too few channels in a group for a product to be worth packing for, or too many axes for a plan."""
    return x.ndim > 5 or (group > 1 and w.shape[1] * w.shape[0] // group == 1)


def _forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, y: np.ndarray, attributes: dict[str, Any]) -> None:
    if _is_direct(x, w, attributes["group"]):
        direct_forward(x, w, b, y, **attributes)
        return
    p = _problem(x, w, y, **attributes)
    k = p.channels * math.prod(p.kernel)
    _run(plan.forward_pass(p), p.groups, x, w.reshape(-1), (p.out_channels * k, ROWS * k, k, 1), b, y)


def _run(cut: plan.Pass, groups: int, source: np.ndarray, a: np.ndarray, strides: Shape, bias: np.ndarray | None,
         out: np.ndarray) -> None:  # fmt: skip
    outs, items = int(cut.geometry[plan.OUT_CHANNELS]), cut.count * groups
    # a few small images alone do not keep the threads busy
    wanted = max(1, min(-(-2 * num_threads() // max(1, items)), outs // _LEAST_ROWS))
    rows = -(-outs // wanted // ROWS) * ROWS
    parallel_for(columns_product, items * -(-outs // rows), source.reshape(-1), a, *strides,
                 a if bias is None else bias, bias is not None, out.reshape(-1), rows, cut.geometry,
                 cut.blocks, cut.out_at, cut.step_at, cut.pieces, cut.first_piece, cut.band_rows,
                 scratch_of=(plan.product_scratch(cut, source.itemsize), source.dtype))  # fmt: skip


def _backward_data(dy: np.ndarray, w: np.ndarray, b: np.ndarray | None, dx: np.ndarray, ws: np.ndarray,
                   attributes: dict[str, Any]) -> None:  # fmt: skip
    """dx from dy; with `b`, the outputs of a deconvolution of dy."""
    if _is_direct(dx, w, attributes["group"]):
        direct_backward_data(dy, w, b, dx, **attributes)
        return
    p = _problem(dx, w, dy, **attributes)
    if cheaper(p.channels, p.out_channels, p.kernel, p.source, p.out, p.stride):
        scatter_backward_data(dy, w, b, dx, **attributes)
        return
    taps = math.prod(p.kernel)
    tiles = -(-p.channels // ROWS)
    packed = ws[: ws.size // 64 * 64].view(w.dtype)
    passes = plan.data_passes(p)
    if any(cut.steps == 0 for cut in passes):
        parallel_for(fill_channels, dx.shape[0] * dx.shape[1], dx.reshape(-1), math.prod(dx.shape[2:]), dx.shape[1],
                     dx.reshape(-1) if b is None else b, b is not None, grain=16)  # fmt: skip
    for cut in passes:
        if not cut.steps:
            continue
        parallel_for(pack_weights, p.groups * tiles, w.reshape(-1), p.out_channels * p.channels * taps, taps,
                     p.channels * taps, cut.tap_index, p.channels, p.out_channels, packed)  # fmt: skip
        size = cut.steps * ROWS
        _run(cut, p.groups, dy, packed, (tiles * size, size, 1, ROWS), b, dx)


def _backward_weights(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, accumulate: bool,
                      attributes: dict[str, Any]) -> None:  # fmt: skip
    if _is_direct(x, dw, attributes["group"]):
        direct_backward_weights(x, dy, dw, accumulate=accumulate, **attributes)
        return
    p = _problem(x, dw, dy, **attributes)
    steps = p.channels * math.prod(p.kernel)
    wanted = -(-steps * p.groups // (2 * num_threads()))
    chunk = min(192, max(16, -(-wanted // ROWS) * ROWS), -(-steps // ROWS) * ROWS)
    rows = min(p.out_channels, 480)
    cut = plan.weights_pass(p, chunk)
    items = p.groups * -(-p.out_channels // rows) * -(-steps // chunk)
    parallel_for(weights_product, items, x.reshape(-1), dy.reshape(-1), dw.reshape(-1), accumulate, rows, cut.geometry,
                 cut.blocks, cut.out_at, cut.step_at, cut.pieces, cut.band_rows,
                 scratch_of=(plan.weights_scratch(cut, rows, p.itemsize), x.dtype))  # fmt: skip


def _weights_bytes(channels: int, w: Any, group: int) -> int:
    """Weights as the gradient for the data reads them, `channels` the data's."""
    per_group = channels // group
    return -(-per_group // ROWS) * ROWS * (w.size // per_group) * np.dtype(w.dtype).itemsize + 64


@op
def conv_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, y: np.ndarray, *, stride: Shape, pad: Shape,
                 dilation: Shape, group: int) -> None:  # fmt: skip
    """y = x convolved with w, plus b per channel (None: no bias). No workspace."""
    _forward(x, w, b, y, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})


@op(workspace=lambda dy, w, dx, *, group, **_: _weights_bytes(dx.shape[1], w, group))
def conv_backward_data(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, ws: np.ndarray, stride: Shape, pad: Shape,
                       dilation: Shape, group: int) -> None:  # fmt: skip
    """The gradient for x."""
    _backward_data(dy, w, None, dx, ws, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})


@op
def conv_backward_weights(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *, stride: Shape, pad: Shape, dilation: Shape,
                          group: int, accumulate: bool) -> None:  # fmt: skip
    """The gradient for w."""
    _backward_weights(x, dy, dw, accumulate, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})


@op
def conv_backward_bias(dy: np.ndarray, db: np.ndarray, *, accumulate: bool) -> None:
    """The gradient for a bias per channel: dy summed over images and positions; of deconvolutions too."""
    images, channels = dy.shape[:2]
    parallel_for(sum_channels, channels, dy.reshape(-1), images, channels, math.prod(dy.shape[2:]), db, accumulate,
                 grain=max(1, 65536 * channels // max(1, dy.size)))  # fmt: skip


@op(workspace=lambda x, w, b, y, *, group, **_: _weights_bytes(y.shape[1], w, group))
def deconv_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, y: np.ndarray, *, ws: np.ndarray, stride: Shape,
                   pad: Shape, dilation: Shape, group: int) -> None:  # fmt: skip
    """y = the transpose of a convolution with w, applied to x, plus b per channel (None: no bias)."""
    _backward_data(x, w, b, y, ws, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})


@op
def deconv_backward_data(dy: np.ndarray, w: np.ndarray, dx: np.ndarray, *, stride: Shape, pad: Shape, dilation: Shape,
                         group: int) -> None:  # fmt: skip
    """The gradient for a deconvolution's x."""
    _forward(dy, w, None, dx, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})


@op
def deconv_backward_weights(x: np.ndarray, dy: np.ndarray, dw: np.ndarray, *, stride: Shape, pad: Shape,
                            dilation: Shape, group: int, accumulate: bool) -> None:  # fmt: skip
    """The gradient for a deconvolution's w."""
    _backward_weights(dy, x, dw, accumulate, {"stride": stride, "pad": pad, "dilation": dilation, "group": group})
