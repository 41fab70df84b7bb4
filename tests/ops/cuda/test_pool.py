"""Pooling on a CUDA device against the host."""

import numpy as np
import pytest
from pool_windows import in_bytes, window_of

from blobmem.ops.host.random import draws_at

WINDOWS = {
    "2x2": ((6, 8), (2, 2), (2, 2), (0, 0)),
    "2x2, padded": ((7, 5), (2, 2), (2, 2), (1, 1)),
    "overlapping, last row cut": ((13, 14), (3, 3), (2, 2), (0, 0)),
    "padded": ((13, 40), (3, 3), (1, 1), (1, 1)),
    "padded, strided": ((32, 7), (3, 3), (2, 2), (1, 1)),
    "gaps, last window beyond": ((11, 20), (2, 2), (3, 4), (0, 0)),
    "3x3, last windows beyond": ((10, 10), (3, 3), (5, 5), (0, 0)),
    "4x3, two apart": ((9, 12), (4, 3), (2, 2), (1, 2)),
    "whole plane": ((7, 7), (7, 7), (1, 1), (0, 0)),
    "large, few": ((17, 13), (9, 7), (5, 3), (3, 2)),
    "large, many": ((12, 21), (6, 7), (2, 1), (2, 3)),
    "uneven": ((9, 33), (2, 5), (3, 2), (1, 2)),
    "255 elements": ((18, 21), (15, 17), (2, 3), (7, 9)),
    "one element": ((1, 1), (1, 1), (1, 1), (0, 0)),
}


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS.keys())
def window(request):
    return window_of(*request.param)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=[np.int32, np.uint8], ids=["places in int32", "places in bytes"])
def kind(request):
    """A mask's dtype."""
    return request.param


def garbage(*shape, dtype):
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 7, dtype)


def test_maximum(cuda, rng, window, dtype, kind):
    plane, out, attributes = window
    # few values, so that there are equal ones in a window
    x = rng.integers(-3, 4, (2, 3, *plane)).astype(dtype)
    y, mask = garbage(2, 3, *out, dtype=dtype), garbage(2, 3, *out, dtype=kind)
    _, _, mask = cuda.compare("max_pool_forward", x, y, mask, rtol=0, **attributes)
    cuda.compare("max_pool_forward", x, y, None, rtol=0, **attributes)
    dy = rng.normal(size=mask.shape).astype(dtype)
    cuda.compare("max_pool_backward", dy, mask, garbage(*x.shape, dtype=dtype), **attributes)


def test_average(cuda, rng, window, dtype):
    plane, out, attributes = window
    x, dy = (rng.normal(size=(2, 3, *shape)).astype(dtype) for shape in (plane, out))
    cuda.compare("ave_pool_forward", x, garbage(*dy.shape, dtype=dtype), **attributes)
    cuda.compare("ave_pool_backward", dy, garbage(*x.shape, dtype=dtype), **attributes)


def last(x):
    """The same with the channels last."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


@pytest.mark.parametrize("channels", [3, 8])
def test_channels_last(cuda, rng, window, dtype, kind, channels):
    plane, out, attributes = window
    x, dy = (rng.integers(-3, 4, (2, channels, *shape)).astype(dtype) for shape in (plane, out))
    x[0, 1, -1, -1] = np.nan
    y, mask = garbage(*dy.shape, dtype=dtype), garbage(*dy.shape, dtype=kind)

    def compare(name, *operands):
        """Both layouts; the result of the first."""
        first = cuda.run(name, *operands, **attributes)
        second = cuda.run(name, *map(last, operands), **attributes, layout="NHWC")
        close = 1e-12 if dtype == np.float64 else 1e-6
        for one, other in zip(first, second, strict=True):
            np.testing.assert_allclose(other, last(one), rtol=close, atol=close)
        return first

    _, _, mask = compare("max_pool_forward", x, y, mask)
    compare("max_pool_backward", dy, mask, garbage(*x.shape, dtype=dtype))
    compare("ave_pool_forward", x, y)
    compare("ave_pool_backward", dy, garbage(*x.shape, dtype=dtype))
    got = cuda.run("max_pool_forward", last(x), last(y), None, **attributes, layout="NHWC")[1]
    np.testing.assert_array_equal(got, last(cuda.run("max_pool_forward", x, y, None, **attributes)[1]))


def test_channels_last_of_nothing(cuda):
    attributes = {"kernel": (3, 3), "stride": (2, 2), "pad": (0, 0), "layout": "NHWC"}
    x, y = np.zeros((0, 5, 5, 4), np.float32), np.zeros((0, 2, 2, 4), np.float32)
    cuda.run("max_pool_forward", x, y, None, **attributes)
    cuda.run("max_pool_backward", y, y.astype(np.int32), x, **attributes)
    with pytest.raises(ValueError, match="layout"):
        cuda.run("ave_pool_forward", x, y, **{**attributes, "layout": "CHWN"})


def test_stochastic(cuda, rng, window, dtype, kind):
    plane, out, attributes = window
    x = rng.random((2, 3, *plane)).astype(dtype)
    x[0, 0] = 0
    y, mask = garbage(2, 3, *out, dtype=dtype), garbage(2, 3, *out, dtype=kind)
    cuda.compare("stochastic_pool_forward", x, y, None, draws=None, **attributes)
    draws = draws_at(3, "pool", 2**33 + 5)
    cuda.compare("stochastic_pool_forward", x, y, None, draws=draws, rtol=0, **attributes)
    _, _, mask = cuda.compare("stochastic_pool_forward", x, y, mask, draws=draws, rtol=0, **attributes)
    dy = rng.normal(size=mask.shape).astype(dtype)
    cuda.compare("max_pool_backward", dy, mask, garbage(*x.shape, dtype=dtype), **attributes)


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (4, 3), (7, 7)])
def test_what_is_no_number_is_not_lost(cuda, kernel, stride, dtype):
    attributes = {"kernel": (kernel, kernel), "stride": (stride, stride), "pad": (1, 1)}
    size = 40 if kernel < 7 else 12
    x = np.zeros((1, 1, 8, size), dtype)
    y = garbage(1, 1, -(-(10 - kernel) // stride) + 1, -(-(size + 2 - kernel) // stride) + 1, dtype=dtype)
    mask = garbage(*y.shape, dtype=np.int32)
    for value in (-np.inf, np.nan):
        x.fill(value)
        _, got, places = cuda.run("max_pool_forward", x, y, mask, **attributes)
        np.testing.assert_array_equal(got, np.full(y.shape, value))
        assert ((places >= 0) & (places < x.size)).all()
    x.fill(1)
    x[0, 0, 2, 7] = np.nan
    _, got, places = cuda.compare("max_pool_forward", x, y, mask, **attributes)
    assert np.isnan(got).any() and (np.isnan(got) == (places == 2 * size + 7)).all()
    near = cuda.compare("max_pool_forward", x, y, mask.astype(np.uint8), **attributes)[2]
    np.testing.assert_array_equal(near, in_bytes(places, x.shape[2:], **attributes))


def test_several_planes_a_thread(cuda, rng, kind, monkeypatch):
    from blobmem.ops.cuda import planes

    monkeypatch.setattr(planes, "_ENOUGH", 64)
    planes.groups.cache_clear()
    assert planes.groups(21, 30) == 3
    x, attributes = rng.normal(size=(3, 7, 10, 12)), {"kernel": (3, 3), "stride": (2, 2), "pad": (0, 0)}
    y, mask = garbage(3, 7, 5, 6, dtype=float), garbage(3, 7, 5, 6, dtype=kind)
    _, y, mask = cuda.compare("max_pool_forward", x, y, mask, rtol=0, **attributes)
    cuda.compare("max_pool_backward", y, mask, garbage(*x.shape, dtype=float), **attributes)
    cuda.compare("ave_pool_backward", y, garbage(*x.shape, dtype=float), **attributes)
    planes.groups.cache_clear()


def test_no_image(cuda):
    attributes = {"kernel": (3, 3), "stride": (2, 2), "pad": (0, 0)}
    x, y, mask = np.zeros((0, 3, 7, 7)), np.zeros((0, 3, 3, 3)), np.zeros((0, 3, 3, 3), np.int32)
    cuda.run("max_pool_forward", x, y, mask, **attributes)
    cuda.run("max_pool_backward", y, mask, x, **attributes)
    cuda.run(
        "ave_pool_forward", np.zeros((0, 3, 7, 7)), np.zeros((0, 3, 1, 1)), kernel=(7, 7), stride=(1, 1), pad=(0, 0)
    )
