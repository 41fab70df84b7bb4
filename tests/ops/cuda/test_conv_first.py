import math

import numpy as np
import pytest
from cuda_devices import TF32_GPU, EmulatedCuda, needs_compiler

from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.ops.cuda import conv_first
from blobmem.ops.registry import ArraySpec, table

WINDOW = {"stride": (2, 2), "pad": (3, 3), "dilation": (1, 1), "group": 1}
LAYOUT = "NCHW to NHWC"


class WithTensorCores(EmulatedCuda):
    tensor_cores = True


on_devices = pytest.mark.parametrize(
    "cuda", [pytest.param(WithTensorCores, id="emulated", marks=needs_compiler), TF32_GPU], indirect=True
)
# images, planes, outputs
CASES = [(1, (7, 12), 64), (2, (9, 20), 64), (1, (3, 36), 128), (1, (3, 116), 64), (2, (2, 4), 64)]


def host(name, *arrays, **attributes):
    op = table("host")[name]
    extra = {} if op.workspace is None else {"ws": np.empty(1 << 20, np.uint8)}
    op(*arrays, **attributes, **WINDOW, **extra)


def arrays(rng, images, plane, outputs):
    shapes = (images, 3, *plane), (outputs, 3, 7, 7), (outputs,)
    shapes += ((images, outputs, *((side - 1) // 2 + 1 for side in plane)),)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def last(y):
    return np.ascontiguousarray(np.moveaxis(y, 1, -1))


def close(cuda, got, expected):
    share = 1e-5 if isinstance(cuda.device, EmulatedCuda) else 2e-3  # on a GPU of ten bits of each number
    np.testing.assert_allclose(got, expected, rtol=0, atol=share * np.abs(expected).max())


@on_devices
@pytest.mark.parametrize("images, plane, outputs", CASES)
def test_forward(cuda, rng, images, plane, outputs):
    x, w, b, y = arrays(rng, images, plane, outputs)
    ways = (b, False, "conv_forward"), (None, True, "conv_forward"), (b, False, "conv_relu_forward")
    for bias, turned, name in ways:
        host("conv_forward", x, w, bias, y)
        given = last(w).reshape(w.shape) if turned else w
        empty = np.full(last(y).shape, np.nan, np.float32)
        got = cuda.run(name, x, given, bias, empty, layout=LAYOUT, turned=turned, **WINDOW)[3]
        close(cuda, np.moveaxis(got, -1, 1), np.maximum(y, 0) if "relu" in name else y)


@on_devices
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("images, plane, outputs", CASES)
def test_gradient_for_weights(cuda, rng, images, plane, outputs, accumulate):
    x, w, _, dy = arrays(rng, images, plane, outputs)
    dw = w.copy() if accumulate else np.zeros_like(w)
    host("conv_backward_weights", x, dy, dw, accumulate=accumulate)
    for room in (None, 3 * w.nbytes, 0):  # all parts, three and one
        given = w if accumulate else np.full_like(w, np.nan)
        got = cuda.run(
            "conv_backward_weights", x, last(dy), given, accumulate=accumulate, layout=LAYOUT, room=room, **WINDOW
        )[2]
        close(cuda, got, dw)


@on_devices
def test_images_at_any_address(cuda, rng):
    """Those that somebody hands in may not begin where four numbers can be read at once."""
    x, w, b, y = arrays(rng, 1, (8, 12), 64)
    device = cuda.device
    at = {name: device.allocate(array.nbytes + 4, name) for name, array in {"x": x, "w": w, "b": b, "y": y}.items()}
    places = at["x"] + 4, at["w"], at["b"], at["y"]
    for place, array in zip(places, (x, w, b), strict=False):
        device.memcpy_htod(place, array)
    shapes = x.shape, w.shape, b.shape, last(y).shape
    given = [device.as_array(place, shape, np.dtype(np.float32)) for place, shape in zip(places, shapes, strict=True)]
    conv_first.forward(*given, relu=False, turned=False)
    device.synchronize()
    got = np.empty(last(y).shape, np.float32)
    device.memcpy_dtoh(got, at["y"])
    host("conv_forward", x, w, b, y)
    close(cuda, np.moveaxis(got, -1, 1), y)
    for place in at.values():
        device.free(place)


SPECS = {"x": (32, 3, 224, 224), "w": (64, 3, 7, 7)}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True), ({"x": (1, 3, 224, 288)}, True), ({"x": (1, 3, 224, 292)}, False), ({"x": (1, 3, 224, 226)}, False),
        ({"x": (0, 3, 224, 224)}, False), ({"w": (96, 3, 7, 7)}, False), ({"w": (64, 3, 3, 3)}, False),
        ({"stride": (1, 1)}, False), ({"pad": (2, 2)}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("math", ["tf32", "fp32"])
def test_what_fits(change, expected, math):
    x, w = (ArraySpec((SPECS | change)[name], np.dtype(np.float32)) for name in "xw")
    window = tuple((WINDOW | change)[name] for name in WINDOW)
    assert conv_first.fits(x, w, window, PredictedCuda(math=math)) == (expected and math == "tf32")


def test_workspace():
    x, w = (ArraySpec(SPECS[name], np.dtype(np.float32)) for name in "xw")
    ops, device, part = table("cuda"), PredictedCuda(math="tf32"), 4 * math.prod(SPECS["w"])
    dy = ArraySpec((32, 112, 112, 64), np.dtype(np.float32))
    assert ops["conv_forward"].workspace_bytes(x, w, None, dy, device=device, layout=LAYOUT, **WINDOW) == 0
    for room, parts in ((None, 396), (100 * part, 100), (part, 0)):
        given = {"accumulate": True, "layout": LAYOUT, "room": room, **WINDOW}
        assert ops["conv_backward_weights"].workspace_bytes(x, dy, w, device=device, **given) == parts * part
