"""MVN: shapes, statistics, and what its gradient needs."""

import numpy as np
import pytest

MVN = 'layer { name: "l" type: "MVN" bottom: "x" top: "y" mvn_param { %s } }'


def normalized(x, axes, eps=1e-9, scaled=True):
    x = x.astype(np.float64)
    x = x - x.mean(axes, keepdims=True)
    return x / (np.sqrt((x**2).mean(axes, keepdims=True)) + eps) if scaled else x


@pytest.mark.parametrize("options, axes, expected", [
    pytest.param("", (2, 3), {}, id="default"),
    pytest.param("across_channels: true", (1, 2, 3), {}, id="across"),
    pytest.param("normalize_variance: false", (2, 3), {"scaled": False}, id="mean"),
    pytest.param("normalize_variance: false across_channels: true", (1, 2, 3), {"scaled": False}, id="mean across"),
    pytest.param("eps: 2.5", (2, 3), {"eps": 2.5}, id="eps"),
])  # fmt: skip
def test_mvn(layer_net, device, options, axes, expected):
    net = layer_net(MVN % options, device=device, x=(2, 3, 4, 5))
    net.forward()
    wanted = normalized(net.blobs["x"].cpu_data(), axes, **expected)
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), wanted, atol=1e-5)


@pytest.mark.parametrize("shape, axes", [((3, 4), ()), ((3, 4, 5), (2,)), ((2, 3, 2, 2, 2), (2, 3, 4))], ids=str)
def test_other_numbers_of_axes(layer_net, shape, axes):
    net = layer_net(MVN % "normalize_variance: false", x=shape)
    net.forward()
    y = net.blobs["y"].cpu_data()
    assert y.shape == shape + (1,) * (4 - len(shape)), "four axes or more, as in Caffe"
    x = net.blobs["x"].cpu_data()
    wanted = normalized(x, axes, scaled=False) if axes else np.zeros(shape)
    np.testing.assert_allclose(y.reshape(shape), wanted, atol=1e-6)


CHAIN = """
layer { name: "p" type: "Power" bottom: "x" top: "a" power_param { scale: 2 shift: 1 } }
layer { name: "m" type: "MVN" bottom: "a" top: "%s" }
layer { name: "r" type: "ReLU" bottom: "%s" top: "%s" }
layer { name: "out" type: "Power" bottom: "%s" top: "out" }
"""


@pytest.mark.parametrize("mvn, relu", [("a", "r"), ("m", "m"), ("a", "a")], ids=["itself", "the next", "both"])
def test_in_place_the_gradient_is_the_same(layer_net, mvn, relu):
    results = []
    for one, two in (("m", "r"), (mvn, relu)):
        net = layer_net(CHAIN % (one, one, two, two), dtype=np.float64, x=(2, 3, 4, 5))
        net.forward()
        results.append((net.blobs["out"].cpu_data(), net.backward(out=np.arange(120).reshape(2, 3, 4, 5))["x"]))
    for one, other in zip(*results, strict=True):
        assert np.abs(one).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_only_a_gradient_in_place_needs_a_copy(layer_net):
    in_place = MVN.replace('"y"', '"x"')
    assert list(layer_net(in_place % "", x=(2, 3, 4, 5)).internals) == ["l/bottom"]
    assert not layer_net(in_place % "normalize_variance: false", x=(2, 3, 4, 5)).internals
    assert not layer_net(MVN % "", x=(2, 3, 4, 5)).internals
