"""Ops whose outputs may lie where their inputs do give the same bits there, on every family, for each such pair."""

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU

from blobmem.net.plan.heirs import IN_PLACE
from blobmem.ops.host.random import draws_at
from blobmem.ops.registry import ArraySpec, table

FOLDED, FLAT, COLUMNS = (3, 5, 49), (735,), (40, 5, 1)
NEURON, GRADIENT = "xy", "xxy"
POWER, LOG = {"power": 3.0, "scale": 0.5, "shift": 2.0}, {"scale": 0.1, "shift": 3.0, "factor": 0.5}
NORM = {"eps": 1e-3, "fraction": 0.75}
CASES = {
    "absval": {}, "bnll": {}, "sigmoid": {}, "tanh": {}, "relu": {"slope": 0.1}, "relu6": {"slope": 0.1},
    "clip": {"low": -0.5, "high": 0.7}, "exp": {"rate": 0.5, "offset": 0.1}, "log": LOG, "swish": {"beta": 1.5},
}  # fmt: skip
OPS = {
    **{f"{name}_forward": (NEURON, attributes) for name, attributes in CASES.items()},
    **{f"{name}_backward": (GRADIENT, attributes) for name, attributes in CASES.items()},
    "threshold_forward": (NEURON, {"threshold": 0.2}), "copy": (NEURON, {}),
    "elu_forward": (NEURON, {"alpha": 0.3}), "elu_backward": ("xxxy", {"alpha": 0.3}),
    "power_forward": (NEURON, POWER), "power_backward": ("xxxy", POWER),
    "dropout_forward": ("xyb", {"ratio": 0.4, "draws": draws_at(1, "in place", 2)}),
    "dropout_backward": ("xby", {"ratio": 0.4}),
    "eltwise_sum_backward": (NEURON, {"coeff": 0.5}),
    "eltwise_sum": ("xxxy", {"coeffs": (1.0, 0.5, 2.0)}), "eltwise_prod": ("xxxy", {}),
    "eltwise_prod_backward": ("xyxx", {}), "eltwise_prod_backward_unstable": ("xyxx", {}),
    "eltwise_max": ("xxxyi", {}), "eltwise_max_backward": ("xiy", {"index": 1}), "sum_arrays": ("xxxy", {}),
    "axpy_forward": ("prrs", {}), "multiply": ("xfy", {}), "bias_forward": ("xcy", {}), "scale_forward": ("xccy", {}),
    "scale_backward_data": ("xcy", {}), "prelu_forward": ("xcy", {}), "prelu_backward_data": ("xcxy", {}),
    "batch_norm_inference": ("xycvf", {"eps": 1e-3}), "batch_norm_backward_global": ("xyvf", {"eps": 1e-3}),
    "batch_norm_forward": ("xyymvcvf", NORM), "batch_norm_given": ("xyymv", {}), "batch_norm_backward": ("xcxy", {}),
    "batch_norm_backward_given": ("xvccxyd", {"relu": True, "count": 400}),
    "batch_norm_scale_forward": ("xyymvcvfcc", {**NORM, "relu": True}),
    "batch_norm_scale_given": ("xyymvcc", {"relu": True}),
    "batch_norm_scale_sum_relu_given": ("xxyymvcc", {"slope": 0.1}),
    "batch_norm_scale_sum_relu_forward": ("xxyymvcvfcc", {**NORM, "slope": 0.1}),
    "batch_norm_scale_inference": ("xycvfcc", {"eps": 1e-3, "relu": True}),
    "sum_batch_norm_scale_inference": ("xxyycvfcc", {"eps": 1e-3, "relu": True}),
    "batch_norm_scale_backward": ("xvccxycc", {"relu": True, "accumulate": True}),
    "scale_relu_forward": ("xccy", {}), "sum_relu_forward": ("xxy", {"slope": 0.1}),
    "scale_sum_relu_forward": ("xccxccy", {"slope": 0.1}),
    "sum_relu_backward": ("xxyy", {"slope": 0.1}), "sums_relu_backward": ("xxxyyy", {"slope": 0.1}),
    "sums_relu_batch_norm_scale_backward": ("xxxyyxvcycc", {"slope": 0.1, "accumulate": True}),
    "relu_bias_backward": ("xxyc", {"slope": 0.1, "accumulate": False}),
    "sums_relu_bias_backward": ("xxxyc", {"slope": 0.1, "accumulate": False}),
    "softmax_loss_backward": ("xltfy", {"ignore_label": 1, "normalization": "VALID", "layer": "loss"}),
}  # fmt: skip
"""Op -> its operands (x: a large input, y: a large output, c: of each channel, m: two of each, d: two of each in double precision, v: one, positive, p: of each plane, f: one
number, r and s: x and y as planes, b: bytes, i: indices, l: labels, t: two positive numbers for each of these) and its attributes."""


def made(kinds, shape, rng):
    outer, channels, inner = shape
    planes = outer * channels, inner
    like = {
        "c": lambda: rng.normal(size=channels), "m": lambda: rng.normal(size=2 * channels), "d": lambda: rng.normal(size=2 * channels), "v": lambda: rng.random(channels) + 0.5, "f": lambda: np.full(1, 3.5),
        "p": lambda: rng.normal(size=outer * channels), "x": lambda: rng.normal(size=shape),
        "y": lambda: np.full(shape, np.nan),
        "r": lambda: rng.normal(size=planes), "s": lambda: np.full(planes, np.nan), "b": lambda: rng.integers(0, 2, shape), "i": lambda: rng.integers(0, 3, shape),
    }  # fmt: skip
    like |= {"l": lambda: rng.integers(0, channels, (outer, inner)), "t": lambda: rng.random((outer, 2, inner)) + 1}
    types = {"b": np.uint8, "i": np.int32, "d": np.float64}
    return [like[kind]().astype(types.get(kind, np.float32)) for kind in kinds]


def run(name, device, arrays, attributes, same=None):
    """All arrays afterwards; `same`: positions of two that lie in one place, where the first one's bytes are."""
    op = table("host" if device is None else "cuda")[name]
    if op.workspace is not None:
        specs = [ArraySpec.of(array) for array in arrays]
        more = {} if device is None else {"device": device}
        attributes = {**attributes, "ws": np.zeros(op.workspace_bytes(*specs, **attributes, **more), np.uint8)}
    arrays = [array.copy() for array in arrays]
    if same is not None:
        arrays[same[1]] = arrays[same[0]]
    if device is None:
        op(*arrays, **attributes)
        return arrays
    places = {}

    def there(array):
        if id(array) not in places:
            places[id(array)] = device.allocate(max(1, array.nbytes), name)
            if array.nbytes:
                device.memcpy_htod(places[id(array)], array)
        return device.as_array(places[id(array)], array.shape, array.dtype)

    if "ws" in attributes:
        attributes = {**attributes, "ws": there(attributes["ws"])}
    op(*map(there, arrays), **attributes)
    device.synchronize()
    for array in arrays:
        device.memcpy_dtoh(array, places[id(array)])
    for address in places.values():
        device.free(address)
    return arrays


def pairs(name):
    inputs, outputs = IN_PLACE[name]
    places = range(len(OPS[name][0]))
    for old in places[inputs] if isinstance(inputs, slice) else inputs:
        yield from ((old, places[new]) for new in outputs if places[new] != old)


def test_every_op_is_here():
    """But what convolves (`test_conv_normed`)."""
    assert OPS.keys() == IN_PLACE.keys() - {"conv_batch_norm_backward_given"}


@pytest.fixture(params=[pytest.param(lambda: None, id="host"), EMULATED, GPU])
def device(request):
    return request.param()


@pytest.mark.parametrize("shape", [FOLDED, COLUMNS], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_an_output_in_place_of_an_input_has_the_same_bits(device, name, shape):
    if name not in table("host" if device is None else "cuda"):
        pytest.skip("an op that others have")
    kinds, attributes = OPS[name]
    arrays = made(kinds, shape, np.random.default_rng(1))
    expected = run(name, device, arrays, attributes)
    for old, new in pairs(name):
        got = run(name, device, arrays, attributes, (old, new))
        for at in range(len(kinds)):
            if at != old:
                np.testing.assert_array_equal(got[at], expected[at], err_msg=f"operand {at}, {new} in place of {old}")
    assert [*pairs(name)]
