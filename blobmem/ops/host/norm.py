"""Batch normalisation, and scaling and shifting by channel.

All large arrays are (outer, channels, inner), statistics and factors (channels,). x and y (dy and dx) may be the same
memory. Sums over a channel are taken in double precision over runs of `inner`.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.channels import (
    affine,
    affine_across,
    dot_channels,
    gradient_given,
    gradient_sums,
    merge_moments,
    normalize,
    normalize_backward,
    normalize_given,
    settle,
    sum_channels,
)
from blobmem.ops.host.channels_flat import (
    TILE,
    gradient_columns_given,
    gradient_sums_columns,
    merge_moments_columns,
    normalize_columns,
    normalize_columns_backward,
    normalize_columns_given,
    sum_columns,
)
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_GRAIN = 32768
_TWO_TILES, _FIVE_TILES = (2 * TILE, np.float64), (5 * TILE, np.float64)


def _planes(x: np.ndarray) -> int:
    return 1 + _GRAIN // max(1, x.shape[2])


def _channels(x: np.ndarray) -> int:
    return 1 + _GRAIN // max(1, x.shape[0] * x.shape[2])


def _rows(x: np.ndarray) -> int:
    return 1 + _GRAIN // max(1, x.shape[1])


def _affine(x: np.ndarray, y: np.ndarray, less: np.ndarray | None, times: np.ndarray | None,
            plus: np.ndarray | None) -> None:  # fmt: skip
    """y = (x - less) * times + plus."""
    flat = x.reshape(-1)
    given = [flat if values is None else values.reshape(-1) for values in (less, times, plus)]
    wanted = less is not None, times is not None, plus is not None
    outer, channels, inner = x.shape
    if inner == 1:
        parallel_for(affine_across, outer, flat, y.reshape(-1), channels, *given, *wanted, grain=_rows(x))
    else:
        parallel_for(affine, outer * channels, flat, y.reshape(-1), channels, inner, *given, *wanted, grain=_planes(x))


def _sums(x: np.ndarray, y: np.ndarray | None, total: np.ndarray, accumulate: bool) -> None:
    """total (+)= the sums of x, or of x * y, by channel."""
    outer, channels, inner = x.shape
    flat, out = x.reshape(-1), total.reshape(-1)
    other = flat if y is None else y.reshape(-1)
    if inner == 1:
        parallel_for(sum_columns, channels, flat, other, y is not None, outer, channels, out, accumulate,
                     grain=_channels(x), scratch_of=_TWO_TILES)  # fmt: skip
    elif y is None:
        parallel_for(sum_channels, channels, flat, outer, channels, inner, out, accumulate, grain=_channels(x))
    else:
        parallel_for(dot_channels, channels, flat, other, outer, channels, inner, out, accumulate, grain=_channels(x))


@op
def batch_norm_forward(x: np.ndarray, y: np.ndarray, xhat: np.ndarray | None, mean: np.ndarray, inv_std: np.ndarray,
                       running_mean: np.ndarray, running_var: np.ndarray, factor: np.ndarray, *, eps: float,
                       fraction: float) -> None:  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) with the batch's own statistics (Ioffe and Szegedy 2015, algorithm 1).

    xhat gets another copy of y, for `batch_norm_backward` (None: not wanted), mean and inv_std the statistics. The
    running sums become fraction * old + new, the new variance being the unbiased one and the new factor (1,) being 1.
    """
    outer, channels, inner = x.shape
    large = x.reshape(-1), y.reshape(-1), (y if xhat is None else xhat).reshape(-1), xhat is not None
    small = [values.reshape(-1) for values in (mean, inv_std, running_mean, running_var)]
    if inner == 1:
        parallel_for(normalize_columns, channels, *large, outer, channels, *small, float(eps), float(fraction),
                     grain=_channels(x), scratch_of=_TWO_TILES)  # fmt: skip
    else:
        parallel_for(normalize, channels, *large, outer, channels, inner, *small, float(eps), float(fraction),
                     grain=_channels(x))  # fmt: skip
    factor *= fraction
    factor += 1


@op
def batch_norm_given(x: np.ndarray, y: np.ndarray, xhat: np.ndarray | None, mean: np.ndarray,
                     inv_std: np.ndarray) -> None:  # fmt: skip
    """y and xhat of `batch_norm_forward` of the same x, to the same bits, by the statistics that it has left."""
    outer, channels, inner = x.shape
    large = x.reshape(-1), y.reshape(-1), (y if xhat is None else xhat).reshape(-1), xhat is not None
    small = mean.reshape(-1), inv_std.reshape(-1)
    if inner == 1:
        parallel_for(normalize_columns_given, outer, *large, channels, *small, grain=_rows(x), scratch_of=_TWO_TILES)
    else:
        parallel_for(normalize_given, outer * channels, *large, channels, inner, *small, grain=_planes(x))


@op
def batch_norm_moments(x: np.ndarray, moments: np.ndarray, *, before: int, last: bool = True) -> None:
    """Each channel's mean, and after all of these its sum of squared distances from it, in moments (2 * channels,).

    It is of x, whose channels `before` numbers came from others, and of these: their moments are read if there are any
    (Chan, Golub and LeVeque 1979). They are there after each x, not only the `last`.
    """
    outer, channels, inner = x.shape
    if x.size == 0:
        if not before:
            moments[...] = 0
    elif inner == 1:
        parallel_for(merge_moments_columns, channels, x.reshape(-1), outer, channels, moments.reshape(-1), int(before),
                     grain=_channels(x))  # fmt: skip
    else:
        parallel_for(merge_moments, channels, x.reshape(-1), outer, channels, inner, moments.reshape(-1), int(before),
                     grain=_channels(x))  # fmt: skip


@op
def batch_norm_settle(moments: np.ndarray, mean: np.ndarray, inv_std: np.ndarray, running_mean: np.ndarray,
                      running_var: np.ndarray, factor: np.ndarray, *, eps: float, fraction: float,
                      count: int) -> None:  # fmt: skip
    """What `batch_norm_forward` leaves of channels of `count` numbers, from their moments (`batch_norm_moments`)."""
    channels = inv_std.size
    small = [values.reshape(-1) for values in (mean, inv_std, running_mean, running_var)]
    parallel_for(settle, channels, moments.reshape(-1), channels, int(count), *small, float(eps), float(fraction),
                 grain=_GRAIN)  # fmt: skip
    factor *= fraction
    factor += 1


def _running(running: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """The mean of what a running sum has summed, in double precision; as small as the channels are many."""
    weight = float(factor.reshape(-1)[0])
    return running.reshape(-1).astype(np.float64) * (1 / weight if weight else 0.0)


def _inverse(variance: np.ndarray, factor: np.ndarray, eps: float) -> np.ndarray:
    return (1 / np.sqrt(_running(variance, factor) + eps)).astype(variance.dtype)


@op
def batch_norm_inference(x: np.ndarray, y: np.ndarray, running_mean: np.ndarray, running_var: np.ndarray,
                         factor: np.ndarray, *, eps: float) -> None:  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) with the running sums over their factor (0 where that is 0)."""
    mean = _running(running_mean, factor).astype(x.dtype)
    _affine(x, y, mean, _inverse(running_var, factor, eps), None)


@op
def fold_norm(w: np.ndarray, b: np.ndarray | None, running_mean: np.ndarray, running_var: np.ndarray,
              factor: np.ndarray, gamma: np.ndarray | None, beta: np.ndarray | None, out: np.ndarray,
              shift: np.ndarray, *, eps: float, axis: int, turned: bool) -> None:  # fmt: skip
    """Weights `out` and a bias that do what `w` and `b`, `batch_norm_inference` and `scale_forward` do one by one.

    Outputs are along `axis` of w. With `turned` the memory of out has (outputs, taps..., channels), and w's has
    (outputs, channels, taps...).
    """
    times = _inverse(running_var, factor, eps) * (1 if gamma is None else gamma)
    shift[...] = ((0 if b is None else b) - _running(running_mean, factor)) * times + (0 if beta is None else beta)
    outputs, lead = w.shape[axis], math.prod(w.shape[:axis])
    if turned:
        np.multiply(w.reshape(outputs, w.shape[1], -1), times[:, None, None].astype(w.dtype),
                    out=out.reshape(outputs, -1, w.shape[1]).swapaxes(1, 2))  # fmt: skip
    else:
        shape = lead, outputs, -1
        np.multiply(w.reshape(shape), times[:, None].astype(w.dtype), out=out.reshape(shape))


@op
def batch_norm_backward(xhat: np.ndarray, inv_std: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx of `batch_norm_forward`, from what it kept."""
    outer, channels, inner = dy.shape
    arrays = [values.reshape(-1) for values in (xhat, inv_std, dy, dx)]
    if inner == 1:
        parallel_for(normalize_columns_backward, channels, *arrays, outer, channels, grain=_channels(dy),
                     scratch_of=_TWO_TILES)  # fmt: skip
    else:
        parallel_for(normalize_backward, channels, *arrays, outer, channels, inner, grain=_channels(dy))


def _shift(gamma: np.ndarray | None, beta: np.ndarray | None, other: np.ndarray) -> tuple:
    """Both, `other` where one is absent, and which of them there are."""
    given = [other if values is None else values.reshape(-1) for values in (gamma, beta)]
    return *given, gamma is not None, beta is not None


@op
def batch_norm_sums(xhat: np.ndarray, gamma: np.ndarray | None, beta: np.ndarray | None, dy: np.ndarray,
                    sums: np.ndarray, *, relu: bool, first: bool, last: bool = True) -> None:  # fmt: skip
    """sums (2 * channels,) get each channel's sum of g, and after all of these that of g * xhat.

    g is dy, with `relu` 0 where gamma * xhat + beta is not positive; gamma and beta may be left out (1 and 0). Unless
    this is the `first`, they are added to what is in sums. They are there after each, not only the `last`.
    """
    outer, channels, inner = dy.shape
    large = xhat.reshape(-1), dy.reshape(-1)
    more = *_shift(gamma, beta, large[0]), bool(relu), sums.reshape(-1), bool(first)
    if inner == 1:
        parallel_for(gradient_sums_columns, channels, *large, outer, channels, *more, grain=_channels(dy),
                     scratch_of=_TWO_TILES)  # fmt: skip
    else:
        parallel_for(gradient_sums, channels, *large, outer, channels, inner, *more, grain=_channels(dy))


@op
def batch_norm_gradients(sums: np.ndarray, dgamma: np.ndarray | None, dbeta: np.ndarray | None, *,
                         accumulate: bool) -> None:  # fmt: skip
    """dgamma (+)= the second half of what `batch_norm_sums` has summed, dbeta (+)= the first; None: not wanted."""
    plain, along = sums.reshape(2, -1)
    for total, new in ((dgamma, along), (dbeta, plain)):
        if total is not None:
            total[...] = new.astype(total.dtype).reshape(total.shape) + (total if accumulate else 0)


@op
def batch_norm_backward_given(xhat: np.ndarray, inv_std: np.ndarray, gamma: np.ndarray | None, beta: np.ndarray | None,
                              dy: np.ndarray, dx: np.ndarray, sums: np.ndarray, *, relu: bool,
                              count: int) -> None:  # fmt: skip
    """dx = gamma * inv_std * (g - mean(g) - xhat * mean(g * xhat)), g and the sums of `count` of them by
    `batch_norm_sums`; dx may be dy or xhat."""
    outer, channels, inner = dy.shape
    large, small = [values.reshape(-1) for values in (xhat, dy, dx)], inv_std.reshape(-1)
    more = small, *_shift(gamma, beta, small), bool(relu), sums.reshape(-1), int(count)
    if inner == 1:
        parallel_for(gradient_columns_given, outer, *large, channels, *more, grain=_rows(dy), scratch_of=_FIVE_TILES)
    else:
        parallel_for(gradient_given, outer * channels, *large, channels, inner, *more, grain=_planes(dy))


@op
def batch_norm_backward_global(dy: np.ndarray, dx: np.ndarray, running_var: np.ndarray, factor: np.ndarray, *,
                               eps: float) -> None:  # fmt: skip
    """dx of `batch_norm_inference`."""
    _affine(dy, dx, None, _inverse(running_var, factor, eps), None)


@op
def scale_forward(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray | None, y: np.ndarray) -> None:
    """y = x * gamma[c] + beta[c]."""
    _affine(x, y, None, gamma, beta)


@op
def scale_backward_data(dy: np.ndarray, gamma: np.ndarray, dx: np.ndarray) -> None:
    """dx = dy * gamma[c]."""
    _affine(dy, dx, None, gamma, None)


@op
def scale_backward_gamma(x: np.ndarray, dy: np.ndarray, dgamma: np.ndarray, *, accumulate: bool) -> None:
    """dgamma[c] (+)= the sum of dy * x."""
    _sums(x, dy, dgamma, accumulate)


@op
def scale_backward_beta(dy: np.ndarray, dbeta: np.ndarray, *, accumulate: bool) -> None:
    """dbeta[c] (+)= the sum of dy."""
    _sums(dy, None, dbeta, accumulate)


@op
def bias_forward(x: np.ndarray, b: np.ndarray, y: np.ndarray) -> None:
    """y = x + b[c]."""
    _affine(x, y, None, None, b)
