"""Accuracy and ArgMax: their options, and what they refuse."""

import numpy as np
import pytest

from blobmem import NetError

ACCURACY = 'layer { name: "top" type: "Accuracy" bottom: "x" bottom: "t" top: "y" accuracy_param { %s } }'
ARGMAX = 'layer { name: "l" type: "ArgMax" bottom: "x" top: "y" argmax_param { %s } }'


@pytest.mark.parametrize("options, expected", [
    pytest.param("", 0.25, id="default"),
    pytest.param("top_k: 2", 0.75, id="top_k"),
    pytest.param("ignore_label: 1", 1 / 3, id="ignore_label"),
    pytest.param("axis: -1 ignore_label: 0", 0, id="axis"),
])  # fmt: skip
def test_accuracy(layer_net, device, options, expected):
    net = layer_net(ACCURACY % options, device=device, x=(4, 3), t=(4,))
    net.blobs["x"].data[...] = [[3, 2, 1]] * 4
    net.blobs["t"].data[...] = [0, 1, 2, 2] if "top_k" not in options else [0, 1, 2, 1]
    assert net.forward()["y"] == pytest.approx(expected)


def test_a_label_that_is_no_class_names_the_layer(layer_net, device):
    net = layer_net(ACCURACY % "", device=device, x=(4, 3), t=(4,))
    net.blobs["t"].data[...] = [0, 1, 3, 2]
    with pytest.raises(NetError, match="layer 'top': label 3 of item 2 is no class"):
        net.forward()


@pytest.mark.parametrize("options, shape", [
    pytest.param("", (4, 1, 1), id="default"),
    pytest.param("top_k: 3", (4, 1, 3), id="top_k"),
    pytest.param("out_max_val: true top_k: 2", (4, 2, 2), id="values"),
    pytest.param("axis: 1 top_k: 2", (4, 2, 5), id="axis"),
    pytest.param("axis: -1 out_max_val: true", (4, 3, 1), id="values along an axis"),
])  # fmt: skip
def test_argmax(layer_net, options, shape):
    net = layer_net(ARGMAX % options, x=(4, 3, 5))
    y, x = net.forward()["y"], net.blobs["x"].cpu_data()
    assert y.shape == shape
    if "axis: -1" in options:
        np.testing.assert_array_equal(y[..., 0], x.max(2))
    elif "axis" in options:
        np.testing.assert_array_equal(y, np.argsort(-x, axis=1)[:, :2])
    else:
        np.testing.assert_array_equal(y[:, 0, 0], x.reshape(4, -1).argmax(1))


def test_fewer_values_later(layer_net):
    net = layer_net(ARGMAX % "axis: 2 top_k: 4", x=(4, 3, 5))
    net.blobs["x"].reshape(4, 3, 2)
    with pytest.raises(NetError, match="top_k: expected 1 to 2, got 4"):
        net.forward()
