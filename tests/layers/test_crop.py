"""Crop."""

import numpy as np
import pytest

from blobmem import NetError

CROP = 'layer { name: "l" type: "Crop" bottom: "x" bottom: "z" top: "y" crop_param { %s } }'


@pytest.mark.parametrize("x, z, options, inside", [
    pytest.param((2, 3, 7, 8), (2, 3, 4, 5), "", np.s_[:, :, :4, :5], id="no offset"),
    pytest.param((2, 3, 7, 8), (9, 9, 4, 5), "offset: 3", np.s_[:, :, 3:7, 3:8], id="one offset"),
    pytest.param((2, 3, 7, 8), (1, 1, 4, 5), "offset: 0 offset: 2", np.s_[:, :, :4, 2:7], id="offset each"),
    pytest.param((2, 5, 7), (1, 3, 4), "axis: 1 offset: 2 offset: 1", np.s_[:, 2:5, 1:5], id="axis"),
    pytest.param((2, 5, 7), (1, 3, 4), "axis: -1 offset: 2", np.s_[:, :, 2:6], id="axis from the end"),
    pytest.param((4, 5), (2, 3, 6), "axis: 0 offset: 1", np.s_[1:3, 1:4], id="more axes in the second"),
    pytest.param((2, 2, 3, 3, 3), (2, 2, 1, 2, 3), "offset: 2 offset: 1 offset: 0", np.s_[:, :, 2:, 1:, :], id="5 axes"),
])  # fmt: skip
def test_crop(layer_net, device, x, z, options, inside):
    net = layer_net(CROP % options, device=device, x=x, z=z)
    net.forward()
    y = net.blobs["y"].cpu_data()
    np.testing.assert_array_equal(y, net.blobs["x"].cpu_data()[inside])
    expected = np.zeros(x)
    expected[inside] = y
    np.testing.assert_array_equal(net.backward(y=y)["x"], expected)
    assert not net.blobs["z"].cpu_diff().any()


def test_crop_follows_its_bottoms(layer_net):
    net = layer_net(CROP % "offset: 1", x=(1, 1, 7, 8), z=(1, 1, 4, 5))
    net.blobs["z"].reshape(1, 1, 2, 7)
    net.forward()
    assert net.blobs["y"].shape == (1, 1, 2, 7)


@pytest.mark.parametrize("x, z, options, message", [
    pytest.param((2, 3, 7, 8), (2, 3, 4, 5), "axis: 4", "axis: expected an axis of", id="axis"),
    pytest.param((2, 3, 7, 8), (2, 3, 4, 5), "axis: 1 offset: 1 offset: 1", "offset: expected none, 1 or 3", id="count"),
    pytest.param((2, 3, 7, 8), (2, 3, 4, 5), "offset: 3 offset: 4",
                 "offset: expected a part within .*, got 5 values from 4 on, on axis 3", id="beyond"),
    pytest.param((2, 3, 7, 8), (2, 3, 4), "", "bottom: expected a size for each of 4 axes", id="axes"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, x, z, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(CROP % options, x=x, z=z)
