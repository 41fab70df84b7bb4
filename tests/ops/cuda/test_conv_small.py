import itertools

import numpy as np
import pytest

from blobmem.devices.cuda.device import CudaDevice
from blobmem.ops.cuda import conv_small
from blobmem.ops.cuda.algorithms import Key
from blobmem.ops.cuda.layout import in_layout
from blobmem.ops.registry import table

# x, outputs, kernel, stride, pad
CASES = {
    "LeNet's first": ((1, 1, 13, 12), 20, (5, 5), (1, 1), (0, 0)),
    "LeNet's second": ((2, 7, 9, 8), 10, (5, 5), (1, 1), (0, 0)),
    "3x3": ((2, 3, 6, 10), 6, (3, 3), (1, 1), (1, 1)),
    "rows are strided": ((1, 3, 9, 7), 5, (4, 3), (2, 1), (2, 0)),
    "strided": ((2, 5, 11, 9), 4, (3, 3), (3, 2), (1, 2)),
    "strided 5x5, a rest": ((2, 2, 10, 11), 3, (5, 5), (2, 2), (1, 1)),
    "1x1": ((3, 6, 4, 5), 7, (1, 1), (1, 1), (0, 0)),
    "padding beyond the kernel": ((1, 2, 4, 3), 5, (3, 5), (1, 1), (4, 6)),
    "2x7": ((1, 4, 5, 12), 9, (2, 7), (1, 1), (0, 3)),
}
LIMIT = 1 << 20


def key_of(direction, case, layout="NCHW", math="tf32"):
    x, outputs, kernel, stride, pad = CASES[case]
    w = outputs, x[1], *kernel
    return Key(direction, x, w, stride, pad, (1, 1), 1, "float32", layout, math, True, LIMIT)


def several(key):
    """Of the tilings of each kind one in a few, the best and the worst among them."""
    shape = conv_small._Shape.of(key)
    result = []
    for _, kind in itertools.groupby(sorted(shape.tilings(), key=lambda each: type(each).__name__), type):
        found = sorted(kind, key=shape.cost)
        result += found[:: max(1, len(found) // 3)] + found[-1:]
    return [conv_small.Small(key, tiling) for tiling in result]


def ordered(x, layout):
    return x if layout == "NCHW" else np.ascontiguousarray(np.moveaxis(x, 1, -1))


@pytest.fixture
def place(cuda):
    """Puts arrays on the device; `take` brings one back."""

    class Place:
        def __init__(self):
            self.device = cuda.device

        def __call__(self, array):
            address = self.device.allocate(max(array.nbytes, 1), "test")
            self.device.memcpy_htod(address, np.ascontiguousarray(array))
            made = self.device.as_array(address, array.shape, array.dtype)
            places[id(made)] = address, made
            return made

        def take(self, made):
            result = np.empty(made.shape, made.dtype)
            self.device.synchronize()
            self.device.memcpy_dtoh(result, places[id(made)][0])
            return result

    places = {}
    yield Place()
    for address, _ in places.values():
        cuda.device.free(address)


def host(name, *arrays, **attributes):
    op = table("host")[name]
    extra = {} if op.workspace is None else {"ws": np.empty(1 << 20, np.uint8)}
    op(*arrays, **attributes, **extra)


@pytest.mark.parametrize("direction, math, expected", [
    ("forward+bias", "tf32", True), ("data", "tf32", True), ("weights", "tf32", True), ("weights", "fp32", True),
    ("forward+bias", "fp32", False), ("data", "fp32", False), ("forward+sum", "tf32", False),
])  # fmt: skip
def test_which_directions_fit(direction, math, expected):
    assert conv_small.fits(key_of(direction, "LeNet's second", math=math)) == expected


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CASES)
def test_every_direction_in_several_tilings(place, rng, case, layout):
    key = key_of("forward+bias", case, layout)
    window = {"stride": key.stride, "pad": key.pad, "dilation": (1, 1), "group": 1}
    x, w, b, dy = (rng.normal(size=size).astype(np.float32) for size in (key.x, key.w, key.w[:1], key.y))
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.zeros_like(w)
    host("conv_forward", x, w, b, y, **window)
    host("conv_backward_data", dy, w, dx, **window)
    host("conv_backward_weights", x, dy, dw, accumulate=False, **window)
    on_device = [place(ordered(x, layout)), place(w), place(b), place(ordered(dy, layout))]

    def check(result, expected, math="tf32"):
        share = (
            2e-3 if math == "tf32" and isinstance(place.device, CudaDevice) else 1e-5
        )  # on a GPU of ten bits of each number
        np.testing.assert_allclose(place.take(result), expected, rtol=0, atol=share * np.abs(expected).max())

    for plan in several(key):
        for relu in (False, True):
            result = place(np.full(in_layout(key.y, layout), np.nan, np.float32))
            plan.forward(*on_device[:3], result, relu)
            check(result, ordered(np.maximum(y, 0) if relu else y, layout))
    for plan in several(key._replace(direction="data")):
        result = place(np.full(in_layout(key.x, layout), np.nan, np.float32))
        plan.forward(on_device[3], on_device[1], None, result)
        check(result, ordered(dx, layout))
    for math, accumulate in (("tf32", False), ("fp32", True)):
        for plan in several(key._replace(direction="weights", math=math)):
            result = place(np.full(key.w, 2.0 if accumulate else np.nan, np.float32))
            ws = place(np.full(plan.workspace, 0xFF, np.uint8))
            plan.weights(on_device[0], on_device[3], result, ws, accumulate)
            check(result, dw + 2 * accumulate, math)
