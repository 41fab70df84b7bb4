"""The update as a schedule: clipping, averaging, what it touches, and the history in files."""

import numpy as np
import pytest

from blobmem.devices import HOST, SimulatedDevice
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.memory import Side
from blobmem.net import Net
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.solvers import SGD, updater_for
from blobmem.solvers.update import is_untouched

NET = """
layer {
  name: "d" type: "Input" top: "x" top: "t" input_param { shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 } }
}
layer {
  name: "a" type: "InnerProduct" bottom: "x" top: "y" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 5 weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }
}
layer {
  name: "frozen" type: "InnerProduct" bottom: "y" top: "z" param { lr_mult: 0 } param { lr_mult: 0 }
  inner_product_param { num_output: 2 weight_filler { type: "gaussian" } }
}
layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "t" top: "loss" }
"""
FIELDS = 'base_lr: 0.1 lr_policy: "fixed"\n'


def make(fields="", device=HOST, dtype=np.float32):
    train = Net(NET, 0, device=device, seed=3, dtype=dtype)
    return updater_for(FIELDS + fields, train), train


def give_gradients(net, seed=0):
    rng = np.random.default_rng(seed)
    for entry in net.learnable:
        entry.blob.diff[...] = rng.standard_normal(entry.blob.shape) if entry.layer == "a" else 0
    return {entry.blob.name: entry.blob.cpu_diff().astype(np.float64) for entry in net.learnable}


def values(net):
    return {entry.blob.name: entry.blob.cpu_data().astype(np.float64) for entry in net.learnable}


@pytest.mark.parametrize("decay, sign", [("L2", lambda w: w), ("L1", np.sign)], ids=["L2", "L1"])
def test_formula_with_everything_in_it(device, decay, sign):
    updater, net = make(
        f'momentum: 0.9 weight_decay: 0.02 iter_size: 3 clip_gradients: 0.5 regularization_type: "{decay}"', device
    )
    before = values(net)
    history = dict.fromkeys(before, 0.0)
    for iteration in range(3):
        gradients = give_gradients(net, iteration)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert updater.run(iteration) == pytest.approx(0.1)
        for name, rate, rate_of_decay in (("a/0", 0.1, 0.02), ("a/1", 0.2, 0.0)):
            gradient = gradients[name] * 0.5 / norm / 3 + rate_of_decay * sign(before[name])
            history[name] = 0.9 * history[name] + rate * gradient
            before[name] -= history[name]
    after = values(net)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_gradients_below_the_limit_are_not_clipped(device):
    clipped, net = make("clip_gradients: 1000", device)
    free, other = make("", device)
    give_gradients(net), give_gradients(other)
    clipped.run(0), free.run(0)
    assert {k: v.tobytes() for k, v in values(net).items()} == {k: v.tobytes() for k, v in values(other).items()}


def test_gradients_stay_as_they_are(device):
    updater, net = make("momentum: 0.9 clip_gradients: 0.1 iter_size: 2", device)
    gradients = give_gradients(net)
    updater.run(0)
    for entry in net.learnable:
        np.testing.assert_array_equal(entry.blob.cpu_diff(), gradients[entry.blob.name])


def test_history_names_and_laziness():
    device = SimulatedDevice()
    updater, net = make("", device)
    assert [[blob.name for blob in blobs] for blobs in updater.history] == [
        ["a/0/history"], ["a/1/history"], ["frozen/0/history"], ["frozen/1/history"]
    ]  # fmt: skip
    assert device.statistics.allocations == 0
    give_gradients(net)
    updater.run(0)
    assert [blob.name for blob in updater.state_blobs()] == ["a/0/history", "a/1/history"]
    held = dict(device.holders())
    assert held["a/0/history"] == 5 * 3 * 4
    assert not any(name.startswith("frozen") for name in held)


def test_needs_are_what_a_run_holds():
    device = SimulatedDevice()
    updater, net = make("clip_gradients: 1", device)
    give_gradients(net)
    wanted = {need.memory: need.nbytes for need in updater.needs() if need.side is Side.DEVICE}
    updater.run(0)
    assert device.statistics.bytes_held == sum(wanted.values())
    params = [entry.blob for entry in net.learnable if entry.layer == "a"]
    assert set(wanted) == {blob.data_view.memory for blob in [*params, *updater.state_blobs()]} | {
        entry.blob.diff_view.memory for entry in net.learnable if entry.blob in params
    }


def test_needs_follow_a_parameter_to_another_memory():
    device = SimulatedDevice()
    updater, net = make("", device)
    _, other = make("", device)
    updater.needs()
    net.share_with(other)
    memories = {need.memory for need in updater.needs()}
    assert other.params["a"][0].data_view.memory in memories


def test_running_out_changes_nothing():
    device = SimulatedDevice(capacity=200)
    updater, net = make("clip_gradients: 1", device)
    before = values(net)
    give_gradients(net)
    with pytest.raises(OutOfDeviceMemory):
        updater.run(0)
    assert device.statistics.bytes_held == 0
    for name, expected in values(net).items():
        np.testing.assert_array_equal(expected, before[name])


def test_float64():
    updater, train = make("clip_gradients: 1", dtype=np.float64)
    assert updater.history[0][0].dtype == np.float64
    before, gradients = values(train), give_gradients(train)
    updater.run(0)
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    np.testing.assert_allclose(
        values(train)["a/0"], before["a/0"] - np.float32(0.1) * gradients["a/0"] / norm, rtol=1e-13
    )


# -------------------------------------------------------------------- files


def state_of(updater):
    state = caffe_pb2.SolverState()
    updater.to_proto(state)
    return state


def test_history_to_proto_and_back(device):
    updater, net = make("momentum: 0.9 gamma: 0.5 stepvalue: 1", device)
    updater.param.lr_policy = "multistep"
    for iteration in range(3):
        give_gradients(net)
        updater.run(iteration)
    state = state_of(updater)
    assert state.current_step == 1
    assert [tuple(blob.shape.dim) for blob in state.history] == [(5, 3), (5,), (2, 5), (2,)]
    assert is_untouched(updater.history[2][0])
    other, _ = make("momentum: 0.9", device)
    other.load(state, other.parse(state, "f"))
    assert other.rate.current_step == 1
    np.testing.assert_array_equal(other.history[0][0].cpu_data(), updater.history[0][0].cpu_data())
    assert is_untouched(other.history[2][0])


def test_loading_zeros_over_a_history(device):
    updater, net = make("momentum: 0.9", device)
    empty = state_of(updater)
    give_gradients(net)
    updater.run(0)
    updater.load(empty, updater.parse(empty, "f"))
    np.testing.assert_array_equal(updater.history[0][0].cpu_data(), 0)


def test_a_restored_history_still_moves_a_frozen_parameter(device):
    updater, net = make("momentum: 0.5", device)
    state = state_of(updater)
    fill_blob(state.history[3], np.ones(2, np.float32))
    updater.load(state, updater.parse(state, "f"))
    before = values(net)
    give_gradients(net)
    updater.run(0)
    np.testing.assert_allclose(values(net)["frozen/1"], before["frozen/1"] - 0.5)
    np.testing.assert_array_equal(values(net)["frozen/0"], before["frozen/0"])


def test_legacy_shapes_fit():
    updater, _ = make()
    state = state_of(updater)
    for proto, shape in zip(state.history, [(1, 1, 5, 3), (1, 1, 1, 5), (1, 1, 2, 5), (1, 1, 1, 2)], strict=True):
        proto.ClearField("shape")
        proto.num, proto.channels, proto.height, proto.width = shape
    assert [array.shape for array in updater.parse(state, "f")] == [(5, 3), (5,), (2, 5), (2,)]


def test_wrong_number_of_arrays():
    updater, _ = make()
    state = state_of(updater)
    del state.history[2:]
    with pytest.raises(NetError, match=r"f: 2 history arrays, expected 4 for the 4 parameters"):
        updater.parse(state, "f")


@pytest.mark.parametrize("index, name", [(1, "parameter 1 of layer 'a'"), (2, "parameter 0 of layer 'frozen'")])
def test_wrong_shape_names_the_parameter(index, name):
    updater, _ = make()
    state = state_of(updater)
    fill_blob(state.history[index], np.zeros(77, np.float32))
    with pytest.raises(NetError, match=rf"f: history of {name}: shape \(77,\)"):
        updater.parse(state, "f")


def test_missing_values_name_the_parameter():
    updater, _ = make()
    state = state_of(updater)
    del state.history[0].data[3:]
    with pytest.raises(NetError, match="f: history of parameter 0 of layer 'a': .*3 values"):
        updater.parse(state, "f")
    del state.history[0].data[:]
    with pytest.raises(NetError, match="f: history of parameter 0 of layer 'a': it has no values"):
        updater.parse(state, "f")


@pytest.mark.parametrize(
    "fields, message",
    [
        ('regularization_type: "L3"', "regularization_type: expected L1 or L2, got 'L3'"),
        ("iter_size: 0", "iter_size: expected 1 or more, got 0"),
        ('type: "Newton"', "type: expected one of .*SGD.*; got 'Newton'"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(NetError, match=message):
        make(fields)


def test_updater_for_gives_the_class_of_the_type():
    assert type(make()[0]) is SGD
