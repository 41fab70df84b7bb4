"""Joining and dividing arrays along every axis."""

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
