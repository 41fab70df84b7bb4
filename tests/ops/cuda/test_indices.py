"""Items picked by number against the host's."""

import numpy as np
import pytest

from blobmem.errors import NetError

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SIZES = pytest.mark.parametrize("items, count, size", [(3, 0, 4), (1, 5, 1), (40, 9, 8), (6, 600, 3), (9, 4, 1300)])
INDICES = pytest.mark.parametrize("whole", [False, True], ids=["floats", "int32"])


def picked(rng, items, count, dtype, whole):
    return rng.integers(0, items, count).astype(np.int32 if whole else dtype)


@DTYPES
@SIZES
@INDICES
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_gather(biased, whole, items, count, size, dtype, cuda, rng):
    x, bias = rng.normal(size=(items, size)).astype(dtype), rng.normal(size=size).astype(dtype) if biased else None
    y = np.full((count, size), np.nan, dtype)
    index = picked(rng, items, count, dtype, whole)
    cuda.compare("gather_forward", x, index, bias, y, atol=0, layer="embed")


@DTYPES
@SIZES
@INDICES
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
def test_gather_backward(accumulate, whole, items, count, size, dtype, cuda, rng):
    dy, index = rng.normal(size=(count, size)).astype(dtype), picked(rng, items, count, dtype, whole)
    dx = rng.normal(size=(items, size)).astype(dtype) if accumulate else np.full((items, size), np.nan, dtype)
    cuda.compare("gather_backward", dy, index, dx, accumulate=accumulate, layer="embed")


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("count", [64, 65, 128, 2049, 5000])
def test_many_rows_of_one_item(count, size, cuda, rng):
    """Most are of one item, which is in many chunks; the sums are those in whole numbers, the same in any order."""
    index = np.where(rng.random(count) < 0.9, 5, rng.integers(0, 300, count)).astype(np.float32)
    dy = rng.integers(-9, 9, (count, size)).astype(np.float32)
    for accumulate in (False, True):
        dx = np.full((300, size), 2 if accumulate else np.nan, np.float32)
        cuda.compare("gather_backward", dy, index, dx, atol=0, accumulate=accumulate, layer="embed")
    dy = rng.normal(size=(count, size)).astype(np.float32)
    one, other = (cuda.run("gather_backward", dy, index, dx, accumulate=False, layer="embed")[2] for _ in range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("items, count", [(1, 1), (1, 300), (7, 4096), (5000, 4097)])
def test_rows_are_added_up_in_the_order_of_their_places(items, count, cuda, rng):
    """So that what rounding leaves of large numbers of both signs is known, but for where chunks of 64 keys end."""
    index = rng.integers(0, items, count).astype(np.int32)
    dy = (rng.normal(size=(count, 1)) * 10.0 ** rng.integers(0, 6, (count, 1))).astype(np.float32)
    got = cuda.run("gather_backward", dy, index, np.zeros((items, 1), np.float32), accumulate=False, layer="embed")[2]
    order = np.argsort(index, kind="stable")
    expected, parts = np.zeros((items, 1), np.float32), {}
    for at, place in enumerate(order):
        key = index[place], at // 64
        parts[key] = parts.get(key, np.float32(0)) + dy[place]
    for (item, _), part in parts.items():
        expected[item] += part
    np.testing.assert_array_equal(got, expected)


@DTYPES
@pytest.mark.parametrize("value", [4, -1, 1.5, np.nan, 1e30], ids=str)
def test_an_index_of_no_item(value, dtype, cuda):
    x, index, y = np.ones((4, 8), dtype), np.zeros(3, dtype), np.ones((3, 8), dtype)
    index[1] = value
    message = f"layer 'embed': index {float(dtype(value)):g} at place 1: expected a whole number from 0 to 3; check"
    for run in (cuda.run, cuda.compare):  # the second one hears it from the host
        with pytest.raises(NetError) as caught:
            run("gather_forward", x, index, None, y, layer="embed")
        assert str(caught.value).startswith(message)
    with pytest.raises(NetError, match="at place 1"):
        cuda.run("gather_backward", y, index, x, accumulate=False, layer="embed")


def test_an_int32_index_of_no_item(cuda):
    x, y = np.ones((0, 3), np.float32), np.ones((1, 3), np.float32)
    with pytest.raises(NetError, match="index 0 at place 0: expected no index, since there are no items"):
        cuda.run("gather_forward", x, np.zeros(1, np.int32), None, y, layer="embed")


def test_indices_of_another_dtype(cuda):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="indices of float32 items are float32 or int32, not int64"):
        cuda.run("gather_forward", x, np.zeros(2, np.int64), None, x.copy(), layer="embed")


@DTYPES
@pytest.mark.parametrize("size, chance", [(0, 0), (1, 1), (7, 0.5), (900, 0.3), (900, 1), (300, 0)])
def test_nonzero(size, chance, dtype, cuda, rng):
    x = rng.normal(size=size).astype(dtype) * (rng.uniform(size=size) < chance)
    count = np.count_nonzero(x)
    for room in {count, count + 5, count // 2}:
        cuda.compare("nonzero_indices", x.astype(dtype), np.full(room, 77, np.int32))
