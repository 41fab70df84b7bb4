"""Parameter: a learned blob."""

import numpy as np
import pytest

from blobmem import TEST, NetError, build_nets

TEXT = 'layer { name: "w" type: "Parameter" top: "w" %s parameter_param { shape { dim: 2 dim: 3 } } }\n'
SUM = 'layer { name: "e" type: "Eltwise" bottom: "x" bottom: "w" top: "y" }\n'


def test_values_and_gradients(layer_net, device):
    net = layer_net(TEXT % "" + SUM, device=device, x=(2, 3))
    (param,) = net.params["w"]
    param.data[...] = 5
    net.forward()
    assert net.blobs["w"].shape == (2, 3) and (net.blobs["w"].cpu_data() == 5).all()
    net.clear_param_diffs()
    dy = np.arange(6).reshape(2, 3)
    for times in (1, 2):  # gradients of parameters add up
        net.backward(y=dy)
        np.testing.assert_array_equal(param.cpu_diff(), times * dy)


def test_a_layer_in_place_does_not_change_the_parameter(layer_net):
    text = TEXT % "" + 'layer { name: "p" type: "Power" bottom: "w" top: "w" power_param { scale: 3 } }' + SUM
    net = layer_net(text, x=(2, 3))
    net.params["w"][0].data[...] = 5
    for _ in range(2):
        net.forward()
        assert (net.blobs["w"].cpu_data() == 15).all()
    assert (net.params["w"][0].cpu_data() == 5).all()
    net.clear_param_diffs()
    net.backward(y=np.ones((2, 3)))
    assert (net.params["w"][0].cpu_diff() == 3).all()


def test_shared_parameters(layer_net):
    shared = [TEXT % 'param { name: "one" }', (TEXT % 'param { name: "one" }').replace('"w"', '"v"')]
    net = layer_net("".join(shared) + SUM.replace('"x"', '"v"'))
    net.params["w"][0].data[...] = 5
    assert (net.forward()["y"] == 10).all()
    net.clear_param_diffs()
    net.backward(y=np.ones((2, 3)))
    assert (net.params["w"][0].cpu_diff() == 2).all()


def test_train_and_test_nets_share_it():
    model = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }\n' + TEXT % "" + SUM
    nets = build_nets(model, seed=1)
    train, test = nets.train, nets.tests[0]
    train.params["w"][0].data[...] = 7
    for net in (test, train, test):
        net.blobs["x"].data[...] = 1
        assert (net.forward()["y"] == 8).all()
    assert test.phase == TEST


@pytest.mark.parametrize("rate, calls", [(0, 0), (1, 1)], ids=["frozen", "learned"])
def test_only_a_learned_one_has_a_gradient(layer_net, rate, calls):
    loss = 'layer { name: "l" type: "EuclideanLoss" bottom: "x" bottom: "w" top: "l" }'
    net = layer_net(TEXT % f"param {{ lr_mult: {rate} }}" + loss, force_backward=False, x=(2, 3))
    assert [call.layer_name for call in net.compiled()[1].calls].count("w") == calls


def test_what_does_not_fit_is_said(layer_net):
    with pytest.raises(NetError, match="bottom: expected 0, got 1"):
        layer_net(TEXT % 'bottom: "x"', x=(2, 3))
    with pytest.raises(NetError, match="layer 'w'.*negative"):
        layer_net((TEXT % "").replace("dim: 3", "dim: -3"))
