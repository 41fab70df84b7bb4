"""Planes in another size, against weights for each pair of points, and by hand."""

import numpy as np
import pytest

from blobmem.ops.host import resample

SIZES = {
    "larger": ((3, 4), (7, 9), (0, 0)),
    "smaller": ((9, 8), (4, 3), (0, 0)),
    "the same": ((5, 6), (5, 6), (0, 0)),
    "a part": ((7, 8), (6, 9), (1, 2)),
    "to one point": ((4, 5), (1, 1), (0, 0)),
    "from one point": ((1, 1), (3, 4), (0, 0)),
    "a row": ((1, 5), (1, 9), (0, 0)),
    "parallel": ((33, 35), (65, 69), (0, 0)),
}


def weights(size, count, crop):
    """What each of `count` points takes from each of `size`: triangles around places with the same ends."""
    kept = size - sum(crop)
    places = crop[0] + (np.linspace(0, kept - 1, count) if count > 1 else np.zeros(1))
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size)))


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def sizes(request):
    return request.param


def test_interp(sizes, dtype, close, garbage):
    plane, out, crop = sizes
    x = np.random.default_rng(0).normal(size=(2, 3, *plane)).astype(dtype)
    down, across = (weights(size, count, crop) for size, count in zip(plane, out, strict=True))
    y = garbage(2, 3, *out)
    resample.interp_forward(x, y, crop=crop)
    close(y, np.einsum("rh,nchw,qw->ncrq", down, x, across), 4)
    dy = np.random.default_rng(1).normal(size=y.shape).astype(dtype)
    dx = garbage(*x.shape)
    resample.interp_backward(dy, dx, crop=crop)
    close(dx, np.einsum("rh,ncrq,qw->nchw", down, dy, across), 4)


def test_interp_by_hand(dtype, garbage):
    x, y = np.array([[[[0, 4], [8, 20]]]], dtype), garbage(1, 1, 3, 3)
    resample.interp_forward(x, y, crop=(0, 0))
    assert y[0, 0].tolist() == [[0, 2, 4], [4, 8, 12], [8, 14, 20]]


@pytest.mark.parametrize("scale, cut", [((2, 2), 0), ((3, 1), 0), ((2, 2), 1)], ids=["2x2", "3x1", "cut"])
def test_nearest(scale, cut, dtype, close, garbage):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(dtype)
    expected = x.repeat(scale[0], axis=2).repeat(scale[1], axis=3)[:, :, : 4 * scale[0] - cut, : 5 * scale[1] - cut]
    y = garbage(*expected.shape)
    steps = {"times": (1, 1), "over": scale}
    resample.nearest_forward(x, y, **steps)
    np.testing.assert_array_equal(y, expected)
    dy = np.random.default_rng(1).normal(size=y.shape).astype(dtype)
    whole = np.zeros((2, 3, 4 * scale[0], 5 * scale[1]))
    whole[:, :, : dy.shape[2], : dy.shape[3]] = dy
    dx = garbage(*x.shape)
    resample.nearest_backward(dy, dx, **steps)
    close(dx, whole.reshape(2, 3, 4, scale[0], 5, scale[1]).sum((3, 5)), 4)


def test_nearest_to_a_size_that_is_no_multiple(dtype, garbage):
    x, y = np.arange(3, dtype=dtype).reshape(1, 1, 1, 3), garbage(1, 1, 1, 5)
    resample.nearest_forward(x, y, times=(1, 3), over=(1, 5))
    assert y.ravel().tolist() == [0, 0, 1, 1, 2]


def test_unpool(dtype, garbage):
    x = np.array([[[[5, 6], [7, 8]], [[1, 2], [3, 4]]]], dtype)
    mask = np.array([[[[0, 3], [8, 7]], [[2, -1], [2, 5]]]], dtype)
    y = garbage(1, 2, 3, 3)
    resample.unpool_forward(x, mask, y)
    assert y[0, 0].tolist() == [[5, 0, 0], [6, 0, 0], [0, 8, 7]]
    assert y[0, 1].tolist() == [[0, 0, 3], [0, 0, 4], [0, 0, 0]]
    dy, dx = np.arange(1, 19, dtype=dtype).reshape(1, 2, 3, 3), garbage(1, 2, 2, 2)
    resample.unpool_backward(dy, mask, dx)
    assert dx[0].tolist() == [[[1, 4], [9, 8]], [[12, 0], [12, 15]]]


@pytest.mark.parametrize("wrong", [9, -2, np.nan], ids=str)
def test_a_mask_of_another_plane(wrong, dtype):
    x, mask, y = np.ones((1, 1, 2, 2), dtype), np.zeros((1, 1, 2, 2), dtype), np.zeros((1, 1, 3, 3), dtype)
    mask[0, 0, 1, 0] = wrong
    for run in (lambda: resample.unpool_forward(x, mask, y), lambda: resample.unpool_backward(y, mask, x)):
        with pytest.raises(
            ValueError, match=r"mask value (9|-2|nan) at \(0, 0, 1, 0\) is no place in a plane of 3 x 3"
        ):
            run()
    assert not y.any() and x.all()


def test_threads_and_memory(dtype, same_bits, frugal):
    x, y = np.random.default_rng(0).normal(size=(2, 5, 40, 50)).astype(dtype), np.zeros((2, 5, 80, 100), dtype)
    mask = np.tile(np.random.default_rng(1).permutation(8000)[:2000], (2, 5, 1)).reshape(x.shape).astype(dtype)
    cases = [
        (resample.interp_forward, (x, y), {"crop": (1, 2)}),
        (resample.interp_backward, (y + 1, x), {"crop": (1, 2)}),
        (resample.nearest_forward, (x, y), {"times": (1, 1), "over": (2, 2)}),
        (resample.nearest_backward, (y + 1, x), {"times": (1, 1), "over": (2, 2)}),
        (resample.unpool_forward, (x, mask, y), {}),
        (resample.unpool_backward, (y + 1, mask, x), {}),
    ]
    for op, operands, attributes in cases:
        same_bits(op, *operands, **attributes)
        frugal(op, *operands, **attributes)
