"""Items picked by number, and their gradients, against NumPy."""

import numpy as np
import pytest

from blobmem import NetError
from blobmem.ops.host import indices as ops

SHAPES = [(5, 7, 12), (1, 300, 4), (40, 3, 9), (6, 0, 5), (4, 5, 0), (9, 2, 40000)]


def make(dtype, items, count, size):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(items, size)).astype(dtype), rng.normal(size=(count, size)).astype(dtype)
    return x, rng.integers(0, items, count), dy


@pytest.mark.parametrize("kind", ["floats", "int32"])
@pytest.mark.parametrize("items, count, size", SHAPES)
def test_gather(items, count, size, kind, dtype, close, garbage):
    x, index, dy = make(dtype, items, count, size)
    given = index.astype(dtype if kind == "floats" else np.int32)
    y, bias = garbage(count, size), np.arange(size, dtype=dtype)
    ops.gather_forward(x, given, None, y, layer="l")
    np.testing.assert_array_equal(y, x[index])
    ops.gather_forward(x, given, bias, y, layer="l")
    close(y, x[index].astype(float) + bias)
    expected = np.zeros((items, size))
    np.add.at(expected, index, dy)
    dx = garbage(items, size)
    ops.gather_backward(dy, given, dx, accumulate=False, layer="l")
    close(dx, expected, digits=10)
    ops.gather_backward(dy, given, dx, accumulate=True, layer="l")
    close(dx, 2 * expected, digits=20)


@pytest.mark.parametrize("wrong", [5, -1, 1.5, -0.5, np.nan, np.inf, -np.inf, 3e38])
def test_an_index_of_no_item_writes_nothing(wrong, dtype):
    x, y, index = np.ones((5, 3), dtype), np.full((4, 3), 7, dtype), np.zeros(4, dtype)
    index[2] = wrong
    with pytest.raises(
        NetError, match=rf"layer 'words': index {float(dtype(wrong)):g} at place 2: .*0 to 4".replace("+", "\\+")
    ):
        ops.gather_forward(x, index, None, y, layer="words")
    with pytest.raises(NetError, match="layer 'words': index"):
        ops.gather_backward(y, index, x, accumulate=False, layer="words")
    assert (y == 7).all() and (x == 1).all()


def test_no_items_at_all(dtype):
    with pytest.raises(NetError, match="no index, since there are no items"):
        ops.gather_forward(np.ones((0, 3), dtype), np.zeros(1, dtype), None, np.ones((1, 3), dtype), layer="l")


@pytest.mark.parametrize("values", [[0, 2, -1, 0, 0.5], [0, 0], [1, 1, 1], [], [np.nan, 0, -0.0]], ids=str)
def test_nonzero_indices(values, dtype):
    expected = np.flatnonzero(np.array(values, dtype))
    indices = np.full(len(expected), -5, np.int32)
    ops.nonzero_indices(np.array(values, dtype), indices)
    assert indices.tolist() == expected.tolist()


def test_indices_never_leave_their_array(dtype):
    indices = np.full(5, -5, np.int32)
    ops.nonzero_indices(np.array([1, 0, 3, 4], dtype), indices[:2])
    assert indices.tolist() == [0, 2, -5, -5, -5]
    ops.nonzero_indices(np.array([0, 3], dtype), indices[:2])
    assert indices.tolist() == [1, 0, -5, -5, -5]


def test_threads_and_memory(dtype, same_bits, frugal):
    x, index, dy = make(dtype, 300, 700, 500)
    index, bias = index.astype(dtype), np.ones(500, dtype)
    for check in (same_bits, frugal):
        check(ops.gather_forward, x, index, bias, dy, layer="l")
        check(ops.gather_backward, dy, index, x, accumulate=True, layer="l")
        check(ops.nonzero_indices, dy.reshape(-1), np.zeros(10, np.int32))
