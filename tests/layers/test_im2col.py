"""Im2col, and that a convolution is the product of its weights with it."""

import numpy as np
import pytest

from blobmem import NetError

TEXT = 'layer { name: "l" type: "Im2col" bottom: "x" top: "y" convolution_param { %s } }'
CONV = (
    'layer { name: "c" type: "Convolution" bottom: "x" top: "z" convolution_param { num_output: 4 bias_term: false '
    'weight_filler { type: "gaussian" } %s } }'
)


@pytest.mark.parametrize("shape, options", [
    pytest.param((2, 3, 6, 7), "kernel_size: 3", id="2d"),
    pytest.param((2, 3, 6, 7), "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 1 pad_w: 0", id="h and w"),
    pytest.param((2, 3, 9, 8), "kernel_size: 3 kernel_size: 2 dilation: 2 dilation: 3 pad: 1", id="dilation"),
    pytest.param((2, 3, 9), "kernel_size: 4 stride: 2 pad: 3", id="1d"),
    pytest.param((2, 3, 4, 5, 3), "kernel_size: 2 stride: 1 stride: 2 stride: 1 force_nd_im2col: true", id="3d"),
    pytest.param((2, 2, 3, 6, 7), "kernel_size: 3 axis: -3 engine: CAFFE", id="axis"),
])  # fmt: skip
def test_a_convolution_is_a_product_with_it(layer_net, device, shape, options):
    net = layer_net(TEXT % options + CONV % options, device=device, x=shape)
    net.forward()
    y, z, w = net.blobs["y"].cpu_data(), net.blobs["z"].cpu_data(), net.params["c"][0].cpu_data()
    axis = 2 if "axis" in options else 1
    assert y.shape == (*shape[:axis], w[0].size, *z.shape[axis + 1 :])
    columns = np.moveaxis(y, axis, -1)
    np.testing.assert_allclose(np.moveaxis(z, axis, -1), columns @ w.reshape(4, -1).T, atol=1e-5)


@pytest.mark.parametrize("shape, options, message", [
    pytest.param((2, 3), "kernel_size: 1", "axis: expected an axis of .* with others after it", id="no spatial axis"),
    pytest.param((2, 3, 4, 4), "kernel_size: 5", "kernel_size: expected a window that fits", id="too large"),
    pytest.param((2, 3, 4, 4), "", "kernel_size: expected a value", id="none"),
    pytest.param((2, 3, 4, 4), "kernel_size: 2 stride: 0", "stride: expected values of 1 or more", id="stride"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, shape, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(TEXT % options, x=shape)


def test_another_number_of_axes_later(layer_net):
    net = layer_net(TEXT % "kernel_size: 2", x=(2, 3, 4, 4))
    net.blobs["x"].reshape(2, 3, 4)
    with pytest.raises(NetError, match="bottom: expected 2 axes after axis 1"):
        net.forward()
