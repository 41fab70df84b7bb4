"""Planes scaled and added, against NumPy."""

import numpy as np
import pytest

from blobmem.ops.host.axpy import axpy_forward


def operands(dtype, planes, inner):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in ((planes,), (planes, inner), (planes, inner))]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(6, 7), (3000, 1), (2, 40_001), (4, 0)], ids=str)
def test_axpy(shape, in_place, dtype, close, garbage):
    scale, x, y = operands(dtype, *shape)
    expected = scale[:, None].astype(np.float64) * x + y
    out = y if in_place else garbage(*shape)
    axpy_forward(scale, x, y, out)
    close(out, expected)


def test_threads_and_memory(dtype, same_bits, frugal):
    scale, x, y = operands(dtype, 300, 400)
    out = np.zeros_like(x)
    same_bits(axpy_forward, scale, x, y, out)
    frugal(axpy_forward, scale, x, y, out)
