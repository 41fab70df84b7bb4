"""Columns of windows on a CUDA device against the host."""

import math

import numpy as np
import pytest

CASES = {
    "2d": ((5, 6), (3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": ((5, 6), (3, 3), (1, 1), (1, 2), (1, 1)),
    "strided": ((9, 8), (3, 3), (2, 3), (1, 0), (1, 1)),
    "dilated": ((9, 11), (3, 2), (2, 1), (2, 1), (2, 4)),
    "1d": ((17,), (4,), (3,), (2,), (2,)),
    "3d": ((4, 5, 3), (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
    "4d": ((2, 3, 3, 4), (2, 1, 2, 2), (1, 1, 1, 2), (0, 1, 0, 0), (1, 1, 1, 1)),
    "mostly padding": ((2, 1), (3, 3), (1, 1), (4, 5), (1, 2)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_columns(cuda, rng, case, dtype):
    spatial, *rest = case
    attributes = dict(zip(("kernel", "stride", "pad", "dilation"), rest, strict=True))
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(spatial, *rest, strict=True)]
    x = rng.normal(size=(2, 3, *spatial)).astype(dtype)
    y = np.full((2, 3 * math.prod(rest[0]), *places), np.nan, dtype)
    cuda.compare("im2col_forward", x, y, rtol=0, **attributes)
    dy = rng.normal(size=y.shape).astype(dtype)
    cuda.compare("im2col_backward", dy, np.full_like(x, np.nan), **attributes)


@pytest.mark.parametrize("planes", [0, 1, 11])
def test_any_number_of_planes(cuda, rng, planes, monkeypatch):
    from blobmem.ops.cuda import planes as threads

    monkeypatch.setattr(threads, "_ENOUGH", 64)
    threads.groups.cache_clear()
    attributes = {"kernel": (3, 3), "stride": (2, 1), "pad": (1, 1), "dilation": (1, 1)}
    x, dy = rng.normal(size=(planes, 1, 9, 9)), rng.normal(size=(planes, 9, 5, 9))
    cuda.compare("im2col_forward", x, np.zeros_like(dy), **attributes)
    cuda.compare("im2col_backward", dy, np.zeros_like(x), **attributes)
    threads.groups.cache_clear()


def test_too_many_axes(cuda):
    shape = (1, 1, *[2] * 9)
    ones, zeros = (1,) * 9, (0,) * 9
    with pytest.raises(ValueError, match="columns of 9 spatial axes"):
        cuda.run("im2col_forward", np.zeros(shape), np.zeros(shape), kernel=ones, stride=ones, pad=zeros, dilation=ones)
