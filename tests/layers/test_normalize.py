"""Normalize: values by hand, its scale, in place, files, what it refuses."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError
from blobmem.devices import HOST


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def normalize(options="", shape=(1, 2, 1, 2), top="y", phase=TEST, device=HOST):
    dims = " ".join(f"dim: {d}" for d in shape)
    text = f'layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {dims} }} }} }}\n'
    text += f'layer {{ name: "n" type: "Normalize" bottom: "x" top: "{top}" norm_param {{ {options} }} }}'
    return Net(text, phase, device=device, seed=1)


@pytest.mark.parametrize("options, scale, expected", [
    ("", (), [[0.3, 0.1], [0.4, np.sqrt(0.74)]]),
    ("across_spatial: false", (), [[0.6, 0.1 / np.sqrt(0.75)], [0.8, np.sqrt(0.74 / 0.75)]]),
    ("across_spatial: false channel_shared: false", [1, 2], [[0.6, 0.1 / np.sqrt(0.75)], [1.6, 2 * np.sqrt(0.74 / 0.75)]]),
    ('scale_filler { type: "constant" value: 20 }', (), [[6, 2], [8, 20 * np.sqrt(0.74)]]),
    ("eps: 3", (), [[0.15, 0.05], [0.2, np.sqrt(0.74) / 2]]),
], ids=["item", "place", "channels", "filler", "eps"])  # fmt: skip
@pytest.mark.parametrize("top", ["y", "x"], ids=["apart", "in place"])
def test_values(options, scale, expected, top, device):
    net = normalize(options, top=top, device=device)
    if len(scale):
        net.params["n"][0].data[...] = scale
    net.blobs["x"].data[0, :, 0] = [[0.3, 0.1], [0.4, np.sqrt(0.74)]]
    net.run_forward()
    np.testing.assert_allclose(net.blobs[top].cpu_data()[0, :, 0], expected, rtol=1e-5)


def test_the_scale_is_one_number_or_one_for_each_channel():
    assert normalize().params["n"][0].shape == ()
    assert normalize("channel_shared: false").params["n"][0].shape == (2,)
    assert normalize().params["n"][0].cpu_data() == 1


def test_the_scale_is_kept_in_files(tmp_path):
    net = normalize()
    net.params["n"][0].data[...] = 7
    net.save(tmp_path / "net.caffemodel")
    again = normalize()
    again.copy_trained_layers_from(tmp_path / "net.caffemodel")
    assert again.params["n"][0].cpu_data() == 7


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 3, 2, 2, 2)], ids=["2 axes", "3 axes", "5 axes"])
def test_other_numbers_of_axes(shape):
    x = np.random.default_rng(0).normal(size=shape)
    for options, axes in (("", tuple(range(1, len(shape)))), ("across_spatial: false", 1)):
        net = normalize(options, shape)
        net.blobs["x"].data[...] = x
        net.run_forward()
        np.testing.assert_allclose(net.blobs["y"].cpu_data(), x / np.sqrt((x**2).sum(axes, keepdims=True)), rtol=1e-5)


def test_a_test_net_keeps_nothing_for_backward():
    net = normalize(phase=TEST)
    net.run_forward()
    assert net.internals["n/norm"].data_view.memory.cpu_capacity == 0


def test_a_solver_may_learn_it():
    text = """
        layer { name: "x" type: "Input" top: "x" top: "t" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 dim: 3 } } }
        layer { name: "n" type: "Normalize" bottom: "x" top: "y" norm_param { channel_shared: false } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }"""
    net = Net(text, TRAIN, seed=1)
    net.blobs["x"].data[...] = [[3, 4, 0], [0, 5, 12]]
    net.run_forward()
    net.run_backward()
    # y / 2 times y / scale, summed over the batch
    expected = [0.18, (0.64 + 25 / 169) / 2, 144 / 338]
    np.testing.assert_allclose(net.params["n"][0].cpu_diff(), expected, rtol=1e-5)


@pytest.mark.parametrize("case, message", [
    ({"shape": (3,)}, "bottom: expected 2 axes or more"),
    ({"options": "eps: -1"}, "eps: expected 0 or more, got -1"),
], ids=["axes", "eps"])  # fmt: skip
def test_what_does_not_fit(case, message):
    with pytest.raises(NetError, match=rf"layer 'n' \(Normalize\), {message}"):
        normalize(**case)


def test_another_number_of_channels():
    net = normalize("channel_shared: false")
    net.blobs["x"].reshape(1, 3, 1, 2)
    with pytest.raises(NetError, match="bottom: expected 2 channels on axis 1, got blob 'x'"):
        net.run_forward()
    shared = normalize()
    shared.blobs["x"].reshape(1, 3, 1, 2)
    shared.run_forward()
    assert shared.blobs["y"].shape == (1, 3, 1, 2)
