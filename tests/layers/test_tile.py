"""Tile."""

import numpy as np
import pytest

from blobmem import NetError

TILE = 'layer { name: "l" type: "Tile" bottom: "x" top: "y" tile_param { %s } }'


@pytest.mark.parametrize("axis", [0, 1, 2, -1, None])
def test_tile(layer_net, device, axis):
    options = "tiles: 3" + (f" axis: {axis}" if axis is not None else "")
    net = layer_net(TILE % options, device=device, x=(2, 3, 4))
    net.forward()
    axis = 1 if axis is None else axis % 3
    times = [3 if i == axis else 1 for i in range(3)]
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), np.tile(net.blobs["x"].cpu_data(), times))
    dy = np.random.default_rng(1).normal(size=net.blobs["y"].shape).astype(np.float32)
    expected = sum(np.split(dy, 3, axis))
    np.testing.assert_allclose(net.backward(y=dy)["x"], expected, rtol=1e-5, atol=1e-6)


def test_one_tile_moves_no_byte(layer_net):
    net = layer_net(TILE % "tiles: 1", x=(2, 3))
    forward, backward = net.compiled()
    assert not forward.calls and not backward.calls
    net.forward()
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), net.blobs["x"].cpu_data())
    assert (net.backward(y=np.full((2, 3), 2))["x"] == 2).all()


@pytest.mark.parametrize("options, message", [
    ("", "tiles: expected 1 or more, got 0"),
    ("tiles: -2", "tiles: expected 1 or more, got -2"),
    ("tiles: 2 axis: 2", "axis: expected an axis of"),
], ids=["none", "negative", "axis"])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(TILE % options, x=(2, 3))
