"""Pooling against loops over windows."""

import numpy as np
import pytest
from pool_windows import in_bytes, window_of

from blobmem.ops.host import pool
from blobmem.ops.host.random import draws_at

WINDOWS = {
    "2x2": ((6, 8), (2, 2), (2, 2), (0, 0)),
    "overlapping, last row cut": ((13, 14), (3, 3), (2, 2), (0, 0)),
    "padded": ((13, 40), (3, 3), (1, 1), (1, 1)),
    "padded, strided": ((112, 7), (3, 3), (2, 2), (1, 1)),
    "gaps, last window beyond": ((11, 20), (2, 2), (3, 4), (0, 0)),
    "whole plane": ((7, 7), (7, 7), (1, 1), (0, 0)),
    "uneven": ((9, 33), (2, 5), (3, 2), (1, 2)),
    "255 elements": ((18, 21), (15, 17), (2, 3), (7, 9)),
    "one element": ((1, 1), (1, 1), (1, 1), (0, 0)),
}


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS.keys())
def window(request):
    return window_of(*request.param)


@pytest.fixture
def planes(window, dtype):
    rng = np.random.default_rng(0)
    # few values, so that there are equal ones in a window
    return rng.integers(-3, 4, (2, 3, *window[0])).astype(dtype)


def spans(window):
    """Per output, its place, the clipped window, and the size that an average divides by."""
    plane, out, attributes = window
    per_axis = []
    for size, n, k, s, p in zip(plane, out, *attributes.values(), strict=True):
        first = [i * s - p for i in range(n)]
        per_axis.append([(slice(max(f, 0), min(f + k, size)), min(f + k, size + p) - f) for f in first])
    for i, (rows, tall) in enumerate(per_axis[0]):
        for j, (columns, wide) in enumerate(per_axis[1]):
            yield (i, j), (rows, columns), tall * wide


def test_maximum(window, planes, dtype, garbage):
    _, out, attributes = window
    y, mask = garbage(2, 3, *out), np.full((2, 3, *out), -7, np.int32)
    pool.max_pool_forward(planes, y, mask, **attributes)
    index = np.arange(planes[0, 0].size).reshape(planes.shape[2:])
    for n, c in np.ndindex(2, 3):
        for place, part, _ in spans(window):
            values = planes[n, c][part]
            if values.size == 0:
                assert (y[n, c][place], mask[n, c][place]) == (0, -1)
                continue
            assert y[n, c][place] == values.max()
            # the first of equals, row by row
            assert mask[n, c][place] == index[part].reshape(-1)[values.argmax()]
    without = garbage(2, 3, *out)
    pool.max_pool_forward(planes, without, None, **attributes)
    np.testing.assert_array_equal(without, y)


def test_a_mask_in_bytes(window, planes, dtype, garbage):
    plane, out, attributes = window
    planes[0, 1, :, -1] = planes[1, 1] = np.nan
    planes[1, 2] = -np.inf
    values, masks, grads = [], [], []
    dy = np.random.default_rng(1).standard_normal((2, 3, *out)).astype(dtype)
    for kind in (np.int32, np.uint8):
        values.append(garbage(2, 3, *out))
        masks.append(np.full((2, 3, *out), 7, kind))
        grads.append(garbage(*planes.shape))
        pool.max_pool_forward(planes, values[-1], masks[-1], **attributes)
        pool.max_pool_backward(dy, masks[-1], grads[-1], **attributes)
    np.testing.assert_array_equal(*values)
    np.testing.assert_array_equal(in_bytes(masks[0], plane, **attributes), masks[1])
    np.testing.assert_array_equal(*grads)


def test_maximum_backward(window, planes, dtype, garbage, close):
    _, out, attributes = window
    mask = np.empty((2, 3, *out), np.int32)
    pool.max_pool_forward(planes, garbage(2, 3, *out), mask, **attributes)
    dy = np.random.default_rng(1).standard_normal(mask.shape).astype(dtype)
    expected = np.zeros((6, planes[0, 0].size))
    for row, places, values in zip(expected, mask.reshape(6, -1), dy.reshape(6, -1), strict=True):
        np.add.at(row, places[places >= 0], values[places >= 0])
    dx = garbage(*planes.shape)
    pool.max_pool_backward(dy, mask, dx, **attributes)
    close(dx, expected.reshape(planes.shape))


def test_average(window, dtype, garbage, close):
    plane, out, attributes = window
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((2, 3, *shape)).astype(dtype) for shape in (plane, out))
    expected, back = np.zeros((2, 3, *out)), np.zeros((2, 3, *plane))
    for place, part, size in spans(window):
        expected[(..., *place)] = x[(..., *part)].astype(float).sum(axis=(2, 3)) / max(size, 1)
        back[(..., *part)] += dy[(..., *place)].astype(float)[..., None, None] / max(size, 1)
    y, dx = garbage(2, 3, *out), garbage(2, 3, *plane)
    pool.ave_pool_forward(x, y, **attributes)
    close(y, expected)
    pool.ave_pool_backward(dy, dx, **attributes)
    close(dx, back)


def test_stochastic_in_testing(window, dtype, garbage, close):
    plane, out, attributes = window
    x = np.random.default_rng(0).random((2, 3, *plane)).astype(dtype)
    x[0, 0] = 0
    expected = np.zeros((2, 3, *out))
    for place, part, _ in spans(window):
        values = x[(..., *part)].astype(float)
        total = values.sum(axis=(2, 3))
        expected[(..., *place)] = (values**2).sum(axis=(2, 3)) / np.where(total > 0, total, 1)
    y = garbage(2, 3, *out)
    pool.stochastic_pool_forward(x, y, None, draws=None, **attributes)
    close(y, expected)


def test_stochastic_in_training_follows_the_values(dtype, garbage):
    x = np.tile(np.array([[1, 2], [0, 5]], dtype), (100, 100, 1, 1))
    y, mask = garbage(100, 100, 1, 1), np.empty((100, 100, 1, 1), np.int32)
    attributes = {"kernel": (2, 2), "stride": (2, 2), "pad": (0, 0)}
    pool.stochastic_pool_forward(x, y, mask, draws=draws_at(1, "pool", 0), **attributes)
    np.testing.assert_array_equal(y, np.array([1, 2, 0, 5])[mask])
    shares = np.bincount(mask.reshape(-1), minlength=4) / mask.size
    np.testing.assert_allclose(shares, [1 / 8, 2 / 8, 0, 5 / 8], atol=0.02)
    near = np.empty(mask.shape, np.uint8)
    pool.stochastic_pool_forward(x, y, near, draws=draws_at(1, "pool", 0), **attributes)
    np.testing.assert_array_equal(near, mask)  # the window is the plane
    again = np.empty_like(mask)
    pool.stochastic_pool_forward(x, y, again, draws=draws_at(1, "pool", 1), **attributes)
    assert 0.4 < (again == mask).mean() < 0.6  # the chance of drawing alike


def test_a_stochastic_mask_in_bytes(window, dtype, garbage):
    plane, out, attributes = window
    x = np.random.default_rng(0).random((2, 3, *plane)).astype(dtype)
    x[0, 0] = 0
    y, mask, near = garbage(2, 3, *out), np.empty((2, 3, *out), np.int32), np.empty((2, 3, *out), np.uint8)
    for each in (mask, near):
        pool.stochastic_pool_forward(x, y, each, draws=draws_at(1, "pool", 0), **attributes)
    np.testing.assert_array_equal(in_bytes(mask, plane, **attributes), near)


def test_stochastic_takes_the_first_at_the_threshold(monkeypatch):
    # numbers 0, 1/8, 3/8, 7/8 of the whole: a sum that reaches the threshold is enough
    x = np.array([[1.0, 2, 0, 5]] * 4).reshape(4, 1, 2, 2)
    draws = draws_at(0, "", 0)
    y, mask = np.empty((4, 1, 1, 1)), np.empty((4, 1, 1, 1), np.int32)
    pool.stochastic_pool_forward(x, y, mask, draws=draws, kernel=(2, 2), stride=(2, 2), pad=(0, 0))
    from blobmem.ops.host.fillers import Filler, fill_random

    numbers = np.empty(4)
    fill_random(numbers, filler=Filler("uniform"), draws=draws)
    sums = np.array([1, 3, 3, 8]) / 8
    assert mask.reshape(-1).tolist() == [int(np.argmax(sums >= number)) for number in numbers]


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_what_is_no_number_is_not_lost(stride, dtype):
    x = np.zeros((1, 1, 3, 40), dtype)
    y = np.empty((1, 1, -(-3 // stride), -(-40 // stride)), dtype)
    mask = np.empty(y.shape, np.int32)
    attributes = {"kernel": (3, 3), "stride": (stride, stride), "pad": (1, 1)}
    for value in (-np.inf, np.nan):
        x.fill(value)
        pool.max_pool_forward(x, y, mask, **attributes)
        np.testing.assert_array_equal(y, np.full(y.shape, value))
        assert ((mask >= 0) & (mask < x.size)).all()
    x.fill(1)
    x[0, 0, 1, 7] = np.nan
    pool.max_pool_forward(x, y, mask, **attributes)
    assert np.isnan(y).any() and (np.isnan(y) == (mask == 47)).all()


@pytest.mark.parametrize("kind", [np.int32, np.uint8], ids=["int32", "uint8"])
def test_threads_and_memory(same_bits, frugal, kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 9, 41, 43)).astype(np.float32)
    y = np.empty((4, 9, 21, 22), np.float32)
    mask = np.empty(y.shape, kind)
    attributes = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
    for check in (same_bits, frugal):
        check(pool.max_pool_forward, x, y, mask, **attributes)
        check(pool.max_pool_backward, np.ones_like(y), np.full_like(mask, 4), x, **attributes)
        check(pool.ave_pool_forward, x, y, **attributes)
        check(pool.ave_pool_backward, np.ones_like(y), x, **attributes)
        check(pool.stochastic_pool_forward, x, y, mask, draws=draws_at(1, "", 2), **attributes)
