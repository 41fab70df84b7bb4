"""Batch normalisation, and scaling and shifting by channel.

All large arrays are (outer, channels, inner), statistics and factors (channels,). x and y (dy and dx) may be the same
memory.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import batch_norm, channels
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import ArraySpec, op

_KERNELS, _SOURCES = Kernels("norm"), Kernels("batch_norm_sources")
_SHARES = 1024  # threads that share the terms of a few sums
_EACH = 4  # outputs, or inputs, of a block of these


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_forward(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray,
                       running_mean: CudaArray, running_var: CudaArray, factor: CudaArray, *, eps: float,
                       fraction: float, ws: CudaArray) -> None:  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) with the batch's own statistics (Ioffe and Szegedy 2015, algorithm 1).

    xhat gets another copy of y (None: not wanted), mean (2 * channels,) the means and what they have lost by rounding,
    inv_std the other statistic. The running sums become fraction * old + new, the new variance being the unbiased one
    and the new factor (1,) being 1.
    """
    state = mean, inv_std, running_mean, running_var, factor
    batch_norm.forward(x, y, xhat, *state, None, None, eps=eps, fraction=fraction, relu=False, ws=ws)


@op(family="cuda")
def batch_norm_given(x: CudaArray, y: CudaArray, xhat: CudaArray | None, mean: CudaArray, inv_std: CudaArray) -> None:
    """y and xhat of `batch_norm_forward` of the same x, to the same bits, by the statistics that it has left."""
    batch_norm.given(x, y, xhat, mean, inv_std, None, None, relu=False)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_moments(x: CudaArray, moments: CudaArray, *, before: int, last: bool = True, ws: CudaArray) -> None:
    """Each channel's mean, and after all of these its sum of squared distances from it, in moments (2 * channels,).

    It is of x, whose channels `before` numbers came from others, and of these: their moments are read if there are any
    (Chan, Golub and LeVeque 1979). Where moments has more room they are there only with the `last` of x.
    """
    batch_norm.moments(x, moments, before=before, last=last, ws=ws)


@op(family="cuda")
def batch_norm_settle(moments: CudaArray, mean: CudaArray, inv_std: CudaArray, running_mean: CudaArray,
                      running_var: CudaArray, factor: CudaArray, *, eps: float, fraction: float,
                      count: int) -> None:  # fmt: skip
    """What `batch_norm_forward` leaves of channels of `count` numbers, from their moments (`batch_norm_moments`)."""
    state = mean, inv_std, running_mean, running_var, factor
    batch_norm.settle(moments, state, eps=eps, fraction=fraction, count=count)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_backward(xhat: CudaArray, inv_std: CudaArray, dy: CudaArray, dx: CudaArray, *, ws: CudaArray) -> None:
    """dx = inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)), means over channels."""
    batch_norm.backward(xhat, inv_std, None, None, dy, dx, None, None, relu=False, accumulate=False, ws=ws)


@op(family="cuda", workspace=batch_norm.workspace)
def batch_norm_sums(xhat: CudaArray, gamma: CudaArray | None, beta: CudaArray | None, dy: CudaArray, sums: CudaArray, *,
                    relu: bool, first: bool, last: bool = True, ws: CudaArray) -> None:  # fmt: skip
    """sums (2 * channels,) get each channel's sum of g, and after all of these that of g * xhat.

    g is dy, with `relu` 0 where gamma * xhat + beta is not positive; gamma and beta may be left out (1 and 0). Unless
    this is the `first`, they are added to what is in sums. Where sums has more room they are there only with the
    `last`.
    """
    batch_norm.sums(xhat, gamma, beta, dy, sums, relu=relu, first=first, last=last, ws=ws)


@op(family="cuda")
def batch_norm_gradients(sums: CudaArray, dgamma: CudaArray | None, dbeta: CudaArray | None, *,
                         accumulate: bool) -> None:  # fmt: skip
    """dgamma (+)= the second half of what `batch_norm_sums` has summed, dbeta (+)= the first; None: not wanted."""
    batch_norm.gradients(sums, dgamma, dbeta, accumulate=accumulate)


@op(family="cuda")
def batch_norm_backward_given(xhat: CudaArray, inv_std: CudaArray, gamma: CudaArray | None, beta: CudaArray | None,
                              dy: CudaArray, dx: CudaArray, sums: CudaArray, *, relu: bool,
                              count: int) -> None:  # fmt: skip
    """dx = gamma * inv_std * (g - mean(g) - xhat * mean(g * xhat)), g and the sums of `count` of them by
    `batch_norm_sums`; dx may be dy or xhat."""
    batch_norm.backward_given(xhat, inv_std, gamma, beta, dy, dx, sums, relu=relu, count=count)


@op(family="cuda")
def batch_norm_inference(x: CudaArray, y: CudaArray, running_mean: CudaArray, running_var: CudaArray,
                         factor: CudaArray, *, eps: float) -> None:  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) with the running sums over their factor (0 where that is 0)."""
    batch_norm.inference(x, y, running_mean, running_var, factor, eps=eps)


@op(family="cuda")
def conv_batch_norm_moments(squares: CudaArray, sum_x: CudaArray, w: CudaArray, moments: CudaArray, *,
                            count: int) -> None:  # fmt: skip
    """moments (2 * outputs,), doubles, as of `batch_norm_moments`, of what a 1x1 convolution makes of x.

    w has (outputs, inputs), squares (inputs, inputs): sums of x and x, and sum_x (inputs,), of `count` items. The
    formulas are in `blobmem.net.plan.sources`.
    """
    outputs, inputs = w.shape[:2]
    sizes = outputs, inputs, float(count)
    _SOURCES.run(w, "moments_from_sums", -(-outputs // _EACH), _SHARES, squares, sum_x, w, moments, *sizes)


def _factors_bytes(*arrays: ArraySpec, **_: Any) -> int:
    inv_std = arrays[5]
    return 2 * inv_std.size * inv_std.dtype.itemsize


@op(family="cuda", workspace=_factors_bytes)
def conv_batch_norm_gradients(products: CudaArray, squares: CudaArray, sum_g: CudaArray, sum_x: CudaArray, w: CudaArray,
                              inv_std: CudaArray, gamma: CudaArray | None, dw: CudaArray, dgamma: CudaArray | None,
                              dbeta: CudaArray | None, of_g: CudaArray, of_x: CudaArray, shift: CudaArray, *,
                              count: int, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """dw, dgamma and dbeta (None: not wanted) of a batch norm, with a scale, of what a 1x1 convolution makes of x.

    g is the gradient of what the scale makes. products and w, dw and of_g have (outputs, inputs), squares and of_x
    (inputs, inputs): of `count` items sums of g and x, and of x and x; so have sum_g (outputs,), sum_x and shift
    (inputs,). The gradient of x is of_g' g + of_x x + shift. The formulas are in `blobmem.net.plan.sources`.
    """
    outputs, inputs = w.shape[:2]
    factors = ws.part(0, (2, outputs), inv_std.dtype)
    sums, results = (products, squares, sum_g, sum_x), (dw, dgamma, dbeta, of_g)
    sizes = outputs, inputs, float(count)
    given = *sums, w, inv_std, gamma, *results, factors, *sizes, accumulate
    _SOURCES.run(w, "weights_from_sums", -(-outputs // _EACH), _SHARES, *given)
    _SOURCES.run(w, "source_from_factors", -(-inputs // _EACH), _SHARES, w, factors, sum_x, of_x, shift, *sizes)


@op(family="cuda")
def batch_norm_backward_global(dy: CudaArray, dx: CudaArray, running_var: CudaArray, factor: CudaArray, *,
                               eps: float) -> None:  # fmt: skip
    """dx of `batch_norm_inference`."""
    batch_norm.inference(dy, dx, None, running_var, factor, eps=eps)


def affine(x: CudaArray, times: CudaArray | None, plus: CudaArray | None, y: CudaArray, relu: bool = False) -> None:
    """y = x * times[c] + plus[c], and with `relu` 0 where that is negative; times and plus may be left out."""
    _KERNELS.chunks(x, "affine", x.size, x, times, plus, y, x.size, x.shape[1], x.shape[2], relu)


@op(family="cuda")
def scale_forward(x: CudaArray, gamma: CudaArray, beta: CudaArray | None, y: CudaArray) -> None:
    """y = x * gamma[c] + beta[c]."""
    affine(x, gamma, beta, y)


@op(family="cuda")
def scale_backward_data(dy: CudaArray, gamma: CudaArray, dx: CudaArray) -> None:
    """dx = dy * gamma[c]."""
    affine(dy, gamma, None, dx)


def _sums_workspace(x: Any, *_: Any, **attributes: Any) -> int:
    return channels.workspace_bytes(x.shape)


@op(family="cuda", workspace=_sums_workspace)
def scale_backward_gamma(x: CudaArray, dy: CudaArray, dgamma: CudaArray, *, accumulate: bool, ws: CudaArray) -> None:
    """dgamma[c] (+)= the sum of dy * x."""
    shape = x.shape[0], x.shape[1], x.shape[2]
    channels.sum_per_channel(shape, x, dy, dgamma, ws, accumulate=accumulate, kind=channels.PRODUCT)


@op(family="cuda", workspace=_sums_workspace)
def scale_backward_beta(dy: CudaArray, dbeta: CudaArray, *, accumulate: bool, ws: CudaArray) -> None:
    """dbeta[c] (+)= the sum of dy."""
    shape = dy.shape[0], dy.shape[1], dy.shape[2]
    channels.sum_per_channel(shape, dy, None, dbeta, ws, accumulate=accumulate)


@op(family="cuda")
def bias_forward(x: CudaArray, b: CudaArray, y: CudaArray) -> None:
    """y = x + b[c]."""
    affine(x, None, b, y)
