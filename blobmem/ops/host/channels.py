"""Compiled: arrays (outer, channels, inner), by channel. Long sums are added up in double precision, run by run."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part, reducing_part


@reducing_part
def sum_of(x):
    """The sum of a run of elements, in double precision."""
    total = 0.0
    for i in range(x.size):
        total += x[i]
    return total


@reducing_part
def dot_of(x, y):
    """The sum of products of two runs."""
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@reducing_part
def spread_of(x, mean):
    """The sum of squared distances from `mean`, in double precision."""
    total = 0.0
    for i in range(x.size):
        distance = np.float64(x[i]) - mean
        total += distance * distance
    return total


@kernel
def sum_channels(start, stop, x, outer, channels, inner, total, accumulate):
    """total[c] (+)= the sum of x[:, c, :] for channels [start, stop)."""
    for c in range(start, stop):
        value = 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            value += sum_of(x[first : first + inner])
        total[c] = x.dtype.type(value) + (total[c] if accumulate else x.dtype.type(0))


@kernel
def dot_channels(start, stop, x, y, outer, channels, inner, total, accumulate):
    """total[c] (+)= the sum of x[:, c, :] * y[:, c, :] for channels [start, stop)."""
    for c in range(start, stop):
        value = 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            value += dot_of(x[first : first + inner], y[first : first + inner])
        total[c] = x.dtype.type(value) + (total[c] if accumulate else x.dtype.type(0))


@kernel
def affine_across(start, stop, x, y, channels, less, times, plus, with_less, with_times, with_plus):
    """The same as `affine` where inner is 1, for outer indices [start, stop)."""
    for n in range(start, stop):
        xs, ys = x[n * channels : (n + 1) * channels], y[n * channels : (n + 1) * channels]
        for c in range(xs.size):
            v = xs[c]
            if with_less:
                v -= less[c]
            if with_times:
                v *= times[c]
            if with_plus:
                v += plus[c]
            ys[c] = v


@kernel
def affine(start, stop, x, y, channels, inner, less, times, plus, with_less, with_times, with_plus):
    """Planes [start, stop) of `inner` elements: y = (x - less[c]) * times[c] + plus[c], each part if wanted."""
    zero = x.dtype.type(0)
    for plane in range(start, stop):
        c = plane % channels
        a = less[c] if with_less else zero
        b = times[c] if with_times else x.dtype.type(1)
        d = plus[c] if with_plus else zero
        xs, ys = x[plane * inner : (plane + 1) * inner], y[plane * inner : (plane + 1) * inner]
        for i in range(inner):
            ys[i] = (xs[i] - a) * b + d


@part
def keep_statistics(c, middle, spread, count, channels, mean, inv_std, running_mean, running_var, eps, fraction):
    """What a forward pass leaves of channel c, whose `count` numbers lie around `middle`."""
    mean[c], inv_std[c] = middle, 1 / math.sqrt(spread / count + eps)
    mean[channels + c] = middle - mean[c]
    running_mean[c] = running_mean[c] * fraction + middle
    running_var[c] = running_var[c] * fraction + spread / max(1, count - 1)


@part
def kept_mean(c, channels, mean):
    """What `keep_statistics` has kept of a mean."""
    return np.float64(mean[c]) + np.float64(mean[channels + c])


@part
def normalize_run(x, y, xhat, keep, first, inner, middle, scale):
    """y = (x - middle) * scale, and so is xhat if it is to be kept, of a run that begins at `first`."""
    xs, ys, kept = x[first : first + inner], y[first : first + inner], xhat[first : first + inner]
    for i in range(inner):
        ys[i] = (xs[i] - middle) * scale
    if keep:
        for i in range(inner):
            kept[i] = ys[i]


@kernel
def normalize(start, stop, x, y, xhat, keep, outer, channels, inner, mean, inv_std, running_mean, running_var, eps,
              fraction):  # fmt: skip
    """Channels [start, stop): statistics of x, the running sums of them, and x normalized by what is kept of them."""
    count = outer * inner
    for c in range(start, stop):
        total = 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            total += sum_of(x[first : first + inner])
        m = total / count
        total = 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            total += spread_of(x[first : first + inner], m)
        keep_statistics(c, m, total, count, channels, mean, inv_std, running_mean, running_var, eps, fraction)
        m, scale = kept_mean(c, channels, mean), np.float64(inv_std[c])
        for n in range(outer):
            normalize_run(x, y, xhat, keep, (n * channels + c) * inner, inner, m, scale)


@kernel
def normalize_given(start, stop, x, y, xhat, keep, channels, inner, mean, inv_std):
    """What `normalize` makes of planes [start, stop), by what it has kept."""
    for plane in range(start, stop):
        c = plane % channels
        m, scale = kept_mean(c, channels, mean), np.float64(inv_std[c])
        normalize_run(x, y, xhat, keep, plane * inner, inner, m, scale)


@kernel
def merge_moments(start, stop, x, outer, channels, inner, moments, before):
    """Means and spreads of channels [start, stop), which come of `before` numbers, get run by run those of x."""
    for c in range(start, stop):
        mean, spread, seen = 0.0, 0.0, np.float64(before)
        if before:
            mean, spread = moments[c], moments[channels + c]
        for n in range(outer):
            run = x[(n * channels + c) * inner : (n * channels + c + 1) * inner]
            middle = sum_of(run) / inner
            share, far = inner / (seen + inner), middle - mean
            mean += far * share
            spread += spread_of(run, middle) + far * far * share * seen
            seen += inner
        moments[c], moments[channels + c] = mean, spread


@kernel
def settle(start, stop, moments, channels, count, mean, inv_std, running_mean, running_var, eps, fraction):
    """Channels [start, stop): `keep_statistics` of what `merge_moments` has found."""
    for c in range(start, stop):
        middle, spread = moments[c], moments[channels + c]
        keep_statistics(c, middle, spread, count, channels, mean, inv_std, running_mean, running_var, eps, fraction)


@reducing_part
def sums_passed_of(xhat, dy, times, plus):
    """The sums of dy, and of dy * xhat, where times * xhat + plus is positive."""
    zero = dy.dtype.type(0)
    plain, along = 0.0, zero
    for i in range(dy.size):
        g = dy[i]
        if not xhat[i] * times + plus > 0:
            g = zero
        plain += g
        along += g * xhat[i]
    return plain, along


@part
def gradient_run(xhat, dy, dx, first, inner, relu, times, plus, less, tilt, scale):
    """dx = (g - less - xhat * tilt) * scale, of a run that begins at `first`.

    g is dy, with `relu` 0 where times * xhat + plus is not positive.
    """
    kept, dys, dxs = xhat[first : first + inner], dy[first : first + inner], dx[first : first + inner]
    for i in range(inner):
        g = dys[i]
        if relu and not kept[i] * times + plus > 0:
            g = dy.dtype.type(0)
        dxs[i] = (g - less - kept[i] * tilt) * scale


@kernel
def normalize_backward(start, stop, xhat, inv_std, dy, dx, outer, channels, inner):
    """Channels [start, stop): dx = inv_std * (dy - mean(dy) - xhat * mean(dy * xhat))."""
    count, zero = outer * inner, dy.dtype.type(0)
    for c in range(start, stop):
        plain, along = 0.0, 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            plain += sum_of(dy[first : first + inner])
            along += dot_of(dy[first : first + inner], xhat[first : first + inner])
        a, b = dy.dtype.type(plain / count), dy.dtype.type(along / count)
        for n in range(outer):
            gradient_run(xhat, dy, dx, (n * channels + c) * inner, inner, False, zero, zero, a, b, inv_std[c])


@kernel
def gradient_sums(start, stop, xhat, dy, outer, channels, inner, gamma, beta, with_gamma, with_beta, relu, sums, new):
    """Channels [start, stop): their two sums (+)= those of g and g * xhat, g as of `gradient_run`."""
    for c in range(start, stop):
        times = gamma[c] if with_gamma else xhat.dtype.type(1)
        plus = beta[c] if with_beta else xhat.dtype.type(0)
        plain, along = 0.0, 0.0
        for n in range(outer):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            if relu:
                one, other = sums_passed_of(xhat[first:end], dy[first:end], times, plus)
                plain += one
                along += other
            else:
                plain += sum_of(dy[first:end])
                along += dot_of(dy[first:end], xhat[first:end])
        sums[c] = plain + (0.0 if new else sums[c])
        sums[channels + c] = along + (0.0 if new else sums[channels + c])


@kernel
def gradient_given(start, stop, xhat, dy, dx, channels, inner, inv_std, gamma, beta, with_gamma, with_beta, relu, sums,
                   count):  # fmt: skip
    """Planes [start, stop): `gradient_run` by the sums of `count` numbers of a channel."""
    of = xhat.dtype.type
    for plane in range(start, stop):
        c = plane % channels
        times, plus = gamma[c] if with_gamma else of(1), beta[c] if with_beta else of(0)
        a, b = of(sums[c] / count), of(sums[channels + c] / count)
        gradient_run(xhat, dy, dx, plane * inner, inner, relu, times, plus, a, b, times * inv_std[c])
