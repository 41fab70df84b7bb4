"""Joining and dividing arrays, cropping and repeating them on a CUDA device, against the host."""

import numpy as np
import pytest

SIZES = (3, 1, 4)
CASES = [(dims, axis) for dims in [(5,), (2, 6), (2, 3, 4), (3, 2, 4, 6), (3, 0, 2)] for axis in range(len(dims))]


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("dims, axis", CASES)
@pytest.mark.parametrize("sizes", [SIZES, (4, 8, 4)], ids=["any", "packs"])
def test_join_and_divide(cuda, rng, dims, axis, sizes, dtype):
    parts = [rng.normal(size=(*dims[:axis], size, *dims[axis + 1 :])).astype(dtype) for size in sizes]
    whole = np.concatenate(parts, axis)
    cuda.compare("concat_forward", *parts, np.full_like(whole, np.nan), axis=axis, rtol=0)
    cuda.compare("slice_backward", *parts, np.full_like(whole, np.nan), axis=axis, rtol=0)
    cuda.compare("slice_forward", whole, *[np.full_like(part, np.nan) for part in parts], axis=axis, rtol=0)
    for offset, part in zip(np.cumsum((0, *sizes)), parts, strict=False):
        cuda.compare("concat_backward", whole, np.full_like(part, np.nan), axis=axis, offset=int(offset), rtol=0)


@pytest.mark.parametrize("dims", [(7,), (7, 5), (7, 3, 5, 3), (7, 20, 6, 5), (7, 0, 2, 2)])
@pytest.mark.parametrize("first, items", [(0, 7), (2, 3), (6, 1)])
def test_take_items(cuda, rng, dims, first, items, dtype):
    x = rng.normal(size=dims).astype(dtype)
    y = x[first : first + items]
    cuda.compare("take_items", x, np.full_like(y, np.nan), first=first, rtol=0)
    if len(dims) == 4:
        last = np.ascontiguousarray(y.transpose(0, 2, 3, 1))
        _, got = cuda.run("take_items", x, np.full_like(last, np.nan), first=first, layout="NHWC")
        np.testing.assert_array_equal(got, last)


CROPS = {
    "1d": ((7,), (3,), (2,)),
    "2d": ((4, 9), (4, 5), (0, 4)),
    "4d": ((2, 3, 7, 8), (2, 1, 4, 8), (0, 2, 3, 0)),
    "packs": ((2, 3, 7, 8), (2, 1, 4, 4), (0, 2, 3, 4)),
    "packs that are not aligned": ((2, 3, 7, 8), (2, 1, 4, 4), (0, 2, 3, 2)),
    "5d": ((2, 3, 4, 5, 6), (1, 3, 2, 5, 1), (1, 0, 2, 0, 5)),
    "all": ((3, 4), (3, 4), (0, 0)),
    "nothing": ((3, 4), (3, 0), (0, 2)),
    "10d": ((3,) * 10, (2,) * 10, (1, 0) * 5),
}


@pytest.mark.parametrize("dims, size, offsets", CROPS.values(), ids=CROPS.keys())
def test_crop(cuda, rng, dims, size, offsets, dtype):
    x, y = rng.normal(size=dims).astype(dtype), rng.normal(size=size).astype(dtype)
    cuda.compare("crop_forward", x, np.full_like(y, np.nan), offsets=offsets, rtol=0)
    cuda.compare("crop_backward", y, np.full_like(x, np.nan), offsets=offsets, rtol=0)


@pytest.mark.parametrize(
    "outer, tiles, inner",
    [(1, 5, 3), (4, 2, 700), (5, 3, 8), (300, 3, 1), (1, 4000, 2), (3, 40, 31), (3, 40, 33), (0, 2, 3), (2, 3, 0)],
)
def test_tile(cuda, rng, outer, tiles, inner, dtype):
    x, dy = rng.normal(size=(outer, inner)).astype(dtype), rng.normal(size=(outer, tiles, inner)).astype(dtype)
    cuda.compare("tile_forward", x, np.full_like(dy, np.nan), rtol=0)
    cuda.compare("tile_backward", dy, np.full_like(x, np.nan))


@pytest.fixture
def launches(cuda):
    """The kernels that have run, by name."""
    if not hasattr(cuda.device, "launches"):
        pytest.skip("counted by the emulation")
    return cuda.device.launches


def test_one_launch_for_all_operands(cuda, launches):
    parts = [np.zeros((2, size, 4), np.float32) for size in SIZES]
    cuda.run("concat_forward", *parts, np.zeros((2, 8, 4), np.float32), axis=1)
    cuda.run("slice_forward", np.zeros((2, 8, 3), np.float32), *(part[..., :3] for part in parts), axis=1)
    assert launches == ["join_packs", "divide"]
    cuda.run("concat_forward", *(part[:1] for part in parts), np.zeros((1, 8, 4), np.float32), axis=1)
    assert len(launches) == 2  # runs of memory are copied without a kernel


@pytest.mark.parametrize(("count", "expected"), [(16, 2), (17, 2), (18, 3)])
def test_a_launch_for_eight_operands_of_many(cuda, launches, count, expected):
    whole = np.zeros((2, 4 * count), np.float32)
    cuda.run("slice_forward", whole, *[np.zeros((2, 4), np.float32)] * count, axis=1)
    assert [name for name in launches if name == "divide_packs"] == ["divide_packs"] * expected


@pytest.mark.parametrize("count", [2, 8, 9, 21])
@pytest.mark.parametrize("inner", [1, 4])
def test_many_parts_and_some_of_nothing(cuda, rng, count, inner, dtype):
    parts = [rng.normal(size=(3, size % 3, inner)).astype(dtype) for size in range(count)]
    whole = np.concatenate(parts, 1)
    cuda.compare("concat_forward", *parts, np.full_like(whole, np.nan), axis=1, rtol=0)
    cuda.compare("slice_forward", whole, *[np.full_like(part, np.nan) for part in parts], axis=1, rtol=0)


def test_packs_are_aligned(cuda, launches):
    for first in (0, 2, 4):
        cuda.run("crop_forward", np.zeros((3, 8), np.float32), np.zeros((3, 4), np.float32), offsets=(0, first))
    assert launches == ["copy_packs_2", "copy_2", "copy_packs_2"]


def test_arrays_too_large_for_one_launch(cuda, rng, monkeypatch):
    from blobmem.ops.cuda import shape, strided

    monkeypatch.setattr(strided, "_INDEX", 50)
    strided._launch.cache_clear()
    monkeypatch.setattr(shape, "_INDEX", 50)
    shape._joint.cache_clear()
    x, y = rng.normal(size=(7, 9, 5)), np.zeros((7, 3, 5))
    cuda.compare("slice_forward", x, *[np.zeros((7, 3, 5))] * 3, axis=1, rtol=0)
    shape._joint.cache_clear()
    cuda.compare("crop_forward", x, y, offsets=(0, 2, 0), rtol=0)
    cuda.compare("crop_backward", y, x, offsets=(0, 2, 0), rtol=0)
    cuda.compare("tile_forward", rng.normal(size=(2, 101)), np.zeros((2, 3, 101)), rtol=0)
    strided._launch.cache_clear()
