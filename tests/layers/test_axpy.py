"""Axpy: scale * x + y, its gradients, what it refuses."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, NetError
from blobmem.devices import HOST

RNG = np.random.default_rng(0)
S, X, Y, D = (RNG.normal(size=shape) for shape in ((2, 3), *[(2, 3, 4, 5)] * 3))


def net_of(
    scale="dim: 2 dim: 3", x="dim: 2 dim: 3 dim: 4 dim: 5", y="dim: 2 dim: 3 dim: 4 dim: 5", top="z", device=HOST
):
    text = f"""
        force_backward: true
        layer {{ name: "in" type: "Input" top: "s" top: "x" top: "y"
          input_param {{ shape {{ {scale} }} shape {{ {x} }} shape {{ {y} }} }} }}
        layer {{ name: "l" type: "Axpy" bottom: "s" bottom: "x" bottom: "y" top: "{top}" }}
    """
    net = Net(text, TRAIN, dtype=np.float64, device=device)
    for name, values in (("s", S), ("x", X), ("y", Y)):
        net.blobs[name].data.flat[:] = values.ravel()
    return net


@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("scale", ["dim: 2 dim: 3", "dim: 2 dim: 3 dim: 1 dim: 1"], ids=["flat", "of ones"])
def test_values_and_gradients(scale, make_device):
    net = net_of(scale, device=make_device())
    net.run_forward()
    wide = S[:, :, None, None]
    np.testing.assert_allclose(net.blobs["z"].cpu_data(), wide * X + Y, rtol=1e-12)
    net.blobs["z"].diff[...] = D
    net.run_backward()
    np.testing.assert_allclose(net.blobs["s"].cpu_diff().ravel(), (D * X).sum((2, 3)).ravel(), rtol=1e-12)
    np.testing.assert_allclose(net.blobs["x"].cpu_diff(), wide * D, rtol=1e-12)
    np.testing.assert_array_equal(net.blobs["y"].cpu_diff(), D)


@pytest.mark.parametrize("arguments, message", [
    ({"scale": "dim: 2"}, "bottom: expected a scale for each channel of x"),
    ({"scale": "dim: 2 dim: 4"}, "bottom: expected a scale for each channel of x"),
    ({"scale": "dim: 2 dim: 3 dim: 4 dim: 5"}, "bottom: expected a scale for each channel of x"),
    ({"y": "dim: 2 dim: 3 dim: 5 dim: 4"}, "bottom: expected y of the shape of x"),
    ({"x": "dim: 6", "y": "dim: 6"}, "bottom: expected x of 2 axes or more"),
    ({"top": "s"}, "top: expected another name than the bottoms'"),
], ids=["axes", "channels", "planes", "y", "x", "in place"])  # fmt: skip
def test_what_does_not_fit_is_said(arguments, message):
    with pytest.raises(NetError, match=rf"layer 'l' \(Axpy\), {message}"):
        net_of(**arguments)
