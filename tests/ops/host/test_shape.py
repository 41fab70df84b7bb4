"""Joining and dividing arrays along every axis, cropping and repeating them."""

import numpy as np
import pytest

from blobmem.ops.host import shape

SIZES = (3, 1, 4)
CASES = [(dims, axis) for dims in [(5,), (2, 6), (2, 3, 4), (40, 2, 30, 31), (3, 0, 2)] for axis in range(len(dims))]


def parts_of(dims, axis, dtype, sizes=SIZES):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*dims[:axis], size, *dims[axis + 1 :])).astype(dtype) for size in sizes]


@pytest.mark.parametrize("dims, axis", CASES)
def test_join_and_divide(dims, axis, dtype, garbage):
    parts = parts_of(dims, axis, dtype)
    whole = np.concatenate(parts, axis)
    for join in (shape.concat_forward, shape.slice_backward):
        y = garbage(*whole.shape)
        join(*parts, y, axis=axis)
        np.testing.assert_array_equal(y, whole)
    got = [garbage(*part.shape) for part in parts]
    shape.slice_forward(whole, *got, axis=axis)
    for offset, part, result in zip(np.cumsum((0, *SIZES)), parts, got, strict=False):
        np.testing.assert_array_equal(result, part)
        dx = garbage(*part.shape)
        shape.concat_backward(whole, dx, axis=axis, offset=int(offset))
        np.testing.assert_array_equal(dx, part)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_threads_and_memory(axis, dtype, same_bits, frugal):
    parts = parts_of((20, 30, 80), axis, dtype, (47, 3))
    whole = np.concatenate(parts, axis)
    for op, operands in (
        (shape.concat_forward, (*parts, whole)),
        (shape.slice_forward, (whole, *parts)),
        (shape.slice_backward, (*parts, whole)),
    ):
        same_bits(op, *operands, axis=axis)
        frugal(op, *operands, axis=axis)
    same_bits(shape.concat_backward, whole, parts[1], axis=axis, offset=47)
    frugal(shape.concat_backward, whole, parts[1], axis=axis, offset=47)


CROPS = {
    "1d": ((7,), (3,), (2,)),
    "2d": ((4, 9), (4, 5), (0, 4)),
    "4d": ((2, 3, 7, 8), (2, 1, 4, 8), (0, 2, 3, 0)),
    "5d": ((2, 3, 4, 5, 6), (1, 3, 2, 5, 1), (1, 0, 2, 0, 5)),
    "all": ((3, 4), (3, 4), (0, 0)),
    "nothing": ((3, 4), (3, 0), (0, 2)),
}


@pytest.mark.parametrize("dims, size, offsets", CROPS.values(), ids=CROPS.keys())
def test_crop(dims, size, offsets, dtype, garbage):
    x = np.random.default_rng(0).normal(size=dims).astype(dtype)
    inside = tuple(slice(start, start + n) for start, n in zip(offsets, size, strict=True))
    y, dx, expected = garbage(*size), garbage(*dims), np.zeros(dims)
    shape.crop_forward(x, y, offsets=offsets)
    np.testing.assert_array_equal(y, x[inside])
    shape.crop_backward(y, dx, offsets=offsets)
    expected[inside] = y
    np.testing.assert_array_equal(dx, expected)


@pytest.mark.parametrize(
    "outer, tiles, inner", [(1, 5, 3), (4, 2, 700), (300, 3, 1), (1, 4000, 2), (0, 2, 3), (2, 3, 0)]
)
def test_tile(outer, tiles, inner, dtype, garbage, close):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(outer, inner)).astype(dtype), rng.normal(size=(outer, tiles, inner)).astype(dtype)
    y, dx = garbage(outer, tiles, inner), garbage(outer, inner)
    shape.tile_forward(x, y)
    np.testing.assert_array_equal(y, np.tile(x[:, None], (1, tiles, 1)))
    shape.tile_backward(dy, dx)
    close(dx, dy.astype(np.float64).sum(1))


def test_threads_and_memory_of_crop_and_tile(dtype, same_bits, frugal):
    whole, part = np.ones((6, 50, 60, 7), dtype), np.arange(6 * 20 * 60 * 7, dtype=dtype).reshape(6, 20, 60, 7)
    tiled = np.random.default_rng(0).normal(size=(30, 7, 601)).astype(dtype)
    once = tiled[:, 0].copy()
    for check in (same_bits, frugal):
        check(shape.crop_forward, whole, part, offsets=(0, 11, 0, 0))
        check(shape.crop_backward, part, whole, offsets=(0, 11, 0, 0))
        check(shape.tile_forward, once, tiled)
        check(shape.tile_backward, tiled, once)
