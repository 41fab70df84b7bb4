"""Axes in another order on a CUDA device, against NumPy."""

import itertools

import numpy as np
import pytest


def check(cuda, shape, order, dtype=np.float32):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    y = np.full([shape[axis] for axis in order], np.nan, dtype)
    _, y = cuda.run("transpose", x, y, order=order)
    np.testing.assert_array_equal(y, x.transpose(order))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
@pytest.mark.parametrize("shape", [(3, 20, 1, 7), (17, 2, 3, 66)], ids=["short", "long"])
def test_every_order_of_four_axes(cuda, order, shape):
    check(cuda, shape, order)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "shape, order",
    [((), ()), ((5,), (0,)), ((0, 3), (1, 0)), ((1, 1), (1, 0)), ((100, 131), (1, 0)), ((3, 64, 128), (0, 2, 1)),
     ((2, 3, 2, 3, 2, 3), (5, 1, 3, 0, 2, 4)), ((2, 4, 3, 8), (0, 2, 1, 3)), ((16, 2, 3, 16, 2), (3, 2, 1, 4, 0)),
     ((2,) * 10, tuple(range(9, -1, -1)))],
    ids=["none", "one", "empty", "ones", "two", "batch", "six", "packs", "around", "ten"],
)  # fmt: skip
def test_any_number_of_axes(cuda, shape, order, dtype):
    check(cuda, shape, order, dtype)
