"""Pooling: the sizes it gives, and every way to say the window."""

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda

from blobmem import TRAIN, NetError, SimulatedDevice

TEXT = 'layer { name: "l" type: "Pooling" bottom: "x" top: "y" pooling_param { %s } }'


@pytest.mark.parametrize("plane, options, expected", [
    pytest.param((6, 7), "kernel_size: 3 stride: 2", (3, 3), id="up by default"),
    pytest.param((6, 7), "kernel_size: 3 stride: 2 round_mode: CEIL", (3, 3), id="up"),
    pytest.param((6, 7), "kernel_size: 3 stride: 2 round_mode: FLOOR", (2, 3), id="down"),
    pytest.param((6, 7), "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 4", (5, 2), id="h and w"),
    pytest.param((6, 7), "kernel_size: 3 pad_h: 2 pad_w: 1 engine: CUDNN", (8, 7), id="pad"),
    pytest.param((6, 7), "global_pooling: true", (1, 1), id="global"),
    pytest.param((6, 6), "kernel_h: 3 kernel_w: 1 stride: 4", (2, 3), id="a window beyond the plane"),
    # with padding on either axis, Caffe leaves out windows beyond the plane on both
    pytest.param((6, 6), "kernel_h: 3 kernel_w: 1 stride: 4 pad_h: 1 pad_w: 0", (2, 2), id="none beyond with padding"),
])  # fmt: skip
def test_sizes(layer_net, plane, options, expected):
    net = layer_net(TEXT % options, x=(2, 3, *plane))
    assert net.forward()["y"].shape == (2, 3, *expected)


def test_global_pooling_follows_the_plane(layer_net):
    net = layer_net(TEXT % "pool: AVE global_pooling: true", x=(2, 3, 5, 7))
    for plane in ((5, 7), (9, 4)):
        net.blobs["x"].reshape(2, 3, *plane)
        x = net.blobs["x"].data[...] = np.random.default_rng(0).normal(size=(2, 3, *plane)).astype(np.float32)
        np.testing.assert_allclose(net.forward()["y"][..., 0, 0], x.mean((2, 3)), atol=1e-6)


@pytest.mark.parametrize("options, dtype", [
    pytest.param("kernel_h: 15 kernel_w: 17", np.uint8, id="255 places"),
    pytest.param("kernel_size: 16", np.int32, id="256 places"),
    pytest.param("kernel_size: 3 stride: 2 pool: STOCHASTIC", np.uint8, id="stochastic"),
    pytest.param("global_pooling: true", np.int32, id="global"),
])  # fmt: skip
def test_masks_are_in_bytes_where_these_will_do(layer_net, options, dtype):
    net = layer_net(TEXT % options, TRAIN, x=(2, 3, 16, 17))
    assert net.internals["l/mask"].dtype == dtype
    x = net.blobs["x"].data[...] = np.random.default_rng(0).random((2, 3, 16, 17)).astype(np.float32)
    y = net.forward()["y"]
    dx = net.backward(y=np.ones(y.shape))["x"]
    assert dx.sum() == y.size and np.isin(y, x[dx > 0]).all()


def test_a_second_top_has_places_in_the_plane(layer_net):
    net = layer_net(TEXT.replace('"y"', '"y" top: "m"') % "kernel_size: 2 stride: 2 pad: 1", x=(1, 1, 3, 4))
    assert net.internals["l/mask"].dtype == np.int32
    net.blobs["x"].data[...] = np.arange(12).reshape(1, 1, 3, 4)
    np.testing.assert_array_equal(net.forward()["m"], [[[[0, 2, 3], [8, 10, 11]]]])


@needs_compiler
def test_a_mask_that_was_kept_channels_last_reads_as_any(layer_net):
    last, found = EmulatedCuda(), []
    last.channels_last = True
    text = (
        'layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 8 kernel_size: 1'
        ' weight_filler { type: "gaussian" } } }' + TEXT.replace('"x"', '"c"') % "kernel_size: 3 stride: 2"
    )
    for device in (last, SimulatedDevice()):
        net = layer_net(text, device=device, x=(2, 3, 9, 7))
        net.blobs["x"].data[...] = np.random.default_rng(0).integers(-9, 9, (2, 3, 9, 7))
        net.params["c"][0].data[...] = np.random.default_rng(1).integers(-9, 9, (8, 3, 1, 1))
        net.forward()
        mask = net.internals["l/mask"]
        assert (mask.data_view.memory.reordered is not None) == (device is last)
        found.append(mask.cpu_data().copy())
    assert set(found[1].flat) == set(range(9))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("options, message", [
    pytest.param("", "kernel_size: expected 1 or more", id="none"),
    pytest.param("kernel_h: 3", "kernel_size: expected both kernel_h and kernel_w", id="half"),
    pytest.param("kernel_size: 3 kernel_h: 3 kernel_w: 3", "kernel_size: expected either kernel_size or", id="both"),
    pytest.param("kernel_size: 3 global_pooling: true", "kernel_size: expected none, since global_pooling", id="global"),
    pytest.param("pad: 1 global_pooling: true", "global_pooling: expected pad 0 and stride 1", id="padded global"),
    pytest.param("kernel_size: 3 stride: 0", "stride: expected 1 or more", id="stride"),
    pytest.param("kernel_size: 3 pad: 3", "pad: expected less than the window", id="pad"),
    pytest.param("kernel_size: 3 pad: 1 pool: STOCHASTIC", "pad: expected 0 for stochastic", id="stochastic"),
    pytest.param("kernel_size: 9 round_mode: FLOOR", "kernel_size: expected a window that fits into", id="too large"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(TEXT % options, x=(2, 3, 6, 7))
