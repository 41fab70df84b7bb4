"""Compiled: the generator that `random` describes, and what is made of its words."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY_0, _MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_BUMP_0, _BUMP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@part
def philox(key, block):
    """The four words of a block, as uint64 below 2**32; `key` as `random.Draws.key` gives it."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    c0, c1 = np.uint64(block) & _LOW, np.uint64(block) >> _SHIFT
    c2, c3 = np.uint64(key[2]), np.uint64(key[3])
    for _ in range(10):
        p0, p1 = _MULTIPLY_0 * c0, _MULTIPLY_1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _BUMP_0) & _LOW, (k1 + _BUMP_1) & _LOW
    return c0, c1, c2, c3


@part
def uniform_of(word):
    """A word as a number in [0, 1), exact in float32."""
    return np.float64(word >> np.uint64(8)) * (1.0 / 16777216.0)


@part
def gauss_of(word_0, word_1):
    """Two words as two independent normal numbers (Box and Muller's transformation)."""
    radius = math.sqrt(-2.0 * math.log((np.float64(word_0) + 0.5) * (1.0 / 4294967296.0)))
    angle = np.float64(word_1) * (2.0 * math.pi / 4294967296.0)
    return radius * math.cos(angle), radius * math.sin(angle)


@kernel
def fill_uniform(start, stop, y, key, low, span):
    """Blocks [start, stop) of four elements: uniform numbers from `low`, over `span`."""
    for block in range(start, stop):
        words = philox(key, block)
        first = 4 * block
        for i in range(min(4, y.size - first)):
            y[first + i] = low + span * uniform_of(words[i])


@kernel
def fill_gauss(start, stop, y, key, mean, std):
    """Blocks [start, stop) of four elements: normal numbers."""
    for block in range(start, stop):
        w0, w1, w2, w3 = philox(key, block)
        first = 4 * block
        values = (*gauss_of(w0, w1), *gauss_of(w2, w3))
        for i in range(min(4, y.size - first)):
            y[first + i] = mean + std * values[i]


@kernel
def clear_some(start, stop, y, key, keep):
    """Blocks [start, stop) of four elements: each stays with probability `keep`, and becomes zero otherwise."""
    for block in range(start, stop):
        words = philox(key, block)
        first = 4 * block
        for i in range(min(4, y.size - first)):
            if uniform_of(words[i]) >= keep:
                y[first + i] = 0


@kernel
def normalize_rows(start, stop, y, size):
    """Rows [start, stop) of `size` elements, each divided by its sum."""
    for row in range(start, stop):
        total = 0.0
        for i in range(row * size, (row + 1) * size):
            total += y[i]
        for i in range(row * size, (row + 1) * size):
            y[i] = y[i] / total
