"""Every recorded case and every type of layer in half precision: what float32 makes of the same numbers, rounded.

A layer is here as soon as it has a row in `layer_cases`; sources of data are in tests/sources/test_half.py.
"""

import re

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU
from cuda_emulation import EmulatedCuda
from layer_nets import TEXTS, fill

from blobmem import TEST, TRAIN, Net

ROUNDINGS = 2
"""What an array may be off by for each layer of its net, in roundings of its largest number."""

LITTLE = 0.05

STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def run(net, name):
    net.clear_param_diffs()
    net.run_forward()
    rng = np.random.default_rng(5)
    for blob in (net.blobs[each] for each in net.outputs if net.blobs[each].shape):
        blob.diff[...] = rng.uniform(0.5, 1, blob.shape)
    net.run_backward()


def arrays(net):
    blobs = {**net.blobs, **{f"{layer}/{i}": blob for layer, own in net.params.items() for i, blob in enumerate(own)}}
    return {name: (blob.cpu_data().astype("f8"), blob.cpu_diff().astype("f8")) for name, blob in blobs.items()}


@pytest.mark.parametrize("make", [EMULATED, GPU])
@pytest.mark.parametrize(
    ("name", "dtype", "phase"),
    [
        (name, dtype, phase)
        for name in TEXTS
        for dtype, phase in (("float16", TRAIN), ("bfloat16", TRAIN), ("float16", TEST))
        # of a type's other cases, as in phase TEST, one half will do: the two differ in how they round
        if dtype == "float16" or not re.search(r"-[1-9]$", name)
    ],
)
def test_half_is_float32_rounded(name, dtype, phase, make):
    device = make()
    if make is EmulatedCuda:
        device.channels_last = phase == TRAIN  # a GPU has images of halves so in both
    half, full = (Net(TEXTS[name], phase, device=device, seed=1, dtype=each) for each in (dtype, "float32"))
    fill(half, name)
    for each in full.inputs:
        full.blobs[each].data[...] = half.blobs[each].cpu_data()
    for layer, blobs in half.params.items():
        for blob, other in zip(blobs, full.params[layer], strict=True):
            other.data[...] = blob.cpu_data()
    for net in (half, full):
        run(net, name)
    expected, found = arrays(full), arrays(half)
    for kind, of in (("data", 0), ("diff", 1)):
        largest = max(np.nanmax(np.abs(pair[of]), initial=0) for pair in expected.values())
        for key in expected:
            a, b = expected[key][of], found[key][of]
            assert a.shape == b.shape
            # what is nothing but a rounding error, a sum of opposites, is as good as it is small
            atol = ROUNDINGS * len(half.layers) * STEP[dtype] * max(np.nanmax(np.abs(a), initial=0), LITTLE * largest)
            assert np.allclose(b, a, rtol=0, atol=atol, equal_nan=True), f"{key}, {kind}"
