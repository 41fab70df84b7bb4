"""Pyramids of poolings against the poolings one by one."""

import numpy as np
import pytest

from blobmem.ops.host import pool, spp
from blobmem.ops.host.random import draws_at

PLANES = {
    "odd": ((9, 10), (((9, 10), (0, 0), 1), ((5, 5), (1, 0), 2), ((3, 3), (2, 1), 4))),
    "even": ((8, 12), (((8, 12), (0, 0), 1), ((4, 6), (0, 0), 2), ((2, 3), (0, 0), 4))),
    "one level": ((3, 2), (((3, 2), (0, 0), 1),)),
}
BATCH, CHANNELS = 3, 5


@pytest.fixture(params=PLANES.values(), ids=PLANES.keys())
def pyramid(request):
    return request.param


def parts_of(levels, images=BATCH):
    """Per level: its columns of y, its shape, and a pooling op's attributes."""
    at = 0
    for kernel, pad, bins in levels:
        end = at + CHANNELS * bins * bins
        yield slice(at, end), (images, CHANNELS, bins, bins), {"kernel": kernel, "stride": kernel, "pad": pad}
        at = end


def values(dtype, plane, seed=0):
    # few values, so that there are equal ones in a window
    return np.random.default_rng(seed).integers(0, 5, (BATCH, CHANNELS, *plane)).astype(dtype)


def total(levels):
    return CHANNELS * sum(bins * bins for _, _, bins in levels)


def test_maximum(pyramid, dtype, garbage, close):
    plane, levels = pyramid
    x, y = values(dtype, plane), garbage(BATCH, total(levels))
    mask = np.full(y.shape, -7, np.int32)
    dy = np.random.default_rng(1).normal(size=y.shape).astype(dtype)
    spp.spp_max_forward(x, y, mask, levels=levels)
    expected = np.zeros(x.shape)
    for part, shape, attributes in parts_of(levels):
        one, place, dx = garbage(*shape), np.empty(shape, np.int32), garbage(*x.shape)
        pool.max_pool_forward(x, one, place, **attributes)
        np.testing.assert_array_equal(y[:, part], one.reshape(BATCH, -1))
        np.testing.assert_array_equal(mask[:, part], place.reshape(BATCH, -1))
        pool.max_pool_backward(np.ascontiguousarray(dy[:, part]).reshape(shape), place, dx, **attributes)
        expected += dx
    dx = garbage(*x.shape)
    spp.spp_max_backward(dy, mask, dx, levels=levels)
    close(dx, expected)
    without = garbage(*y.shape)
    spp.spp_max_forward(x, without, None, levels=levels)
    np.testing.assert_array_equal(without, y)


def test_average(pyramid, dtype, garbage, close):
    plane, levels = pyramid
    x, y = values(dtype, plane), garbage(BATCH, total(levels))
    dy = np.random.default_rng(1).normal(size=y.shape).astype(dtype)
    spp.spp_ave_forward(x, y, levels=levels)
    expected = np.zeros(x.shape)
    for part, shape, attributes in parts_of(levels):
        one, dx = garbage(*shape), garbage(*x.shape)
        pool.ave_pool_forward(x, one, **attributes)
        np.testing.assert_array_equal(y[:, part], one.reshape(BATCH, -1))
        pool.ave_pool_backward(np.ascontiguousarray(dy[:, part]).reshape(shape), dx, **attributes)
        expected += dx
    dx = garbage(*x.shape)
    spp.spp_ave_backward(dy, dx, levels=levels)
    close(dx, expected)


def test_stochastic_in_testing(dtype, garbage):
    plane, levels = PLANES["even"]
    x, y = values(dtype, plane), garbage(BATCH, total(levels))
    spp.spp_stochastic_forward(x, y, None, draws=None, levels=levels)
    for part, shape, attributes in parts_of(levels):
        one = garbage(*shape)
        pool.stochastic_pool_forward(x, one, None, draws=None, **attributes)
        np.testing.assert_array_equal(y[:, part], one.reshape(BATCH, -1))


def test_stochastic_in_training_draws_a_number_for_each_bin(dtype, garbage):
    plane, levels = PLANES["even"]
    x = np.broadcast_to(np.arange(1, 97, dtype=dtype).reshape(plane), (BATCH, CHANNELS, *plane)).copy()
    y, mask = garbage(BATCH, total(levels)), np.empty((BATCH, total(levels)), np.int32)
    spp.spp_stochastic_forward(x, y, mask, draws=draws_at(1, "spp", 0), levels=levels)
    np.testing.assert_array_equal(y, mask + 1)
    for part, (_, _, bins, _), attributes in parts_of(levels):
        places = mask[:, part].reshape(BATCH * CHANNELS, bins, bins)
        assert (places // 12 // attributes["kernel"][0] == np.arange(bins)[:, None]).all()
        assert (places % 12 // attributes["kernel"][1] == np.arange(bins)).all()
    # 15 planes of the same values: the largest bin, of 96 values, is drawn from anew in each
    assert len(set(mask[:, :CHANNELS].ravel().tolist())) > 10
    again = np.empty_like(mask)
    spp.spp_stochastic_forward(x, y, again, draws=draws_at(1, "spp", 0), levels=levels)
    np.testing.assert_array_equal(again, mask)


def test_threads_and_memory(same_bits, frugal):
    rng = np.random.default_rng(0)
    levels = (((40, 44), (0, 0), 1), ((20, 22), (0, 0), 2), ((10, 11), (0, 0), 4))
    x, y = rng.random((4, CHANNELS, 40, 44), np.float32), np.empty((4, total(levels)), np.float32)
    mask = np.empty(y.shape, np.int32)
    for check in (same_bits, frugal):
        check(spp.spp_max_forward, x, y, mask, levels=levels)
        check(spp.spp_max_backward, np.ones_like(y), np.zeros_like(mask), x, levels=levels)
        check(spp.spp_ave_forward, x, y, levels=levels)
        check(spp.spp_ave_backward, np.ones_like(y), x, levels=levels)
        check(spp.spp_stochastic_forward, x, y, mask, draws=draws_at(1, "", 2), levels=levels)
