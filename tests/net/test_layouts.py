"""Nets that keep images channels last, and fused ops, against nets that do neither: nobody sees a difference."""

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda

from blobmem import TEST, TRAIN, Net, devices
from blobmem.memory import Side
from blobmem.net import layouts, schedule
from blobmem.ops.cuda import conv

pytestmark = needs_compiler

NET = """
name: "branches" force_backward: true
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 9 dim: 8 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } } }
layer { name: "bn1" type: "BatchNorm" bottom: "conv1" top: "conv1" }
layer { name: "scale1" type: "Scale" bottom: "conv1" top: "conv1" scale_param { bias_term: true filler { value: 1.2 } bias_filler { value: 0.1 } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "norm" type: "LRN" bottom: "conv1" top: "norm" lrn_param { local_size: 3 } }
layer { name: "pool" type: "Pooling" bottom: "norm" top: "pool" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "left" type: "Convolution" bottom: "pool" top: "left"
  convolution_param { num_output: 6 kernel_size: 1 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "bn2" type: "BatchNorm" bottom: "left" top: "left" }
layer { name: "scale2" type: "Scale" bottom: "left" top: "left" }
layer { name: "right" type: "Convolution" bottom: "pool" top: "right"
  convolution_param { num_output: 6 kernel_size: 3 pad: 1 group: 2 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "left" bottom: "right" top: "sum" }
layer { name: "relu2" type: "ReLU" bottom: "sum" top: "sum" }
layer { name: "mean" type: "Pooling" bottom: "sum" top: "mean" pooling_param { pool: AVE kernel_size: 2 } }
layer { name: "both" type: "Concat" bottom: "mean" bottom: "mean" top: "both" }
layer { name: "ip" type: "InnerProduct" bottom: "both" top: "ip" inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def device_of(channels_last):
    device = EmulatedCuda()
    device.channels_last = channels_last
    return device


def made(channels_last, text=NET, phase=TRAIN):
    net = Net(text, phase, device=device_of(channels_last), seed=1)
    rng = np.random.default_rng(3)
    net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = [1, 3]
    return net


def close(got, expected, name):
    # a bias before a BatchNorm has a gradient of nothing but rounding
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(initial=0), 0.1), err_msg=name
    )


def compare(one, other):
    for name in one.blobs:
        close(one.blobs[name].cpu_data(), other.blobs[name].cpu_data(), f"{name}")
        close(one.blobs[name].cpu_diff(), other.blobs[name].cpu_diff(), f"gradient of {name}")
    for layer in one.params:
        for index, (mine, theirs) in enumerate(zip(one.params[layer], other.params[layer], strict=True)):
            close(mine.cpu_data(), theirs.cpu_data(), f"{layer}, {index}")
            close(mine.cpu_diff(), theirs.cpu_diff(), f"gradient of {layer}, {index}")


@pytest.fixture
def plain(monkeypatch):
    """Nets made before `fuse` is called run every call by itself."""
    monkeypatch.setattr(schedule, "groups", lambda *_: {})
    return monkeypatch


@pytest.mark.parametrize("channels_last", [False, True])
def test_all_arrays_are_what_they_are_without_it(plain, channels_last):
    expected = made(False)
    expected.run_forward()
    expected.run_backward()
    plain.undo()
    net = made(channels_last)
    net.run_forward()
    net.run_backward()
    forward, backward = ([step.call.op for step in schedule._program()] for schedule in net.compiled())
    assert forward.count("batch_norm_scale_forward") == 2 and forward.count("sum_relu_forward") == 1
    assert backward.count("batch_norm_scale_backward") == 2 and backward.count("sum_relu_backward") == 1
    assert backward.count("slice_forward") == 1 and "concat_backward" not in backward
    compare(net, expected)


VOLUMES = """
name: "volumes" force_backward: true
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 1 dim: 4 dim: 6 dim: 8 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }
layer { name: "tile" type: "Tile" bottom: "data" top: "tile" tile_param { axis: 1 tiles: 4 } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 5 pad: 2 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } } }
layer { name: "left" type: "Eltwise" bottom: "tile" bottom: "conv1" top: "left" }
layer { name: "prelu1" type: "PReLU" bottom: "left" top: "prelu1" }
layer { name: "down" type: "Convolution" bottom: "prelu1" top: "down"
  convolution_param { num_output: 8 kernel_size: 2 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "twice" type: "Tile" bottom: "down" top: "twice" tile_param { tiles: 2 } }
layer { name: "prelu2" type: "PReLU" bottom: "twice" top: "prelu2" prelu_param { channel_shared: true } }
layer { name: "up" type: "Deconvolution" bottom: "prelu2" top: "up"
  convolution_param { num_output: 4 kernel_size: 2 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "both" type: "Concat" bottom: "up" bottom: "prelu1" top: "both" }
layer { name: "conv2" type: "Convolution" bottom: "both" top: "conv2"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "both" bottom: "conv2" top: "sum" }
layer { name: "deep" type: "Tile" bottom: "sum" top: "deep" tile_param { axis: 2 tiles: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "deep" top: "ip" inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_volumes_lie_channels_last_too(plain):
    expected = made(False, VOLUMES)
    plain.undo()
    net = made(True, VOLUMES)
    for each in (expected, net):
        each.run_forward()
        each.run_backward()
    compare(net, expected)
    net = made(True, VOLUMES)
    net.run_forward()
    net.run_backward()
    held = dict(net.device.holders())
    for name in ("tile", "conv1", "prelu1", "down", "twice", "prelu2", "up", "both", "conv2"):
        assert f"{name} (channels last)" in held and name not in held
    assert "deep" in held  # an axis of positions is repeated


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("users", [2, 3])
def test_a_sum_with_several_users(plain, channels_last, users):
    start = NET.index("layer {", NET.index('bottom: "sum" top: "sum"'))
    more = "".join(
        f'layer {{ name: "p{i}" type: "Pooling" bottom: "sum" top: "p{i}" pooling_param {{ pool: AVE global_pooling: true }} }}'
        f'layer {{ name: "l{i}" type: "Reduction" bottom: "p{i}" top: "l{i}" loss_weight: 0.{i + 1} }}'
        for i in range(users - 1)
    )
    text = NET[:start] + more + NET[start:]
    expected = made(False, text)
    plain.undo()
    net = made(channels_last, text)
    for each in (expected, net):
        each.run_forward()
        each.run_backward()
    backward = [step.call.op for step in net.compiled()[1]._program()]
    assert backward.count("sums_relu_backward") == (users == 2) and backward.count("sum_relu_backward") == (users > 2)
    compare(net, expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("top", ["right", "apart"])  # in place or not
@pytest.mark.parametrize("outputs", [6, 1])
def test_a_convolution_and_a_relu(plain, channels_last, top, outputs):
    start = NET.index("layer {", NET.index('name: "right"'))
    relu = f'layer {{ name: "relu" type: "ReLU" bottom: "right" top: "{top}" relu_param {{ negative_slope: 0.1 }} }}\n'
    text = NET[:start] + relu + NET[start:].replace('bottom: "right"', f'bottom: "{top}"')
    if outputs == 1:
        text = text.replace("num_output: 6", "num_output: 1").replace("group: 2", "")
    expected = made(channels_last, text)
    plain.undo()
    net = made(channels_last, text)
    for each in (expected, net):
        for _ in range(2):  # the second time gradients are added to
            each.run_forward()
            each.run_backward()
    backward = [step.call.op for step in net.compiled()[1]._program()]
    assert backward.count("relu_bias_backward") == (channels_last and outputs > 1)
    compare(net, expected)


def layer(kind, name, bottom, top, options=""):
    return f'layer {{ name: "{name}" type: "{kind}" bottom: "{bottom}" top: "{top}" {options} }}\n'


def window(outputs, more=""):
    return f'convolution_param {{ {outputs} kernel_size: 3 pad: 1 {more} weight_filler {{ type: "xavier" }} }}'


RELUS = (
    'force_backward: true layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 9 dim: 8 } } }'
    + layer("Convolution", "a", "data", "a", window("num_output: 8")) + layer("ReLU", "ra", "a", "a")
    + layer("DepthwiseConvolution", "b", "a", "b", window("")) + layer("ReLU", "rb", "b", "b")
    + layer("Convolution", "c", "b", "c", window("num_output: 6", "bias_term: false group: 2")) + layer("ReLU", "rc", "c", "c")
    + layer("Convolution", "d", "c", "d", window("num_output: 1")) + layer("ReLU", "rd", "d", "d")
    # what stays as it is: a deconvolution, a top of its own, a slope, and a flattened top
    + layer("Deconvolution", "e", "d", "e", window("num_output: 4")) + layer("ReLU", "re", "e", "e")
    + layer("Convolution", "f", "e", "f", window("num_output: 4")) + layer("ReLU", "rf", "f", "apart")
    + layer("Convolution", "g", "apart", "g", window("num_output: 4"))
    + layer("ReLU", "rg", "g", "g", "relu_param { negative_slope: 0.1 }")
    + layer("Convolution", "h", "g", "h", window("num_output: 4")) + layer("Flatten", "flat", "h", "flat")
    + layer("ReLU", "rh", "flat", "flat")
    + layer("InnerProduct", "i", "flat", "i", 'inner_product_param { num_output: 9 weight_filler { type: "xavier" } }')
    + layer("ReLU", "ri", "i", "i")
    + layer("InnerProduct", "j", "i", "j", 'inner_product_param { num_output: 5 weight_filler { type: "xavier" } }')
    + layer("ReLU", "rj", "j", "j")
    + layer("Reduction", "loss", "j", "loss", "loss_weight: 1 reduction_param { operation: SUMSQ }")
)  # fmt: skip


def made_of_relus(channels_last):
    net = Net(RELUS, TRAIN, device=device_of(channels_last), seed=1)
    rng = np.random.default_rng(3)
    net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)
    for name in "abdghij":
        net.params[name][1].data[...] = rng.normal(size=net.params[name][1].shape)
    return net


def same(one, other):
    for name in one.blobs:
        for half in ("cpu_data", "cpu_diff"):
            mine, theirs = (getattr(net.blobs[name], half)().tobytes() for net in (one, other))
            assert mine == theirs, (name, half)
    for name in one.params:
        for mine, theirs in zip(one.params[name], other.params[name], strict=True):
            assert mine.cpu_diff().tobytes() == theirs.cpu_diff().tobytes(), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_products_and_a_relu_in_place_leave_the_same_bits(plain, channels_last):
    nets = [made_of_relus(channels_last)]
    forward = [step.call.op for step in nets[0].compiled()[0]._program()]
    assert "conv_relu_forward" not in forward
    plain.undo()
    nets.append(made_of_relus(channels_last))
    forward = [step.call.op for step in nets[1].compiled()[0]._program()]
    # in the usual order a flattened array has the order of the one before it
    counts = {"conv_relu_forward": 4 + (not channels_last), "inner_product_relu_forward": 2, "deconv_forward": 1}
    assert {op: forward.count(op) for op in counts} == counts
    assert forward.count("relu_forward") == 3 + channels_last
    for net in nets:
        net.run_forward()
        net.run_backward()
    assert all((nets[0].blobs[name].cpu_data() > 0).any() for name in "abcdij")
    same(*nets)
    assert nets[0].compiled()[0].scratch_bytes() == nets[1].compiled()[0].scratch_bytes()
    for net in nets:
        net.blobs["data"].data[0, 0, 4, 4] = np.nan
        net.run_forward()
    assert np.isnan(nets[1].blobs["a"].cpu_data()).any() and np.isnan(nets[1].blobs["j"].cpu_data()).any()
    same(*nets)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_relu_waits_for_a_pass_that_goes_so_far(plain, channels_last):
    nets = [made_of_relus(channels_last)]
    plain.undo()
    nets.append(made_of_relus(channels_last))
    for end in ("a", "i"):
        for net in nets:
            net.forward(end=end)
        assert (nets[1].blobs[end].cpu_data() < 0).any()
        same(*nets)
        for net in nets:
            net.blobs[end].data[...] -= 0.01
            net.forward(start=f"r{end}")
        assert not (nets[1].blobs[end].cpu_data() < 0).any()
        same(*nets)


def test_the_relu_of_another_convolution():
    """Behind the second of two convolutions comes the ReLU of the first."""
    text = (
        "".join(f'layer {{ name: "{x}" type: "Input" top: "{x}" input_param {{ shape {{ dim: 1 dim: 2 dim: 4 dim: 4 }} }} }}' for x in "xy")
        + f'layer {{ name: "c" type: "Convolution" bottom: "x" bottom: "y" top: "u" top: "v" {window("num_output: 2")} }}'
        + layer("ReLU", "ru", "u", "u") + layer("ReLU", "rv", "v", "v")
    )  # fmt: skip
    net = Net(text, TEST, device=device_of(False), seed=1)
    for name in "xy":
        net.blobs[name].data[...] = np.random.default_rng(3).normal(size=net.blobs[name].shape)
    net.run_forward()
    assert [step.call.op for step in net.compiled()[0]._program()][-4:] == [
        "conv_forward", "conv_forward", "relu_forward", "relu_forward",
    ]  # fmt: skip
    assert net.blobs["u"].cpu_data().min() == net.blobs["v"].cpu_data().min() == 0


def convolution(name):
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "data" top: "{name}" convolution_param '
        '{ num_output: 6 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }'
    )


def user(name, bottom):
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" inner_product_param '
        '{ num_output: 4 weight_filler { type: "xavier" } } }'
        f'layer {{ name: "l{name}" type: "Reduction" bottom: "{name}" top: "l{name}" loss_weight: 1 '
        "reduction_param { operation: SUMSQ } }"
    )


SUM = (
    'force_backward: true layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 4 } } }'
    + convolution("left") + convolution("right")
    + 'layer { name: "sum" type: "Eltwise" bottom: "left" bottom: "right" top: "sum" }'
)  # fmt: skip
FLAT = 'layer { name: "flat" type: "Flatten" bottom: "sum" top: "flat" }'


def relu(name):
    return f'layer {{ name: "relu" type: "ReLU" bottom: "{name}" top: "{name}" }}'


@pytest.mark.parametrize("tops", [1, 2])
@pytest.mark.parametrize("middle", [relu("sum") + FLAT, FLAT + relu("flat")])
def test_a_flattened_array_has_another_order(plain, middle, tops):
    text = SUM + middle + "".join(user(name, "flat") for name in "ab"[:tops])
    nets = []
    for channels_last in (False, True):
        net = Net(text, TRAIN, device=device_of(channels_last), seed=1)
        net.blobs["data"].data[...] = np.random.default_rng(3).normal(size=net.blobs["data"].shape)
        net.run_forward()
        net.run_backward()
        nets.append(net)
        plain.undo()
    compare(nets[1], nets[0])


@pytest.mark.parametrize("channels_last", [False, True])
def test_parts_of_passes_go_on_from_whole_ones(plain, channels_last):
    expected = made(False)
    plain.undo()
    net = made(channels_last)
    for each in (net, expected):
        each.run_forward()
        each.blobs["pool"].data[0] *= 2
        each.forward(start="left")
        each.run_backward()
        each.clear_param_diffs()
        each.blobs["sum"].diff[...] = each.blobs["sum"].cpu_data()
        each.backward(start="sum", end="scale1")
        each.backward(start="bn1")
    compare(net, expected)


def test_reading_and_writing_between_passes(plain):
    expected, net = made(False), made(True)
    for each in (net, expected):
        for _ in range(2):
            each.run_forward()
            assert each.blobs["conv1"].data.shape == (2, 8, 9, 8)
            each.run_backward()
            each.blobs["data"].data[...] += 0.5
            for blobs in each.params.values():
                for blob in blobs:
                    blob.update()
            each.clear_param_diffs()
    compare(net, expected)


def test_images_lie_channels_last_and_nothing_else_is_held_for_them():
    net = made(True)
    net.run_forward()
    net.run_backward()
    held = dict(net.device.holders())
    assert held["conv1 (channels last)"] == net.blobs["conv1"].nbytes
    assert "conv1" not in held
    before = net.device.statistics.snapshot()
    for _ in range(2):
        net.run_forward()
        net.run_backward()
    assert (net.device.statistics - before).allocator_calls == 0
    epochs = {name: blob.data_view.memory.epoch for name, blob in net.blobs.items()}
    net.run_forward()
    assert epochs["conv1"] == net.blobs["conv1"].data_view.memory.epoch


@pytest.mark.parametrize("channels", [3, 4])
def test_a_given_array_is_held_as_it_came_too_if_it_has_four_channels(channels):
    """With fewer the convolution that reads it turns it over in its workspace."""
    net = made(True, NET.replace("dim: 3 dim:", f"dim: {channels} dim:"))
    assert net.blobs["data"].shape[1] == channels
    predicted = {}
    for memory, side, nbytes in net.needs(backward=True):
        if side is Side.DEVICE:
            predicted[memory] = max(predicted.get(memory, 0), nbytes)
    net.clear_param_diffs()
    net.run_forward()
    net.run_backward()
    held = dict(net.device.holders())
    assert held["data"] == net.blobs["data"].nbytes
    assert held.get("data (channels last)", 0) == (held["data"] if channels == 4 else 0)
    assert net.device.statistics.bytes_held == sum(predicted.values())


def test_another_batch_size_and_back(plain):
    expected, net = made(False), made(True)
    for each in (net, expected):
        each.run_forward()
        for batch in (1, 3, 2):
            each.blobs["data"].reshape(batch, 3, 9, 8)
            each.blobs["label"].reshape(batch)
            each.reshape()
            each.blobs["data"].data[...] = np.arange(each.blobs["data"].count).reshape(each.blobs["data"].shape) % 7
            each.blobs["label"].data[...] = 1
            each.run_forward()
            each.clear_param_diffs()
            each.run_backward()
    compare(net, expected)


def test_moving_takes_the_bytes_along(plain):
    expected, net = made(False), made(True)
    expected.run_forward()
    net.run_forward()
    net.move_to(EmulatedCuda())
    close(net.blobs["conv1"].cpu_data(), expected.blobs["conv1"].cpu_data(), "conv1")


class Timed:
    """A device that says what convolutions take, and leaves the order to that."""

    channels_last = None


@pytest.mark.parametrize(
    "first_ms, last_ms, groups, expected",
    [(1, 0.5, 2, True), (1, 0.99, 2, False), (1, 2, 2, False), (1, None, 2, False), (None, 0.5, 2, False),
     (0.1, 0.05, 2, False), (1, 0.5, 1, False)],
)  # fmt: skip
def test_what_is_faster_is_measured_where_the_device_does_not_say(monkeypatch, first_ms, last_ms, groups, expected):
    text = NET.replace("group: 2", f"group: {groups}")
    calls = [c for schedule in made(False, text).compiled() for c in schedule.calls]

    def milliseconds(op, specs, attributes, device):
        return last_ms if attributes.get("layout") == "NHWC" else first_ms

    monkeypatch.setattr(conv, "milliseconds", milliseconds)
    assert layouts.is_faster(calls, Timed()) is expected
    assert layouts.is_faster(calls, device_of(True)) and not layouts.is_faster(calls, device_of(False))


@pytest.mark.parametrize(
    "fits, ours, first_ms, last_ms, expected",
    [(False, False, 0.1, 0.2, True), (True, True, 0.2, 0.1, False), (True, False, 0.1, 0.1, False),
     (True, False, 0.103, 0.1, False), (True, False, 0.105, 0.1, True), (True, False, None, 0.1, True)],
)  # fmt: skip
def test_small_convolutions_stay_in_the_usual_order_unless_they_lose_by_it(
    monkeypatch, fits, ours, first_ms, last_ms, expected
):
    calls = [call for schedule in made(False).compiled() for call in schedule.calls]
    monkeypatch.setattr(conv, "fits", lambda key: fits)
    monkeypatch.setattr(conv, "is_small", lambda key, device: ours and key.layout == "NCHW")

    def milliseconds(op, specs, attributes, device):
        return last_ms if attributes.get("layout") == "NHWC" else first_ms

    monkeypatch.setattr(conv, "milliseconds", milliseconds)
    assert layouts.is_faster(calls, device_of(True)) == expected
    assert not layouts.is_faster(calls, device_of(False))


def test_nets_that_share_memory_keep_one_order():
    train, test = made(True), Net(NET, TEST, device=device_of(False), seed=1)
    assert not test.compiled()[0].images_last
    device = train.device
    test = Net(NET, TEST, device=device, seed=1)
    device.channels_last = False
    test.share_blobs_with(train)
    for name in ("data", "label"):
        test.blobs[name].data[...] = 1
    train.run_forward()
    before = device.statistics.bytes_held
    test.run_forward()
    assert device.statistics.bytes_held - before < 4096


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 3, 6)])
def test_a_smaller_batch_leaves_what_lies_beyond_it(channels_last, shape):
    text = SUM.replace("dim: 2 dim: 3", "dim: 4 dim: 3")
    values = []
    for device in (devices.HOST, device_of(channels_last)):
        net = Net(text, TRAIN, device=device, seed=1)
        net.blobs["data"].data[...] = np.random.default_rng(3).normal(size=net.blobs["data"].shape)
        net.run_forward()
        net.blobs["data"].reshape(shape)
        net.run_forward()
        net.blobs["sum"].reshape(4, 6, 5, 4)
        values.append(net.blobs["sum"].cpu_data().copy())
    close(values[1], values[0], "sum")
    assert values[0][3].any()


def test_a_scale_over_what_nothing_below_learns_from():
    text = (
        'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 5 dim: 4 } } }'
        'layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn" }'
        'layer { name: "s" type: "Scale" bottom: "bn" top: "bn" scale_param { bias_term: true } }'
        'layer { name: "l" type: "Reduction" bottom: "bn" top: "l" loss_weight: 1 reduction_param { operation: SUMSQ } }'
    )
    gradients = []
    for device in (devices.HOST, device_of(False), device_of(True)):
        net = Net(text, TRAIN, device=device, seed=1)
        net.blobs["data"].data[...] = np.random.default_rng(3).normal(size=net.blobs["data"].shape)
        net.run_forward()
        net.run_backward()
        gradients.append(net.params["s"][0].cpu_diff().copy())
    assert gradients[0].all()
    for gradient in gradients[1:]:
        close(gradient, gradients[0], "gamma")
