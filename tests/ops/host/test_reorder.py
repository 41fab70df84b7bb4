"""Axes in another order, against NumPy."""

import itertools

import numpy as np
import pytest

from blobmem.ops.host import reorder


def check(shape, order, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    y = np.full([shape[axis] for axis in order], np.nan, dtype)
    reorder.transpose(x, y, order=order)
    np.testing.assert_array_equal(y, x.transpose(order))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_every_order_of_four_axes(order, dtype):
    check((3, 20, 1, 7), order, dtype)


@pytest.mark.parametrize(
    "shape, order",
    [((), ()), ((5,), (0,)), ((0, 3), (1, 0)), ((1, 1), (1, 0)), ((100, 1001), (1, 0)), ((2, 3, 2, 3, 2, 3), (5, 1, 3, 0, 2, 4))],
    ids=["none", "one", "empty", "ones", "two", "six"],
)  # fmt: skip
def test_any_number_of_axes(shape, order, dtype):
    check(shape, order, dtype)


def test_threads_and_memory(dtype, same_bits, frugal):
    x, y = np.random.default_rng(0).normal(size=(2, 60, 70, 40)).astype(dtype), np.zeros((2, 70, 40, 60), dtype)
    same_bits(reorder.transpose, x, y, order=(0, 2, 3, 1))
    frugal(reorder.transpose, x, y, order=(0, 2, 3, 1))
