"""Sums by channel, called as ops call them: every kind, by warps, by blocks, in parts and by columns."""

import numpy as np
import pytest

from blobmem.ops.cuda import channels

FORMULAS = [
    (channels.PLAIN, lambda x, y: x),
    (channels.ABSOLUTE, lambda x, y: np.abs(x)),
    (channels.SQUARE, lambda x, y: x * x),
    (channels.PRODUCT, lambda x, y: x * y),
    (channels.PRODUCT_BELOW, lambda x, y: np.where(x > 0, 0, x * y)),
]


def upload(device, array):
    address = device.allocate(max(1, array.nbytes), "test")
    if array.nbytes:
        device.memcpy_htod(address, np.ascontiguousarray(array))
    return address


@pytest.mark.parametrize("kind, formula", FORMULAS)
@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (2, 6, 520), (2, 2, 8197), (1, 1, 33000), (1, 1, 66000), (600, 35, 1), (1, 3, 1), (700, 36, 1)]
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums(cuda, rng, shape, kind, formula, accumulate):
    device = cuda.device
    x, y, total = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[1])
    expected = 0.5 * formula(x, y).sum((0, 2)) + (total if accumulate else 0)
    operands = x, y, total, np.zeros(channels.workspace_bytes(shape), np.uint8)
    places = [upload(device, array) for array in operands]
    arrays = [device.as_array(place, a.shape, a.dtype) for place, a in zip(places, operands, strict=True)]
    try:
        channels.sum_per_channel(shape, *arrays, accumulate=accumulate, kind=kind, factor=0.5)
        got = np.empty_like(total)
        device.memcpy_dtoh(got, places[2])
    finally:
        for place in places:
            device.free(place)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14 * (10 + x.size))


def test_workspace_is_for_what_is_cut():
    assert channels.workspace_bytes((256, 2048, 49)) == 0
    assert channels.workspace_bytes((64, 20, 576)) == 0
    assert channels.workspace_bytes((100, 20, 676)) == 8 * 20 * 4
    assert channels.workspace_bytes((256, 64, 12544)) == 8 * 64 * 32
    assert channels.workspace_bytes((256, 4096, 1)) == 0
    assert channels.workspace_bytes((256 * 12544, 64, 1)) == 8 * 64 * 1024
