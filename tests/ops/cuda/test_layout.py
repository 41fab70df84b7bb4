"""Channels last and first again, against NumPy."""

import numpy as np
import pytest

from blobmem.ops.cuda import layout


@pytest.fixture
def convert(cuda):
    """Run a conversion of a host array on the device; gives the bytes of the other side."""

    def run(function, x, shape):
        device, y = cuda.device, np.full(shape, np.nan if x.dtype.kind == "f" else 7, x.dtype)
        places = [device.allocate(max(1, x.nbytes), "layout") for _ in range(2)]
        if x.size:
            device.memcpy_htod(places[0], x)
        function(*(device.as_array(place, a.shape, x.dtype) for place, a in zip(places, (x, y), strict=True)))
        device.synchronize()
        if x.size:
            device.memcpy_dtoh(y, places[1])
        for place in places:
            device.free(place)
        return y

    return run


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8], ids=["float32", "float64", "uint8"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 20, 9), (2, 64, 8, 8), (1, 70, 9, 15), (3, 130, 1, 1), (2, 5, 7), (2, 17, 3, 4, 5), (0, 3, 4, 4)]
)
def test_there_and_back(convert, shape, dtype):
    x = (100 * np.random.default_rng(0).random(shape)).astype(dtype)
    last = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    np.testing.assert_array_equal(convert(layout.to_channels_last, x, shape).reshape(last.shape), last)
    np.testing.assert_array_equal(convert(layout.to_channels_first, last, shape), x)
