import math

import numpy as np
import pytest
from cuda_devices import ON_TENSOR_CORES, EmulatedCuda

from blobmem import dtypes
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.ops.cuda import conv_first
from blobmem.ops.registry import ArraySpec, table

WINDOWS = {
    3: {"stride": (1, 1), "pad": (1, 1), "dilation": (1, 1), "group": 1},
    7: {"stride": (2, 2), "pad": (3, 3), "dilation": (1, 1), "group": 1},
}
LAYOUT = "NCHW to NHWC"


on_devices = pytest.mark.parametrize("cuda", ON_TENSOR_CORES, indirect=True)
in_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
on_cases = pytest.mark.parametrize(
    "taps, images, plane, outputs",
    [
        (7, 1, (7, 12), 64), (7, 2, (9, 20), 64), (7, 1, (3, 36), 128), (7, 1, (3, 116), 64), (7, 2, (2, 4), 64),
        (7, 1, (4, 232), 64), (3, 1, (5, 12), 64), (3, 2, (3, 20), 128), (3, 1, (2, 116), 64), (3, 3, (1, 4), 64),
    ],
)  # fmt: skip


def host(name, taps, *arrays, **attributes):
    op = table("host")[name]
    extra = {} if op.workspace is None else {"ws": np.empty(1 << 20, np.uint8)}
    op(*arrays, **attributes, **WINDOWS[taps], **extra)


def arrays(rng, taps, images, plane, outputs, dtype):
    """x, w, b and y, with numbers that the dtype has, in float32."""
    stride = WINDOWS[taps]["stride"][0]
    shapes = (images, 3, *plane), (outputs, 3, taps, taps), (outputs,)
    shapes += ((images, outputs, *((side - 1) // stride + 1 for side in plane)),)
    return [rng.normal(size=shape).astype(dtypes.of(dtype)).astype(np.float32) for shape in shapes]


def last(y):
    return np.ascontiguousarray(np.moveaxis(y, 1, -1))


def close(cuda, got, expected):
    if got.dtype == np.float32:
        share = 1e-5 if isinstance(cuda.device, EmulatedCuda) else 2e-3  # on a GPU of ten bits of each number
    else:
        share = 2e-3 if got.dtype == np.float16 else 8e-3  # what is written is rounded
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0, atol=share * np.abs(expected).max())


@on_devices
@in_dtypes
@on_cases
def test_forward(cuda, rng, taps, images, plane, outputs, dtype):
    x, w, b, y = arrays(rng, taps, images, plane, outputs, dtype)
    ways = (b, False, "conv_forward"), (None, True, "conv_forward"), (b, False, "conv_relu_forward")
    for bias, turned, name in ways:
        host("conv_forward", taps, x, w, bias, y)
        given = [x, last(w).reshape(w.shape) if turned else w, bias, np.full(last(y).shape, np.nan)]
        given = [None if each is None else each.astype(dtypes.of(dtype)) for each in given]
        got = cuda.run(name, *given, layout=LAYOUT, turned=turned, **WINDOWS[taps])[3]
        close(cuda, np.moveaxis(got, -1, 1), np.maximum(y, 0) if "relu" in name else y)


@on_devices
@in_dtypes
@pytest.mark.parametrize("parts", ["gamma beta relu", "b"])
@on_cases
def test_what_is_kept_of_it_normalised(cuda, rng, taps, images, plane, outputs, parts, dtype):
    """As its numbers are made, and y of what it holds."""
    x, w, b, y = arrays(rng, taps, images, plane, outputs, dtype)
    mean, inv_std = np.zeros(2 * outputs, np.float32), rng.uniform(0.5, 2, size=outputs).astype(np.float32)
    mean[:outputs] = rng.normal(size=outputs)
    gamma, beta = (rng.normal(size=outputs).astype(dtypes.of(dtype)) for _ in range(2))
    b, gamma, beta = (
        array if name in parts.split() else None for name, array in {"b": b, "gamma": gamma, "beta": beta}.items()
    )
    host("conv_forward", taps, x, w, b, y)
    xhat = (y - mean[:outputs, None, None]) * inv_std[:, None, None]
    empty = np.full(last(y).shape, np.nan).astype(dtypes.of(dtype))
    given = [None if each is None else each.astype(dtypes.of(dtype)) for each in (x, w, b)]
    given = *given, None, empty, empty.copy(), mean, inv_std, gamma, beta
    got = cuda.run("conv_batch_norm_given", *given, layout=LAYOUT, relu="relu" in parts, **WINDOWS[taps])
    close(cuda, np.moveaxis(got[5], -1, 1), xhat)
    times, plus = (one if each is None else each.astype(np.float32) for each, one in ((gamma, 1), (beta, 0)))
    wanted = got[5].astype(np.float32) * times + plus
    close(cuda, got[4], np.maximum(wanted, 0) if "relu" in parts else wanted)


@on_devices
@in_dtypes
@pytest.mark.parametrize("accumulate", [False, True])
@on_cases
def test_gradient_for_weights(cuda, rng, taps, images, plane, outputs, accumulate, dtype):
    x, w, _, dy = arrays(rng, taps, images, plane, outputs, dtype)
    dw = w.copy() if accumulate else np.zeros_like(w)
    host("conv_backward_weights", taps, x, dy, dw, accumulate=accumulate)
    for room in (None, 3 * w.nbytes, 0):  # all parts, three and one
        given = [x, last(dy), w if accumulate else np.full_like(w, np.nan)]
        given = [each.astype(dtypes.of(dtype)) for each in given]
        attributes = {"accumulate": accumulate, "layout": LAYOUT, "room": room, **WINDOWS[taps]}
        close(cuda, cuda.run("conv_backward_weights", *given, **attributes)[2], dw)


@on_devices
@pytest.mark.parametrize("taps", WINDOWS)
def test_images_at_any_address(cuda, rng, taps):
    """Those that somebody hands in may not begin where four numbers can be read at once."""
    x, w, b, y = arrays(rng, taps, 1, (8, 12), 64, "float32")
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
    host("conv_forward", taps, x, w, b, y)
    close(cuda, np.moveaxis(got, -1, 1), y)
    for place in at.values():
        device.free(place)


SPECS = {"x": (32, 3, 224, 224), "w": (64, 3, 7, 7)}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True), ({"x": (1, 3, 224, 288)}, True), ({"x": (1, 3, 224, 226)}, False), ({"x": (0, 3, 224, 224)}, False),
        ({"x": (1, 4, 224, 224), "w": (64, 4, 7, 7)}, False), ({"w": (96, 3, 7, 7)}, False),
        ({"w": (64, 3, 3, 3)}, False), ({"w": (64, 3, 3, 3), "stride": (1, 1), "pad": (1, 1)}, True),
        ({"w": (64, 3, 7, 3)}, False), ({"w": (64, 3, 5, 5)}, False), ({"stride": (1, 1)}, False),
        ({"pad": (2, 2)}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("math, dtype", [("tf32", "float32"), ("fp32", "float32"), ("fp32", "bfloat16")])
def test_what_fits(change, expected, math, dtype):
    x, w = (ArraySpec((SPECS | change)[name], dtypes.of(dtype)) for name in "xw")
    window = tuple((WINDOWS[7] | change)[name] for name in WINDOWS[7])
    expected = expected and (math, dtype) != ("fp32", "float32")
    assert conv_first.fits(x, w, window, PredictedCuda(math=math)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", WINDOWS)
def test_wide_images(taps, dtype):
    x, w = ArraySpec((1, 3, 8, 292), dtypes.of(dtype)), ArraySpec((64, 3, taps, taps), dtypes.of(dtype))
    fits = conv_first.fits(x, w, tuple(WINDOWS[taps].values()), PredictedCuda(math="tf32"))
    assert fits == ((taps, dtype) != (7, "float32"))


def test_workspace():
    x, w = (ArraySpec(SPECS[name], np.dtype(np.float32)) for name in "xw")
    ops, device, part = table("cuda"), PredictedCuda(math="tf32"), 4 * math.prod(SPECS["w"])
    dy = ArraySpec((32, 112, 112, 64), np.dtype(np.float32))
    assert ops["conv_forward"].workspace_bytes(x, w, None, dy, device=device, layout=LAYOUT, **WINDOWS[7]) == 0
    for room, parts in ((None, 396), (100 * part, 100), (part, 0)):
        given = {"accumulate": True, "layout": LAYOUT, "room": room, **WINDOWS[7]}
        assert ops["conv_backward_weights"].workspace_bytes(x, dy, w, device=device, **given) == parts * part
