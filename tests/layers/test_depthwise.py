"""Depthwise convolution under its two names, against the convolution that it is."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, Net, NetError
from blobmem.devices import HOST

NAMES = ["DepthwiseConvolution", "ConvolutionDepthwise"]


def net_of(type_, options, device=HOST, shape=(2, 4, 6, 5)):
    dims = " ".join(f"dim: {d}" for d in shape)
    text = f'layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {dims} }} }} }}\n'
    text += f'layer {{ name: "c" type: "{type_}" bottom: "x" top: "y" convolution_param {{ {options} }} }}'
    return Net(text, TEST, device=device, seed=1)


@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("type_", NAMES)
def test_each_channel_by_itself(type_, make_device):
    net = net_of(type_, "kernel_size: 3 pad: 1 stride: 2 bias_term: false", make_device())
    assert net.params["c"][0].shape == (4, 1, 3, 3)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(4, 1, 3, 3))
    net.blobs["x"].data[...], net.params["c"][0].data[...] = x, w
    net.run_forward()
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = np.zeros((2, 4, 3, 3))
    for r, q in np.ndindex(3, 3):
        expected[:, :, r, q] = (padded[:, :, 2 * r : 2 * r + 3, 2 * q : 2 * q + 3] * w[:, 0]).sum((2, 3))
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options, weights", [
    ("num_output: 4", (4, 1, 3, 3)), ("num_output: 8", (8, 1, 3, 3)), ("num_output: 4 group: 4", (4, 1, 3, 3)),
    ("num_output: 6 group: 2", (6, 2, 3, 3)),
], ids=["outputs", "twice", "group", "other group"])  # fmt: skip
@pytest.mark.parametrize("type_", NAMES)
def test_what_is_given_counts(type_, options, weights):
    group = "" if "group" in options else "group: 4"
    one, other = net_of(type_, f"kernel_size: 3 {options}"), net_of("Convolution", f"kernel_size: 3 {options} {group}")
    assert one.params["c"][0].shape == weights
    for net in (one, other):
        net.blobs["x"].data[...] = np.random.default_rng(0).normal(size=(2, 4, 6, 5))
        net.params["c"][0].data[...] = np.random.default_rng(1).normal(size=weights)
        net.run_forward()
    np.testing.assert_array_equal(one.blobs["y"].cpu_data(), other.blobs["y"].cpu_data())


@pytest.mark.parametrize("options, message", [
    ("num_output: 6", "group: expected a divisor of 4 channels and of num_output 6, got 4"),
    ("axis: 7", "axis: expected an axis of blob 'x'"),
], ids=["outputs", "axis"])  # fmt: skip
def test_what_does_not_fit(options, message):
    with pytest.raises(NetError, match=rf"layer 'c' \(DepthwiseConvolution\), {message}"):
        net_of("DepthwiseConvolution", f"kernel_size: 3 {options}")
