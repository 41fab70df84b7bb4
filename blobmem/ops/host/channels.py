"""Compiled: arrays (outer, channels, inner), by channel. Long sums are added up in double precision, run by run."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, reducing_part


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


@kernel
def normalize(start, stop, x, y, xhat, keep, outer, channels, inner, mean, inv_std, running_mean, running_var, eps,
              fraction):  # fmt: skip
    """Channels [start, stop): statistics of x, the running sums of them, and x normalized by them."""
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
        scale = 1 / math.sqrt(total / count + eps)
        mean[c], inv_std[c] = m, scale
        mean[channels + c] = m - mean[c]
        running_mean[c] = running_mean[c] * fraction + m
        running_var[c] = running_var[c] * fraction + total / max(1, count - 1)
        for n in range(outer):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            xs, ys, kept = x[first:end], y[first:end], xhat[first:end]
            for i in range(inner):
                ys[i] = (xs[i] - m) * scale
            if keep:
                for i in range(inner):
                    kept[i] = ys[i]


@kernel
def normalize_backward(start, stop, xhat, inv_std, dy, dx, outer, channels, inner):
    """Channels [start, stop): dx = inv_std * (dy - mean(dy) - xhat * mean(dy * xhat))."""
    count = outer * inner
    for c in range(start, stop):
        plain, along = 0.0, 0.0
        for n in range(outer):
            first = (n * channels + c) * inner
            plain += sum_of(dy[first : first + inner])
            along += dot_of(dy[first : first + inner], xhat[first : first + inner])
        a, b, scale = dy.dtype.type(plain / count), dy.dtype.type(along / count), inv_std[c]
        for n in range(outer):
            first, end = (n * channels + c) * inner, (n * channels + c + 1) * inner
            dys, dxs, kept = dy[first:end], dx[first:end], xhat[first:end]
            for i in range(inner):
                dxs[i] = (dys[i] - a - kept[i] * b) * scale
