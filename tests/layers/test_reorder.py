"""Permute and ShuffleChannel: where values go, what moves no byte, what is refused."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, NetError
from blobmem.devices import HOST


def net_of(type_, options="", shape=(2, 6, 3, 4), top="y", device=HOST):
    dims = " ".join(f"dim: {dim}" for dim in shape)
    text = f"""
        force_backward: true
        layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ {dims} }} }} }}
        layer {{ name: "l" type: "{type_}" bottom: "x" top: "{top}" {options} }}
    """
    net = Net(text, TRAIN, device=device)
    net.blobs["x"].data[...] = np.arange(np.prod(shape)).reshape(shape)
    return net


def permute(*order):
    return f"permute_param {{ {' '.join(f'order: {axis}' for axis in order)} }}"


@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("shape, given, order", [
    ((2, 6, 3, 4), (0, 2, 3, 1), (0, 2, 3, 1)), ((2, 6, 3, 4), (3,), (3, 0, 1, 2)), ((5, 3), (1, 0), (1, 0)),
    ((2, 3, 2, 3, 2), (4, 2), (4, 2, 0, 1, 3)),
], ids=["last", "first", "two", "five"])  # fmt: skip
def test_permute(shape, given, order, make_device):
    net = net_of("Permute", permute(*given), shape, device=make_device())
    net.run_forward()
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), x.transpose(order))
    net.blobs["y"].diff[...] = x.transpose(order)
    net.run_backward()
    np.testing.assert_array_equal(net.blobs["x"].cpu_diff(), x)


def test_shuffle_channel():
    net = net_of("ShuffleChannel", "shuffle_channel_param { group: 3 }")
    net.run_forward()
    x = net.blobs["x"].cpu_data()
    order = [0, 2, 4, 1, 3, 5]  # groups (0, 1), (2, 3), (4, 5)
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), x[:, order])
    net.blobs["y"].diff[...] = x[:, order]
    net.run_backward()
    np.testing.assert_array_equal(net.blobs["x"].cpu_diff(), x)


@pytest.mark.parametrize("type_, options", [
    ("Permute", ""), ("Permute", permute(0, 1)), ("ShuffleChannel", ""),
], ids=["nothing", "same", "one group"])  # fmt: skip
def test_the_same_order_moves_no_byte(type_, options):
    net = net_of(type_, options)
    forward, backward = net.compiled()
    assert not forward.calls and not backward.calls
    assert net.blobs["y"].data_view == net.blobs["x"].data_view
    assert net.blobs["y"].diff_view == net.blobs["x"].diff_view


@pytest.mark.parametrize("type_, options", [
    ("Permute", permute(0, 2, 3, 1)), ("ShuffleChannel", "shuffle_channel_param { group: 2 }"),
], ids=["permute", "shuffle"])  # fmt: skip
def test_another_batch(type_, options):
    net = net_of(type_, options)
    net.run_forward()
    net.blobs["x"].reshape(5, 6, 2, 2)
    net.blobs["x"].data[...] = 1
    net.run_forward()
    assert net.blobs["y"].shape == ((5, 2, 2, 6) if type_ == "Permute" else (5, 6, 2, 2))
    assert (net.blobs["y"].cpu_data() == 1).all()


@pytest.mark.parametrize("type_, options, message", [
    ("Permute", permute(0, 4), r"order: expected different axes of .*, got \[0, 4\]"),
    ("Permute", permute(1, 1), r"order: expected different axes of .*, got \[1, 1\]"),
    ("ShuffleChannel", "shuffle_channel_param { group: 4 }", "group: expected a divisor of the channels, 6, got 4"),
    ("ShuffleChannel", "shuffle_channel_param { group: 0 }", "group: expected 1 or more, got 0"),
], ids=["beyond", "twice", "rest", "zero"])  # fmt: skip
def test_wrong_options(type_, options, message):
    with pytest.raises(NetError, match=rf"layer 'l' \({type_}\), {message}"):
        net_of(type_, options)


@pytest.mark.parametrize("type_", ["Permute", "ShuffleChannel"])
def test_refuses_to_work_in_place(type_):
    with pytest.raises(NetError, match="top: expected another name than the bottoms'"):
        net_of(type_, top="x")


def test_axes_that_do_not_fit():
    with pytest.raises(NetError, match="bottom: expected 2 axes or more"):
        net_of("ShuffleChannel", shape=(6,))
    net = net_of("Permute", permute(1, 0), (2, 3))
    net.blobs["x"].reshape(2, 3, 4)
    with pytest.raises(NetError, match="bottom: expected 2 axes, as at first"):
        net.run_forward()
