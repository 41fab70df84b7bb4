"""Compiled: softmax and what labels make of it."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part


@part
def begin(x, first, n, classes, inner, most, sums):
    """The largest x of each of the n positions from `first` on; sums of 0."""
    for j in range(n):
        most[j] = x[first + j]
        sums[j] = 0
    for c in range(1, classes):
        xs = x[first + c * inner : first + c * inner + n]
        for j in range(n):
            most[j] = max(most[j], xs[j])


@kernel
def softmax(start, stop, scratch, x, y, classes, inner, chunk):
    """Items [start, stop), `chunk` neighbouring positions of an outer index each; scratch has maxima and sums."""
    parts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        j0 = item % parts * chunk
        n = min(chunk, inner - j0)
        first = item // parts * classes * inner + j0
        most, sums = scratch[:n], scratch[chunk : chunk + n]
        begin(x, first, n, classes, inner, most, sums)
        for c in range(classes):
            xs, ys = x[first + c * inner : first + c * inner + n], y[first + c * inner : first + c * inner + n]
            for j in range(n):
                ys[j] = np.exp(xs[j] - most[j])
                sums[j] += ys[j]
        for c in range(classes):
            ys = y[first + c * inner : first + c * inner + n]
            for j in range(n):
                ys[j] /= sums[j]


@kernel
def softmax_gradient(start, stop, scratch, y, dy, dx, classes, inner, chunk):
    """Items as in `softmax`."""
    parts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        j0 = item % parts * chunk
        n = min(chunk, inner - j0)
        first = item // parts * classes * inner + j0
        sums = scratch[:n]
        for j in range(n):
            sums[j] = 0
        for c in range(classes):
            at, end = first + c * inner, first + c * inner + n
            ys, dys = y[at:end], dy[at:end]
            for j in range(n):
                sums[j] += dys[j] * ys[j]
        for c in range(classes):
            at, end = first + c * inner, first + c * inner + n
            ys, dys, dxs = y[at:end], dy[at:end], dx[at:end]
            for j in range(n):
                dxs[j] = (dys[j] - sums[j]) * ys[j]


@kernel
def judge_labels(start, stop, label, classes, ignore, result):
    """result = how many labels are not `ignore`, and the index of the first that is no class (or -1)."""
    valid = 0
    result[1] = -1
    for i in range(label.size):
        value = label[i]
        if value == ignore:
            continue
        if not (value >= 0 and value < classes):
            result[1] = i
            return
        valid += 1
    result[0] = valid


@kernel
def softmax_sums(start, stop, x, sums, classes, inner, chunk):
    """Items as in `softmax`: the largest x of each position, and the sum of exp(x - that)."""
    parts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        j0 = item % parts * chunk
        n = min(chunk, inner - j0)
        first, at = item // parts * classes * inner + j0, item // parts * 2 * inner + j0
        most, total = sums[at : at + n], sums[at + inner : at + inner + n]
        begin(x, first, n, classes, inner, most, total)
        for c in range(classes):
            xs = x[first + c * inner : first + c * inner + n]
            for j in range(n):
                total[j] += np.exp(xs[j] - most[j])


@kernel
def score_losses(start, stop, x, label, sums, classes, inner, ignore, bound, parts):
    """parts[p] = the sum of -log softmax(x)[label], `bound` at most, over part p of the positions, for parts
    [start, stop)."""
    for index in range(start, stop):
        total = 0.0
        for at in range(label.size * index // parts.size, label.size * (index + 1) // parts.size):
            value = label[at]
            if value != ignore:
                i, j = at // inner, at % inner
                below = np.float64(sums[2 * i * inner + j]) - x[(i * classes + np.int64(value)) * inner + j]
                loss = math.log(sums[(2 * i + 1) * inner + j]) + below
                total += loss if not loss > bound else bound
        parts[index] = total


@kernel
def score_gradient(start, stop, scratch, x, label, sums, dx, classes, inner, chunk, ignore, scale):
    """Items as in `softmax`; dx may be x. Labels have been checked."""
    t = x.dtype.type
    parts = (inner + chunk - 1) // chunk
    for item in range(start, stop):
        j0 = item % parts * chunk
        n = min(chunk, inner - j0)
        first, at = item // parts * classes * inner + j0, item // parts * 2 * inner + j0
        most, labels = sums[at : at + n], label[item // parts * inner + j0 : item // parts * inner + j0 + n]
        factors = scratch[:n]
        for j in range(n):
            factors[j] = t(scale) / sums[at + inner + j]
        for c in range(classes):
            xs, dxs = x[first + c * inner : first + c * inner + n], dx[first + c * inner : first + c * inner + n]
            for j in range(n):
                dxs[j] = t(0) if labels[j] == ignore else np.exp(xs[j] - most[j]) * factors[j]
        for j in range(n):
            if labels[j] != ignore:
                dx[first + np.int64(labels[j]) * inner + j] -= t(scale)
