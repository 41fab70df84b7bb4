"""BatchReindex, Embed and Filter."""

import numpy as np
import pytest

from blobmem import NetError

REINDEX = 'layer { name: "l" type: "BatchReindex" bottom: "x" bottom: "i" top: "y" }'
EMBED = 'layer { name: "words" type: "Embed" bottom: "i" top: "y" embed_param { num_output: 3 input_dim: 5 %s } }'
FILTER = 'layer { name: "f" type: "Filter" bottom: "x" bottom: "t" bottom: "s" top: "a" top: "b" }'


def test_batch_reindex(layer_net, device):
    net = layer_net(REINDEX, device=device, x=(4, 3, 2), i=(6,))
    index = [3, 0, 3, 3, 1, 0]
    net.blobs["i"].data[...] = index
    net.forward()
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), net.blobs["x"].cpu_data()[index])
    dy = np.random.default_rng(1).normal(size=(6, 3, 2)).astype(np.float32)
    expected = np.zeros((4, 3, 2))
    np.add.at(expected, index, dy)
    np.testing.assert_allclose(net.backward(y=dy)["x"], expected, rtol=1e-6)


@pytest.mark.parametrize("wrong", [4, -1, 0.5, np.nan], ids=str)
def test_an_index_of_no_item_names_the_layer(layer_net, device, wrong):
    net = layer_net(REINDEX, device=device, x=(4, 3), i=(2,))
    net.blobs["i"].data[...] = [0, wrong]
    with pytest.raises(NetError, match=rf"layer 'l': index {wrong:g} at place 1: expected a whole number from 0 to 3"):
        net.forward()


@pytest.mark.parametrize("options, params", [
    pytest.param("", 2, id="bias"),
    pytest.param("bias_term: false", 1, id="no bias"),
])  # fmt: skip
def test_embed(layer_net, device, options, params):
    fillers = 'weight_filler { type: "uniform" } bias_filler { type: "constant" value: 0.25 }'
    net = layer_net(EMBED % f"{options} {fillers}", device=device, i=(2, 4))
    assert [blob.shape for blob in net.params["words"]] == [(5, 3), (3,)][:params]
    index = np.array([[0, 4, 4, 2], [1, 1, 4, 0]])
    net.blobs["i"].data[...] = index
    net.forward()
    table = net.params["words"][0].cpu_data()
    assert table.std() > 0.1
    bias = 0.25 if params == 2 else 0
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), table[index] + bias, rtol=1e-6)
    dy = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)
    net.clear_param_diffs()
    for times in (1, 2):  # gradients of parameters add up
        net.backward(y=dy)
        expected = np.zeros((5, 3))
        np.add.at(expected, index, times * dy)
        np.testing.assert_allclose(net.params["words"][0].cpu_diff(), expected, rtol=1e-5)
        if params == 2:
            np.testing.assert_allclose(net.params["words"][1].cpu_diff(), times * dy.sum((0, 1)), rtol=1e-5)


def test_a_word_that_is_not_in_the_table(layer_net, device):
    net = layer_net(EMBED % "", device=device, i=(3,))
    net.blobs["i"].data[...] = [1, 5, 0]
    with pytest.raises(NetError, match="layer 'words': index 5 at place 1: expected a whole number from 0 to 4"):
        net.forward()


def filtered(net, selector):
    net.blobs["s"].data[...] = np.reshape(selector, net.blobs["s"].shape)
    net.forward()
    return [net.blobs[name].cpu_data() for name in "ab"]


@pytest.mark.parametrize("shape", [(5,), (5, 1, 1, 1)], ids=["flat", "with axes"])
def test_filter(layer_net, device, shape):
    net = layer_net(FILTER, device=device, x=(5, 2, 3), t=(5,), s=shape)
    assert net.blobs["a"].shape == (5, 2, 3), "the largest there can be"
    for selector in ([1, 0, -2, 0, 0.5], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]):
        kept = np.flatnonzero(selector)
        a, b = filtered(net, selector)
        np.testing.assert_array_equal(a, net.blobs["x"].cpu_data()[kept])
        np.testing.assert_array_equal(b, net.blobs["t"].cpu_data()[kept])
        da, db = np.ones_like(a) + kept[:, None, None], np.full_like(b, 3)
        net.blobs["x"].diff[...] = 99
        grads = net.backward(a=da, b=db)
        expected = np.zeros((5, 2, 3))
        expected[kept] = da
        np.testing.assert_array_equal(grads["x"], expected)
        np.testing.assert_array_equal(grads["t"], np.where(np.isin(np.arange(5), kept), 3, 0))


def test_filter_that_selects_nothing(layer_net, device):
    ip = 'layer { name: "ip" type: "InnerProduct" bottom: "a" top: "y" inner_product_param { num_output: 4 } }'
    net = layer_net(FILTER + ip, device=device, x=(3, 2, 2), t=(3,), s=(3,))
    assert filtered(net, [1, 0, 0])[0].shape == (1, 2, 2)
    net.backward()
    a, b = filtered(net, [0, 0, 0])
    assert a.shape == (0, 2, 2) and b.shape == (0,)
    assert net.blobs["y"].shape == (0, 4)
    net.blobs["x"].diff[...] = 99
    net.clear_param_diffs()
    assert not net.backward()["x"].any()
    assert not net.params["ip"][0].cpu_diff().any()
    assert filtered(net, [0, 1, 1])[0].shape == (2, 2, 2)
    assert net.blobs["y"].shape == (2, 4)


def test_filter_remembers_what_it_selected(layer_net, device):
    net = layer_net(FILTER, device=device, x=(3, 1), t=(3,), s=(3,))
    filtered(net, [0, 1, 0])
    net.blobs["s"].data[...] = [1, 0, 1]  # the next pass's
    assert net.backward(a=np.ones((1, 1)), b=np.ones(1))["x"].ravel().tolist() == [0, 1, 0]


def test_filter_settles(layer_net, device):
    """The same number of items again: nothing is allocated, or compiled anew."""
    net = layer_net(FILTER, device=device, x=(5, 2), t=(5,), s=(5,))
    filtered(net, [1, 0, 1, 0, 0])
    schedules, before = net.compiled(), device.statistics.snapshot()
    filtered(net, [0, 0, 0, 1, 1])
    assert net.compiled() is schedules
    assert (device.statistics - before).allocator_calls == 0


@pytest.mark.parametrize("text, shapes, message", [
    pytest.param(REINDEX, {"x": (4, 3), "i": (2, 1)}, "bottom: expected indices of 1 axis", id="axes of indices"),
    pytest.param(REINDEX, {"x": (), "i": (2,)}, "bottom: expected 1 axis or more, the first of items", id="scalar"),
    pytest.param(REINDEX.replace('"y"', '"x"'), {"x": (4,), "i": (2,)}, "top: expected another name", id="in place"),
    pytest.param(REINDEX.replace("top", "propagate_down: true propagate_down: true top"), {"x": (4,), "i": (2,)},
                 "propagate_down: expected false for the indices", id="gradient of indices"),
    pytest.param(EMBED.replace("input_dim: 5", "") % "", {"i": (2,)}, "input_dim: expected 1 or more, got 0", id="rows"),
    pytest.param(EMBED.replace("num_output: 3", "") % "", {"i": (2,)}, "num_output: expected 1 or more", id="outputs"),
    pytest.param(FILTER, {"x": (4, 3), "t": (4,), "s": (3,)}, "bottom: expected 3 items, as many", id="items"),
    pytest.param(FILTER, {"x": (4, 3), "t": (4,), "s": (4, 2)}, "bottom: expected one value for each", id="selector"),
    pytest.param(FILTER.replace('top: "b"', ""), {"x": (4,), "t": (4,), "s": (4,)}, "top: expected 2, one fewer",
                 id="tops"),
    pytest.param(FILTER.replace('"b"', '"t"'), {"x": (4,), "t": (4,), "s": (4,)}, "top: expected another name",
                 id="filter in place"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, text, shapes, message):
    with pytest.raises(NetError, match=message):
        layer_net(text, **shapes)
