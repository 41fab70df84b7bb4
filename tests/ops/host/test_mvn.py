"""Normalization of rows against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import mvn

SHAPES = [(1, 9), (7, 400), (300, 4), (3, 9001), (5, 1), (0, 4), (4, 0)]


def make(dtype, shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 3 + 2).astype(dtype), rng.normal(size=shape).astype(dtype)


def forward(x, scaled, eps):
    x = x - x.mean(1, keepdims=True)
    return x / (np.sqrt((x**2).mean(1, keepdims=True)) + eps) if scaled else x


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("scaled", [False, True], ids=["mean", "both"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, scaled, in_place, dtype, close, garbage):
    x, _ = make(dtype, shape)
    expected = forward(x.astype(np.float64), scaled, 0.25) if x.size else x
    y = x if in_place else garbage(*shape)
    mvn.mvn_forward(x, y, normalize_variance=scaled, eps=0.25)
    close(y, expected, digits=2)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("scaled, eps", [(False, 0.0), (True, 1e-9), (True, 0.5)], ids=["mean", "both", "large eps"])
def test_backward_is_the_transposed_jacobian(scaled, eps, in_place, close, garbage, dtype):
    x, dy = make(dtype, (3, 6))
    dx = dy if in_place else garbage(3, 6)
    wide, step = x.astype(np.float64), 1e-6
    expected = np.empty((3, 6))
    for place in np.ndindex(3, 6):
        change = np.zeros((3, 6))
        change[place] = step
        slope = forward(wide + change, scaled, eps) - forward(wide - change, scaled, eps)
        expected[place] = (slope * dy).sum() / (2 * step)
    mvn.mvn_backward(x if scaled else None, dy, dx, normalize_variance=scaled, eps=eps)
    np.testing.assert_allclose(dx, expected, atol={np.float32: 1e-6, np.float64: 1e-8}[dtype])


def test_a_row_of_one_value(dtype, garbage):
    x, dy, dx, y = np.full((2, 4), 0.1, dtype), np.arange(8, dtype=dtype).reshape(2, 4), garbage(2, 4), garbage(2, 4)
    mvn.mvn_forward(x, y, normalize_variance=True, eps=0.5)
    np.testing.assert_array_equal(y, 0)
    mvn.mvn_backward(x, dy, dx, normalize_variance=True, eps=0.5)
    np.testing.assert_array_equal(dx, [[-3, -1, 1, 3]] * 2)


def test_a_large_mean_does_not_spoil_the_deviation():
    x = (np.random.default_rng(0).normal(size=(2, 5000)) + 4096).astype(np.float32)
    y = np.empty_like(x)
    mvn.mvn_forward(x, y, normalize_variance=True, eps=1e-9)
    np.testing.assert_allclose(y, forward(x.astype(np.float64), True, 1e-9), atol=1e-5)


@pytest.mark.parametrize("scaled", [False, True], ids=["mean", "both"])
def test_threads_and_memory(scaled, dtype, same_bits, frugal):
    x, dy = make(dtype, (211, 607))
    for check in (same_bits, frugal):
        check(mvn.mvn_forward, x, np.empty_like(x), normalize_variance=scaled, eps=1e-9)
        check(mvn.mvn_backward, x if scaled else None, dy, np.empty_like(x), normalize_variance=scaled, eps=1e-9)
