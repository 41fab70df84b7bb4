"""SPP: what it is made of, its shapes and limits."""

import numpy as np
import pytest

from blobmem import TEST, TRAIN, NetError

SPP = 'layer { name: "l" type: "SPP" bottom: "x" top: "y" spp_param { %s } }'


def bins_of(x, count, reduce):
    """Bins of planes that the count divides evenly."""
    n, c, h, w = x.shape
    return reduce(x.reshape(n, c, count, h // count, count, w // count), axis=(3, 5)).reshape(n, -1)


@pytest.mark.parametrize("pool, reduce", [("MAX", np.max), ("AVE", np.mean)], ids=["MAX", "AVE"])
def test_levels_lie_one_after_another(layer_net, device, pool, reduce):
    net = layer_net(SPP % f"pyramid_height: 3 pool: {pool}", device=device, x=(2, 3, 8, 12))
    net.forward()
    x = net.blobs["x"].cpu_data()
    expected = np.concatenate([bins_of(x, count, reduce) for count in (1, 2, 4)], axis=1)
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), expected, rtol=1e-5, atol=1e-6)


def test_any_plane_gives_a_vector_of_one_length(layer_net):
    net = layer_net(SPP % "pyramid_height: 3", x=(2, 3, 8, 12))
    for plane in ((9, 10), (4, 7), (30, 31)):
        net.blobs["x"].reshape(2, 3, *plane)
        net.blobs["x"].data[...] = np.random.default_rng(0).normal(size=(2, 3, *plane))
        net.forward()
        y = net.blobs["y"].cpu_data()
        assert y.shape == (2, 63)
        np.testing.assert_array_equal(y[:, :3], net.blobs["x"].cpu_data().max((2, 3)))
        assert net.blobs["x"].cpu_data().max() == y[:, 3:15].max() == y[:, 15:].max(), "each level sees all"


def test_a_pyramid_of_height_1_is_a_pooling(layer_net):
    net = layer_net(SPP % "pyramid_height: 1", x=(2, 3, 5, 7))
    net.forward()
    assert net.blobs["y"].shape == (2, 3, 1, 1)
    np.testing.assert_array_equal(net.blobs["y"].cpu_data()[..., 0, 0], net.blobs["x"].cpu_data().max((2, 3)))


def test_stochastic(layer_net, device):
    text = SPP % "pyramid_height: 2 pool: STOCHASTIC"
    net = layer_net(text, TRAIN, device=device, x=(2, 3, 4, 6))
    net.blobs["x"].data[...] = np.random.default_rng(1).random((2, 3, 4, 6))
    results = [net.forward()["y"].copy() for _ in range(2)]
    assert (results[0] != results[1]).any()
    grad = net.backward(y=np.ones((2, 15)))["x"]
    assert grad.sum() == 30
    assert np.isin(results[1], net.blobs["x"].cpu_data()[grad > 0]).all()
    test = layer_net(text, TEST, device=device, force_backward=False, x=(2, 3, 4, 6))
    x = test.blobs["x"].data[...] = np.random.default_rng(1).random((2, 3, 4, 6)).astype(np.float32)
    expected = [bins_of(x**2, count, np.sum) / bins_of(x, count, np.sum) for count in (1, 2)]
    np.testing.assert_allclose(test.forward()["y"], np.concatenate(expected, axis=1), rtol=1e-5)


def test_no_array_but_the_top_and_the_mask(layer_net):
    net = layer_net(SPP % "pyramid_height: 3", x=(2, 3, 8, 8))
    assert list(net.internals) == ["l/mask"]
    assert [len(schedule.calls) for schedule in net.compiled()] == [1, 1]
    assert not layer_net(SPP % "pyramid_height: 3 pool: AVE", x=(2, 3, 8, 8)).internals


@pytest.mark.parametrize("shape, options, message", [
    pytest.param((2, 3, 5, 9), "pyramid_height: 3",
                 "pyramid_height: expected 2 or less, since 5 x 9 cannot be divided into 4 x 4 bins, got 3", id="height"),
    pytest.param((2, 3, 8, 8), "", "pyramid_height: expected 1 or more, got 0", id="none"),
    pytest.param((2, 3, 8, 9), "pyramid_height: 2 pool: STOCHASTIC",
                 "pool: expected MAX or AVE, since 2 x 2 bins over 8 x 9 need padding", id="stochastic"),
    pytest.param((2, 3, 8), "pyramid_height: 1", "bottom: expected 4 axes", id="axes"),
    pytest.param((2, 3, 0, 8), "pyramid_height: 1", "bottom: expected a height and a width of 1", id="empty"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, shape, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(SPP % options, x=shape)


def test_a_stochastic_test_net_has_no_gradient(layer_net):
    with pytest.raises(NetError, match="pool: expected phase TRAIN"):
        layer_net(SPP % "pyramid_height: 2 pool: STOCHASTIC", TEST, x=(2, 3, 4, 4)).compiled()
