"""Convolution and Deconvolution: every way to say the window, and no spatial axes at all."""

import numpy as np
import pytest

from blobmem import NetError

TEXT = (
    'layer { name: "%s" type: "%s" bottom: "x" top: "%s" convolution_param { num_output: 4 '
    'weight_filler { type: "gaussian" } bias_filler { type: "constant" value: 0.5 } %s } }\n'
)


def pair(type_, one, other):
    return TEXT % ("a", type_, "ya", one) + TEXT % ("b", type_, "yb", other)


@pytest.mark.parametrize("type_", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("one, other", [
    pytest.param("kernel_h: 2 kernel_w: 3", "kernel_size: 2 kernel_size: 3", id="kernel"),
    pytest.param("kernel_size: 3 stride_h: 1 stride_w: 2", "kernel_size: 3 stride: 1 stride: 2", id="stride"),
    pytest.param("kernel_size: 3 pad_h: 2 pad_w: 1", "kernel_size: 3 pad: 2 pad: 1", id="pad"),
    pytest.param("kernel_size: 3 pad_w: 1", "kernel_size: 3 pad: 0 pad: 1", id="one pad"),
    pytest.param("kernel_size: 2 stride: 2 pad: 1 dilation: 2",
                 "kernel_size: 2 kernel_size: 2 stride: 2 stride: 2 pad: 1 pad: 1 dilation: 2 dilation: 2", id="once"),
    pytest.param("kernel_size: 3 force_nd_im2col: true engine: CUDNN", "kernel_size: 3 engine: CAFFE", id="engine"),
    pytest.param("kernel_size: 3 axis: -3", "kernel_size: 3 axis: 1", id="axis"),
])  # fmt: skip
def test_two_ways_to_say_the_same(layer_net, type_, one, other):
    net = layer_net(pair(type_, one, other), x=(2, 3, 7, 8))
    for blob, values in zip(net.params["b"], net.params["a"], strict=True):
        blob.data[...] = values.cpu_data()
    net.forward()
    np.testing.assert_array_equal(net.blobs["ya"].cpu_data(), net.blobs["yb"].cpu_data())


@pytest.mark.parametrize("shape, options", [((5, 6), ""), ((2, 3, 4, 6), "axis: 3 kernel_size: 7")], ids=["rows", "4d"])
@pytest.mark.parametrize("type_", ["Convolution", "Deconvolution"])
def test_without_spatial_axes_it_is_an_inner_product(layer_net, device, type_, shape, options):
    net = layer_net(TEXT % ("a", type_, "y", f"{options} group: 2"), device=device, x=shape)
    net.forward()
    x, w = net.blobs["x"].cpu_data(), net.params["a"][0].cpu_data()
    assert w.shape == ((4, 3) if type_ == "Convolution" else (6, 2))
    groups = [g if type_ == "Convolution" else g.T for g in np.split(w, 2)]
    expected = np.concatenate([part @ g.T for part, g in zip(np.split(x, 2, -1), groups, strict=True)], -1)
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), expected + 0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options, message", [
    pytest.param("", "kernel_size: expected a value", id="none"),
    pytest.param("kernel_size: 3 kernel_h: 3 kernel_w: 3", "kernel_size: expected either kernel_size or", id="both"),
    pytest.param("kernel_h: 3", "kernel_size: expected both kernel_h and kernel_w", id="half"),
    pytest.param("kernel_size: 0", "kernel_size: expected values of 1 or more", id="zero"),
    pytest.param("kernel_size: 3 stride: 0", "stride: expected values of 1 or more", id="stride"),
    pytest.param("kernel_size: 3 stride_h: 2", "stride: expected values of 1 or more", id="half a stride"),
    pytest.param("kernel_size: 3 dilation: 0", "dilation: expected values of 1 or more", id="dilation"),
    pytest.param("kernel_size: 3 pad: 1 pad: 1 pad: 1", "pad: expected 1 value or 2, one for each", id="count"),
    pytest.param("kernel_size: 9", "kernel_size: expected a window that fits into", id="too large"),
    pytest.param("kernel_size: 3 group: 2", "group: expected a divisor of 3 channels", id="group"),
    pytest.param("kernel_size: 3 axis: 4", "axis: expected an axis of", id="axis"),
    pytest.param("axis: 2 kernel_h: 3 kernel_w: 3", "kernel_h: expected kernel_size with one value", id="h and w in 1d"),
])  # fmt: skip
def test_what_does_not_fit_is_said(layer_net, options, message):
    with pytest.raises(NetError, match=message):
        layer_net(TEXT % ("a", "Convolution", "y", options), x=(2, 3, 7, 8))


def test_outputs_have_to_be_said(layer_net):
    with pytest.raises(NetError, match="num_output: expected 1 or more, got 0"):
        layer_net(TEXT.replace("num_output: 4", "") % ("a", "Convolution", "y", "kernel_size: 3"), x=(2, 3, 7, 8))
