"""Planes in another size on a CUDA device against the host."""

import numpy as np
import pytest

SIZES = {
    "larger": ((3, 4), (7, 9), (0, 0)),
    "smaller": ((9, 8), (4, 3), (0, 0)),
    "the same": ((5, 6), (5, 6), (0, 0)),
    "a part": ((7, 8), (6, 9), (1, 2)),
    "to one point": ((4, 5), (1, 1), (0, 0)),
    "from one point": ((1, 1), (3, 4), (0, 0)),
    "a row": ((1, 5), (1, 9), (0, 0)),
    "much larger": ((5, 7), (33, 49), (0, 0)),
    "much smaller": ((40, 31), (4, 3), (2, 1)),
}


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 7], ids=["a plane a thread", "several"])
def threads(request, monkeypatch):
    """How many planes a thread looks after, about."""
    from blobmem.ops.cuda import planes

    monkeypatch.setattr(planes, "_ENOUGH", 2**20 if request.param == 1 else 16)
    planes.groups.cache_clear()
    yield
    planes.groups.cache_clear()


@pytest.mark.parametrize("plane, out, crop", SIZES.values(), ids=SIZES.keys())
def test_interp(cuda, rng, plane, out, crop, dtype, threads):
    x, dy = rng.normal(size=(2, 3, *plane)).astype(dtype), rng.normal(size=(2, 3, *out)).astype(dtype)
    cuda.compare("interp_forward", x, np.full_like(dy, np.nan), crop=crop)
    cuda.compare("interp_backward", dy, np.full_like(x, np.nan), crop=crop)


STEPS = {
    "2x2": ((4, 5), (8, 10), (1, 1), (2, 2)),
    "3x1": ((4, 5), (12, 5), (1, 1), (3, 1)),
    "cut": ((4, 5), (7, 9), (1, 1), (2, 2)),
    "no multiple": ((4, 3), (9, 5), (4, 3), (9, 5)),
    "smaller": ((9, 7), (4, 3), (9, 7), (4, 3)),
}


@pytest.mark.parametrize("plane, out, times, over", STEPS.values(), ids=STEPS.keys())
def test_nearest(cuda, rng, plane, out, times, over, dtype, threads):
    x, dy = rng.normal(size=(2, 3, *plane)).astype(dtype), rng.normal(size=(2, 3, *out)).astype(dtype)
    cuda.compare("nearest_forward", x, np.full_like(dy, np.nan), rtol=0, times=times, over=over)
    cuda.compare("nearest_backward", dy, np.full_like(x, np.nan), times=times, over=over)


@pytest.mark.parametrize("whole", [True, False], ids=["int32", "as numbers"])
def test_unpool(cuda, rng, whole, dtype, threads):
    x, dy = rng.normal(size=(2, 3, 6, 7)).astype(dtype), rng.normal(size=(2, 3, 9, 11)).astype(dtype)
    # fewer places than elements: several go to one
    mask = rng.integers(-1, 30, x.shape).astype(np.int32 if whole else dtype)
    cuda.compare("unpool_forward", x, mask, np.full_like(dy, np.nan), rtol=0)
    cuda.compare("unpool_backward", dy, mask, np.full_like(x, np.nan), rtol=0)


def test_no_image(cuda):
    x, y = np.zeros((0, 3, 4, 4)), np.zeros((0, 3, 8, 8))
    cuda.run("interp_forward", x, y, crop=(0, 0))
    cuda.run("nearest_backward", y, x, times=(1, 1), over=(2, 2))
    cuda.run("unpool_forward", x, x.copy(), y)


@pytest.mark.parametrize("wrong", [9, -2, np.nan], ids=str)
def test_a_mask_of_another_plane(cuda, wrong, dtype):
    x, mask, y = np.ones((1, 1, 2, 2), dtype), np.zeros((1, 1, 2, 2), dtype), np.zeros((1, 1, 3, 3), dtype)
    mask[0, 0, 1, 0] = wrong
    said = r"mask value (9|-2|nan) at \(0, 0, 1, 0\) is no place in a plane of 3 x 3"
    with pytest.raises(ValueError, match=said):
        cuda.run("unpool_forward", x, mask, y)
    with pytest.raises(ValueError, match=said):
        cuda.run("unpool_backward", y, mask, x)
