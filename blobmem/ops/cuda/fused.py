"""Ops that do in fewer passes over memory what several ops do one after the other; passes over a schedule put them in.

Batch norm's arrays are (outer, channels, inner) as in `norm`, statistics and factors (channels,). x and y (dy and dx)
may be the same memory.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import batch_norm, channels, conv, conv_first, conv_normed, linear, norm
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.products import only_products
from blobmem.ops.registry import op

_KERNELS = Kernels("fused")


@op(family="cuda", workspace=conv.forward_bytes)
def conv_relu_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, ws: CudaArray | None = None,
                      stride: conv.Shape, pad: conv.Shape, dilation: conv.Shape, group: int,
                      layout: str = "NCHW", turned: bool = False, room: int | None = None) -> None:  # fmt: skip
    """`conv_forward` and max(0, .) of that."""
    window = stride, pad, dilation, group, layout
    conv.forward(x, w, b, y, ws, window, relu=True, turned=turned, room=room)


@op(family="cuda", workspace=conv.forward_sum_bytes)
def conv_sum_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, other: CudaArray, y: CudaArray, *,
                     ws: CudaArray | None = None, stride: conv.Shape, pad: conv.Shape, dilation: conv.Shape, group: int,
                     relu: bool, layout: str = "NCHW", turned: bool = False,
                     room: int | None = None) -> None:  # fmt: skip
    """y = `conv_forward` plus other, which is of y's size or as `tile_forward` takes it, and with `relu` max(0, .) of
    that."""
    window = stride, pad, dilation, group, layout
    conv.forward(x, w, b, y, ws, window, relu=relu, turned=turned, other=other, room=room)


@op(family="cuda", workspace=conv.normalized_bytes)
def conv_batch_norm_given(x: CudaArray, w: CudaArray, b: CudaArray | None, other: CudaArray | None, y: CudaArray,
                          kept: CudaArray | None, mean: CudaArray, inv_std: CudaArray, gamma: CudaArray | None,
                          beta: CudaArray | None, *, ws: CudaArray | None = None, stride: conv.Shape, pad: conv.Shape,
                          dilation: conv.Shape, group: int, relu: bool, layout: str = "NCHW", turned: bool = False,
                          room: int | None = None) -> None:  # fmt: skip
    """y = what `batch_norm_given` makes of `conv_forward`, times gamma, plus beta, plus other, with `relu` max(0, .) of
    that; kept, if given, gets what is multiplied by gamma. gamma, beta and other may be left out.

    To rounding: nothing is rounded before it is normalised, or the weights are multiplied beforehand. other, y and kept
    are different arrays of one size.
    """
    window = stride, pad, dilation, group, layout
    if conv_normed.fits(x, w, 1 + (other is not None) + (kept is not None), window, x.device):
        given = x, w, b, other, y, kept, mean, inv_std, gamma, beta
        conv_normed.normalized(*given, relu=relu, turned=turned, ws=ws)
        return
    weights, bias, rest = conv.room_to_normalize(w, ws)
    factors = (gamma, beta) if kept is None else (None, None)
    outputs = w.shape[0]
    arrays = w, b, mean, inv_std, *factors, weights, bias
    _KERNELS.run(w, "normalizing_weights", outputs, THREADS, *arrays, w.size // max(1, outputs), outputs)
    if kept is None:
        conv.forward(x, weights, bias, y, rest, window, relu=relu, turned=turned, other=other, room=room)
        return
    if other is None and conv.is_first(x, w, window, x.device):
        conv_first.forward(x, weights, bias, y, relu=relu, turned=turned, kept=kept, gamma=gamma, beta=beta)
        return
    conv.forward(x, weights, bias, kept, rest, window, turned=turned, room=room)
    folded = kept.reshape(-1, outputs, 1) if layout != "NCHW" else kept.reshape(kept.shape[0], outputs, -1)
    if other is None:
        norm.affine(folded, gamma, beta, y, relu=relu)
    else:
        scale_sum_relu_forward(folded, gamma, beta, other, None, None, y, slope=0.0 if relu else 1.0)


@op(family="cuda", workspace=conv_normed.room(conv_normed.MOMENTS), takes=conv_normed.takes(2, wider=1))
def conv_moments(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray | None, moments: CudaArray, *,
                 before: int, last: bool = True, turned: bool = False, ws: CudaArray,
                 **window: Any) -> None:  # fmt: skip
    """`conv_forward`, and `batch_norm_moments` of that, before it is rounded; y (None: not wanted) gets it.

    Of one tap, or of few channels, where our own kernels are the faster.
    """
    conv_normed.moments(x, w, b, y, moments, before=before, last=last, turned=turned, ws=ws)


@op(family="cuda", workspace=conv_normed.room(conv_normed.SUMS), takes=conv_normed.takes(3))
def conv_batch_norm_sums(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
                         gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, xhat: CudaArray | None,
                         sums: CudaArray, *, relu: bool, first: bool, last: bool = True, turned: bool = False,
                         ws: CudaArray, **window: Any) -> None:  # fmt: skip
    """`batch_norm_sums` of what `batch_norm_given` makes of `conv_forward`, which xhat (None: not wanted) gets; of
    convolutions as `conv_moments` takes."""
    given = x, w, b, mean, inv_std, gamma, beta, dy, xhat, sums
    conv_normed.sums(*given, relu=relu, first=first, last=last, turned=turned, ws=ws)


@op(family="cuda", workspace=conv_normed.room(0), takes=conv_normed.takes(4))
def conv_batch_norm_backward_given(x: CudaArray, w: CudaArray, b: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
                                   gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, dx: CudaArray,
                                   sums: CudaArray, *, relu: bool, count: int, turned: bool = False,
                                   ws: CudaArray | None = None, **window: Any) -> None:  # fmt: skip
    """`batch_norm_backward_given` of the same; dx may be dy."""
    given = x, w, b, mean, inv_std, gamma, beta, dy, dx, sums
    conv_normed.gradient(*given, relu=relu, count=count, turned=turned, ws=ws)


@op(family="cuda", workspace=only_products)
def inner_product_relu_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, transpose: bool,
                               ws: CudaArray) -> None:  # fmt: skip
    """`inner_product_forward` and max(0, .) of that."""
    linear.forward(x, w, b, y, ws, transpose=transpose, relu=True)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_scale_forward(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
                             running_mean: CudaArray, running_var: CudaArray, factor: CudaArray, gamma: CudaArray,
                             beta: CudaArray | None, *, eps: float, fraction: float, relu: bool,
                             ws: CudaArray) -> None:  # fmt: skip
    """`batch_norm_forward`, `scale_forward` and with `relu` max(0, .) of that.

    Where given, xhat gets the normalised x, which `batch_norm_scale_backward` takes.
    """
    state = mean, inv_std, running_mean, running_var, factor
    batch_norm.forward(x, y, xhat, *state, gamma, beta, eps=eps, fraction=fraction, relu=relu, ws=ws)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_scale_sum_relu_forward(x: CudaArray, b: CudaArray, y: CudaArray, xhat: CudaArray | None,
                                      mean: CudaArray, inv_std: CudaArray, running_mean: CudaArray,
                                      running_var: CudaArray, factor: CudaArray, gamma: CudaArray,
                                      beta: CudaArray | None, *, eps: float, fraction: float, slope: float,
                                      ws: CudaArray) -> None:  # fmt: skip
    """`batch_norm_scale_forward`, and y = `sum_relu_forward` of what that makes, which is not written, and b.

    b and y have the size of x, and any shape; y may be x or b.
    """
    state = mean, inv_std, running_mean, running_var, factor
    batch_norm.forward_sum(x, b, y, xhat, state, gamma, beta, eps=eps, fraction=fraction, slope=slope, ws=ws)


@op(family="cuda")
def batch_norm_scale_given(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
                           gamma: CudaArray, beta: CudaArray | None, *, relu: bool) -> None:  # fmt: skip
    """What `batch_norm_scale_forward` makes of the same x, to the same bits, by the statistics that it has left."""
    batch_norm.given(x, y, xhat, mean, inv_std, gamma, beta, relu=relu)


@op(family="cuda")
def batch_norm_scale_sum_relu_given(x: CudaArray, b: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray,
                                    inv_std: CudaArray, gamma: CudaArray, beta: CudaArray | None, *,
                                    slope: float) -> None:  # fmt: skip
    """What `batch_norm_scale_sum_relu_forward` makes of the same x and b, likewise."""
    batch_norm.given_sum(x, b, y, xhat, mean, inv_std, gamma, beta, slope=slope)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_scale_backward(xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray, beta: CudaArray | None,
                              dy: CudaArray, dx: CudaArray, dgamma: CudaArray | None, dbeta: CudaArray | None, *,
                              relu: bool, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """dx, dgamma and dbeta (None: not wanted) from the gradient of what `batch_norm_scale_forward` made.

    Where its ReLU was shut is computed again, to the same bits.
    """
    factors, wanted = (xhat, inv_std, gamma, beta), (dgamma, dbeta)
    batch_norm.backward(*factors, dy, dx, *wanted, relu=relu, accumulate=accumulate, ws=ws)


@op(family="cuda")
def batch_norm_scale_inference(x: CudaArray, y: CudaArray, running_mean: CudaArray, running_var: CudaArray,
                               factor: CudaArray, gamma: CudaArray, beta: CudaArray | None, *, eps: float,
                               relu: bool) -> None:  # fmt: skip
    """`batch_norm_inference`, `scale_forward` and with `relu` max(0, .) of that."""
    batch_norm.inference(x, y, running_mean, running_var, factor, gamma, beta, eps=eps, relu=relu)


@op(family="cuda")
def sum_batch_norm_scale_inference(a: CudaArray, b: CudaArray, total: CudaArray | None, y: CudaArray,
                                   running_mean: CudaArray, running_var: CudaArray, factor: CudaArray,
                                   gamma: CudaArray, beta: CudaArray | None, *, eps: float,
                                   relu: bool) -> None:  # fmt: skip
    """total (None: not wanted) = a + b, and y = `batch_norm_scale_inference` of that.

    a, b and total have the size of y, and any shape; total and y may be a or b.
    """
    batch_norm.sum_inference(a, b, total, y, running_mean, running_var, factor, gamma, beta, eps=eps, relu=relu)


@op(family="cuda")
def scale_relu_forward(x: CudaArray, gamma: CudaArray, beta: CudaArray | None, y: CudaArray) -> None:
    """`scale_forward` and max(0, .) of that: of xhat the y of `batch_norm_scale_forward`, to the same bits."""
    norm.affine(x, gamma, beta, y, relu=True)


@op(family="cuda")
def sum_relu_forward(a: CudaArray, b: CudaArray, y: CudaArray, *, slope: float) -> None:
    """y = a + b where positive, slope * (a + b) elsewhere; y may be a or b."""
    _KERNELS.map("sum_relu", (a, b, y), slope)


@op(family="cuda")
def scale_sum_relu_forward(a: CudaArray, gamma_a: CudaArray, beta_a: CudaArray | None, b: CudaArray,
                           gamma_b: CudaArray | None, beta_b: CudaArray | None, y: CudaArray, *,
                           slope: float) -> None:  # fmt: skip
    """`sum_relu_forward` of `scale_forward` of a and, with gamma_b, of b, to the same bits.

    b and y have the size of a, and any shape; y may be a or b.
    """
    arrays = a, gamma_a, beta_a, b, gamma_b, beta_b, y
    _KERNELS.chunks(a, "scale_sum_relu", a.size, *arrays, a.size, a.shape[1], a.shape[2], slope)


@op(family="cuda")
def sum_relu_backward(y: CudaArray, dy: CudaArray, da: CudaArray | None, db: CudaArray | None, *,
                      slope: float) -> None:  # fmt: skip
    """dy, da and db (None: not wanted) all become dy where y is positive, slope * dy elsewhere."""
    _KERNELS.over(dy, "sum_relu_gradient", dy.size, y, dy, None, dy, da, db, dy.size, slope)


@op(family="cuda")
def sums_relu_backward(y: CudaArray, one: CudaArray, two: CudaArray, dy: CudaArray, da: CudaArray | None,
                       db: CudaArray | None, *, slope: float) -> None:  # fmt: skip
    """dy, da and db (None: not wanted) all become one + two where y is positive, slope * (one + two) elsewhere."""
    _KERNELS.over(dy, "sum_relu_gradient", dy.size, y, one, two, dy, da, db, dy.size, slope)


def _summed_room(top: Any, one: Any, two: Any, total: Any, g: Any, xhat: Any, *_: Any, **attributes: Any) -> int:
    return batch_norm.workspace(xhat, **attributes)


@op(family="cuda", workspace=_summed_room)
def sums_relu_batch_norm_scale_backward(y: CudaArray, one: CudaArray, two: CudaArray, dy: CudaArray | None,
                                        da: CudaArray, xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray,
                                        dx: CudaArray, dgamma: CudaArray | None, dbeta: CudaArray | None, *,
                                        slope: float, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """`sums_relu_backward` to dy (None: not wanted) and da, and `batch_norm_scale_backward` of what these get, with no
    ReLU; to the same bits. The arrays of the first have the size of xhat, and any shape.

    dy, da and dx may be y, one or two; dx may be xhat.
    """
    batch_norm.summed_backward(
        y, one, two, dy, da, xhat, inv_std, gamma, dx, dgamma, dbeta, slope=slope, accumulate=accumulate, ws=ws
    )


def _bias_room(x: Any, dy: Any, dx: Any, db: Any, **_: Any) -> int:
    return channels.workspace_bytes((dx.size // max(1, db.size), db.size, 1))


@op(family="cuda", workspace=_bias_room)
def relu_bias_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, db: CudaArray, *, slope: float, accumulate: bool,
                       ws: CudaArray | None = None) -> None:  # fmt: skip
    """`relu_backward`, and `conv_backward_bias` of its dx, whose last axis is of channels; at least two of them."""
    channels.relu_gradient(x, dy, dx, db, ws, slope=slope, accumulate=accumulate)


@op(family="cuda", workspace=lambda y, one, two, dy, db, **_: _bias_room(y, two, dy, db))
def sums_relu_bias_backward(y: CudaArray, one: CudaArray, two: CudaArray, dy: CudaArray, db: CudaArray, *, slope: float,
                            accumulate: bool, ws: CudaArray | None = None) -> None:  # fmt: skip
    """`sums_relu_backward` to dy, and `conv_backward_bias` of that, whose last axis is of channels; at least two of
    them. dy may be y, one or two."""
    channels.relu_gradient(y, one, dy, db, ws, slope=slope, accumulate=accumulate, more=two)
