"""pycaffe's face of a net: whole data sets, names, callbacks."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net

NET = """
name: "squares" force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 3 dim: 2 } } }
layer { name: "square" type: "Power" bottom: "x" top: "y" power_param { power: 2 } }
layer { name: "sum" type: "InnerProduct" bottom: "y" top: "z"
  inner_product_param { num_output: 1 bias_term: false weight_filler { type: "constant" value: 1 } } }
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_forward_all_takes_any_number_of_items(device, count):
    net = Net(NET, TEST, device=device)
    x = np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)
    out = net.forward_all(blobs=["y"], x=x)
    np.testing.assert_allclose(out["y"], x**2, rtol=1e-6)
    np.testing.assert_allclose(out["z"][:, 0], (x**2).sum(1), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 7])
def test_forward_backward_all(device, count):
    net = Net(NET, TRAIN, device=device)
    rng = np.random.default_rng(0)
    x, dz = rng.normal(size=(count, 2)).astype(np.float32), rng.normal(size=(count, 1)).astype(np.float32)
    outs, grads = net.forward_backward_all(blobs=["y"], diffs=["y"], x=x, z=dz)
    np.testing.assert_allclose(outs["y"], x**2, rtol=1e-6)
    np.testing.assert_allclose(grads["y"], np.broadcast_to(dz, x.shape), rtol=1e-6)
    np.testing.assert_allclose(grads["x"], 2 * x * dz, rtol=1e-5)


def test_forward_all_says_what_it_takes():
    net = Net(NET, TEST)
    with pytest.raises(ValueError, match="arrays of one length for x"):
        net.forward_all(x=np.ones((2, 2)), y=np.ones((3, 2)))
    with pytest.raises(ValueError, match="inputs of this net are x; got q"):
        net.forward_all(q=np.ones((2, 2)))
    with pytest.raises(ValueError, match="'x' has shape"):
        net.forward_all(x=np.ones((2, 5)))


def test_layers_and_loss_weights_by_name():
    text = NET + 'layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "z" top: "loss" loss_weight: 5 }'
    net = Net(text, TRAIN)
    assert list(net.layer_dict) == net._layer_names == ["in", "square", "sum", "z_sum_0_split", "loss"]
    assert net.layer_dict["sum"].blobs[0] is net.params["sum"][0]
    assert net.blob_loss_weights == {name: 5.0 if name == "loss" else 0.0 for name in net._blob_names}


def test_blobs_by_position():
    net = Net(NET, TRAIN)
    assert [blob is net.blobs[name] for blob, name in zip(net._blobs, net._blob_names, strict=True)] == [True] * 3
    assert (net._inputs, net._outputs) == ([0], [2])
    assert (net._bottom_ids(0), net._top_ids(0), net._bottom_ids(2), net._top_ids(2)) == ([], [0], [1], [2])
    assert net._blob_loss_weights == [0, 0, 0]


def test_positions_and_levels_in_the_order_of_pycaffe():
    staged = NET + 'layer { name: "extra" type: "Silence" bottom: "z" include { min_level: 1 stage: "A" } }'
    assert "extra" not in Net(staged, TEST).layer_dict
    assert "extra" in Net(staged, TEST, 1, ["A"], None).layer_dict
    assert "extra" in Net(staged, TEST, level=1, stages=["A"]).layer_dict
    with pytest.raises(TypeError, match="does not fit"):
        Net(staged, TEST, 1, 2)


def test_callbacks_run_around_each_layer(device):
    net = Net(NET, TRAIN, device=device)
    seen = []
    net.before_forward(lambda index: seen.append(("before", index)))
    net.after_forward(lambda index: seen.append(("after", index)))
    net.before_backward(lambda index: seen.append(("before back", index)))
    net.after_backward(lambda index: seen.append(("after back", index)))
    net.forward(start="square", x=np.ones((3, 2)))
    assert seen == [("before", 1), ("after", 1), ("before", 2), ("after", 2)]
    seen.clear()
    net.backward()
    assert seen == [(f"{when} back", index) for index in (2, 1, 0) for when in ("before", "after")]


def test_a_callback_may_change_what_the_next_layer_reads(device):
    net = Net(NET, TEST, device=device)

    def double(index):
        if net._layer_names[index] == "square":
            net.blobs["y"].data[...] *= 2

    net.after_forward(double)
    assert net.forward(x=np.ones((3, 2)))["z"].ravel().tolist() == [4, 4, 4]
