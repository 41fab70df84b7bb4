"""Updates as schedules: formulas, clipping, averaging, what is touched, history, and the fields of each type."""

import numpy as np
import pytest
from cuda_devices import EMULATED, EXACT_GPU
from cuda_emulation import EmulatedCuda
from update_formulas import HISTORIES, OPTIONS, corrected, fields, step

from blobmem.devices import HOST, SimulatedDevice
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.memory import Side
from blobmem.memory.blob import Blob
from blobmem.net import Net, schedule
from blobmem.solvers import SGD, AdaDelta, AdaGrad, Adam, Nesterov, RMSProp, updater_for
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


def make(fields="", device=HOST, dtype=np.float32, text=NET):
    train = Net(text, 0, device=device, seed=3, dtype=dtype)
    return updater_for(FIELDS + fields, train), train


def give_gradients(net, seed=0):
    rng = np.random.default_rng(seed)
    for entry in net.learnable:
        learned = entry.layer == "a" or entry.lr_mult != 0
        entry.blob.diff[...] = rng.standard_normal(entry.blob.shape) if learned else 0
    return {entry.blob.name: entry.blob.cpu_diff().astype(np.float64) for entry in net.learnable}


def values(net):
    return {entry.blob.name: entry.blob.cpu_data().astype(np.float64) for entry in net.learnable}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("decay, sign", [("L2", lambda w: w), ("L1", np.sign)], ids=["L2", "L1"])
def test_formula_with_everything_in_it(device, decay, sign, kind):
    updater, net = make(
        f'{fields(kind)} weight_decay: 0.02 iter_size: 3 clip_gradients: 0.5 regularization_type: "{decay}"', device
    )
    before, options = values(net), OPTIONS[kind]
    history = {name: [0.0] * HISTORIES[kind] for name in before}
    means = {name: options.get(name, 0.0) for name in ("momentum", "momentum2")}
    for iteration in range(3):
        gradients = give_gradients(net, iteration)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert updater.run(iteration) == pytest.approx(0.1)
        for name, rate, rate_of_decay in (("a/0", 0.1, 0.02), ("a/1", 0.2, 0.0)):
            gradient = gradients[name] * 0.5 / norm / 3 + rate_of_decay * sign(before[name])
            rate = corrected(kind, rate, iteration, **means)
            taken, history[name] = step(kind, gradient, history[name], rate, **options)
            before[name] = before[name] - taken
    after = values(net)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=2e-6, err_msg=name)
    for entry, blobs in zip(net.learnable[:2], updater.history[:2], strict=True):
        for blob, expected in zip(blobs, history[entry.blob.name], strict=True):
            np.testing.assert_allclose(blob.cpu_data(), expected, rtol=1e-4, atol=1e-7, err_msg=blob.name)


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


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_frozen_parameter_stays_and_has_no_history(device, kind):
    updater, net = make(f"{fields(kind)} weight_decay: 0.1", device)
    before = values(net)
    for iteration in range(2):
        give_gradients(net)
        updater.run(iteration)
    after = values(net)
    for name in ("frozen/0", "frozen/1"):
        np.testing.assert_array_equal(after[name], before[name])
    assert (after["a/0"] != before["a/0"]).all()
    assert all(is_untouched(blob) for blobs in updater.history[2:] for blob in blobs)


# -------------------------------------------------------------------- one launch for many parameters


@pytest.fixture(params=[EMULATED, EXACT_GPU])
def cuda(request):
    return request.param()


def after(updater, net, runs=3):
    for iteration in range(runs):
        give_gradients(net, iteration)
        updater.run(iteration)
    return [blob.cpu_data().tobytes() for blob in [*(e.blob for e in net.learnable), *updater.state_blobs()]]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_parameters_together_come_out_as_each_by_itself(cuda, monkeypatch, kind, dtype):
    options = fields(kind) + " weight_decay: 0.01 iter_size: 2"
    text = NET.replace("lr_mult: 0", "lr_mult: 1")
    together = make(options, cuda, dtype, text)
    assert len(together[0]._schedule._program()) == 1  # whatever their multipliers
    monkeypatch.setattr(schedule, "groups", lambda *_: {})
    apart = make(options, cuda, dtype, text)
    assert len(apart[0]._schedule._program()) == 4
    assert after(*together) == after(*apart)


def test_launches_of_a_clipped_update():
    device = EmulatedCuda()
    updater, net = make("momentum: 0.9 clip_gradients: 0.1", device, text=NET.replace("lr_mult: 0", "lr_mult: 1"))
    give_gradients(net)
    updater.run(0)
    give_gradients(net)
    begun = len(device.launches)
    updater.run(1)
    assert device.launches[begun:] == ["sumsq", "add_parts", "sgd"]


def test_a_parameter_that_moves_is_followed(cuda):
    text = NET.replace("lr_mult: 0", "lr_mult: 1")
    updater, net = make("momentum: 0.9", cuda, text=text)
    host, other = make("momentum: 0.9", HOST, text=text)
    after(updater, net), after(host, other)
    for place in (net, other):
        blob = place.params["frozen"][0]
        donor = Blob(blob.shape, device=place.device)
        donor.data[...] = 1
        blob.share_data(donor)
    after(updater, net), after(host, other)
    for name, expected in values(other).items():
        np.testing.assert_allclose(values(net)[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_parameters_that_come_to_share_their_values_are_both_counted(cuda):
    text = NET.replace("lr_mult: 0", "lr_mult: 1").replace("num_output: 5", "num_output: 2").replace("dim: 3", "dim: 2")
    updater, net = make("momentum: 0.9", cuda, text=text)
    host, other = make("momentum: 0.9", HOST, text=text)
    for each in (net, other):
        each.params["frozen"][0].share_data(each.params["a"][0])
    after(updater, net), after(host, other)
    for name, expected in values(other).items():
        np.testing.assert_allclose(values(net)[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_calls_that_run_as_one_have_one_set_of_attributes():
    updater, _ = make("", EmulatedCuda(), text=NET.replace("lr_mult: 0", "lr_mult: 1"))
    with pytest.raises(ValueError, match="calls 0 to 4 run as one"):
        updater._schedule.set_attributes(range(1, 2), {"rate": 1.0})


# -------------------------------------------------------------------- history to files and back


def test_history_in_the_order_of_files(device):
    updater, net = make(fields("Adam"), device)
    for iteration in range(2):
        give_gradients(net)
        updater.run(iteration)
    assert [blob.name for blob in updater.history[1]] == ["a/1/history", "a/1/history1"]
    arrays, slots = updater.arrays(), updater.slots()
    assert [array.shape for array in arrays] == [(5, 3), (5,), (2, 5), (2,)] * 2
    assert [(slot.shape, slot.dtype) for slot in slots.arrays] == [(array.shape, np.float32) for array in arrays]
    assert [slot.owner for slot in slots.arrays[4:6]] == ["parameter 0 of layer 'a'", "parameter 1 of layer 'a'"]
    assert slots.whose == "the 4 parameters of net '' (TRAIN) under Adam"
    np.testing.assert_array_equal(arrays[1], updater.history[1][0].cpu_data())
    np.testing.assert_array_equal(arrays[5], updater.history[1][1].cpu_data())
    assert (arrays[5] > 0).all()


def test_history_out_and_back(device):
    updater, net = make("momentum: 0.9 gamma: 0.5 stepvalue: 1", device)
    updater.param.lr_policy = "multistep"
    for iteration in range(3):
        give_gradients(net)
        updater.run(iteration)
    arrays = updater.arrays()
    assert is_untouched(updater.history[2][0])
    other, _ = make("momentum: 0.9", device)
    other.load(1, arrays)
    assert other.rate.current_step == 1
    np.testing.assert_array_equal(other.history[0][0].cpu_data(), updater.history[0][0].cpu_data())
    assert is_untouched(other.history[2][0])


def test_loading_zeros_over_a_history(device):
    updater, net = make("momentum: 0.9", device)
    empty = updater.arrays()
    give_gradients(net)
    updater.run(0)
    updater.load(0, empty)
    np.testing.assert_array_equal(updater.history[0][0].cpu_data(), 0)


def test_a_restored_history_still_moves_a_frozen_parameter(device):
    updater, net = make("momentum: 0.5", device)
    arrays = updater.arrays()
    arrays[3] = np.ones(2, np.float32)
    updater.load(0, arrays)
    before = values(net)
    give_gradients(net)
    updater.run(0)
    np.testing.assert_allclose(values(net)["frozen/1"], before["frozen/1"] - 0.5)
    np.testing.assert_array_equal(values(net)["frozen/0"], before["frozen/0"])


# -------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    "text, message",
    [
        ('regularization_type: "L3"', "regularization_type: expected L1 or L2, got 'L3'"),
        ("iter_size: 0", "iter_size: expected 1 or more, got 0"),
        ('type: "Newton"', "type: expected one of AdaDelta, AdaGrad, Adam, Nesterov, RMSProp, SGD; got 'Newton'"),
        ('type: "AdaGrad" momentum: 0.9', "momentum: expected none, as AdaGrad has no use for it, got 0.9"),
        ('type: "RMSProp" momentum: 0.9', "momentum: expected none, as RMSProp has no use for it, got 0.9"),
        ('type: "RMSProp" rms_decay: 1', "rms_decay: expected 0 or more and below 1, got 1"),
        ('type: "RMSProp" rms_decay: -0.1', "rms_decay: expected 0 or more and below 1, got -0.1"),
        ('type: "AdaDelta" momentum: 1.5', "momentum: expected 0 or more and below 1, got 1.5"),
        ('type: "Adam" momentum: 1', "momentum: expected 0 or more and below 1, got 1"),
        ('type: "Adam" momentum: nan', "momentum: expected 0 or more and below 1, got nan"),
        ('type: "Adam" momentum2: 1', "momentum2: expected 0 or more and below 1, got 1"),
        ('type: "AdaGrad" delta: -1', "delta: expected 0 or more, got -1"),
    ],
    ids=lambda value: value.replace(" ", "") if ":" in value and "expected" not in value else "",
)
def test_wrong_fields(text, message):
    with pytest.raises(NetError, match=message):
        make(text)


def test_a_wrong_field_names_the_file(tmp_path):
    (tmp_path / "solver.prototxt").write_text(FIELDS + 'type: "AdaGrad" momentum: 0.5')
    with pytest.raises(NetError, match=r"solver\.prototxt: momentum: expected none"):
        updater_for(tmp_path / "solver.prototxt", Net(NET, 0))


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("Adam", {"momentum": 0.0, "momentum2": 0.999, "delta": 1e-8}),
        ("RMSProp", {"rms_decay": 0.99, "delta": 1e-8}),
        ("AdaGrad", {"delta": 1e-8}),
    ],
    ids=["adam", "rmsprop", "adagrad"],
)
def test_defaults_are_caffes(kind, expected):
    updater, _ = make(f'type: "{kind}"')
    attributes = updater.attributes(0.1, 1.0, 0)
    assert {name: attributes[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "old, cls",
    [("SGD", SGD), ("NESTEROV", Nesterov), ("ADAGRAD", AdaGrad), ("RMSPROP", RMSProp), ("ADADELTA", AdaDelta),
     ("ADAM", Adam)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_types_of_old_files(old, cls):
    assert type(make(f"solver_type: {old}")[0]) is cls


@pytest.mark.parametrize("iteration", [0, 9, 2**31 - 2])
def test_the_rate_of_adam_follows_the_iteration(iteration):
    updater, _ = make('type: "Adam" momentum: 0.5 momentum2: 0.75')
    attributes = updater.attributes(0.2, 1.0, iteration)
    t = iteration + 1
    assert attributes["rate"] == pytest.approx(0.2 * np.sqrt(1 - 0.75**t) / (1 - 0.5**t), rel=1e-12)


def test_updater_for_gives_the_class_of_the_type():
    assert type(make()[0]) is SGD


def test_what_a_script_changes_counts_from_the_next_update_on(device):
    updater, net = make("weight_decay: 0", device)
    expected = {}
    for iteration in range(3):
        if iteration == 1:
            updater.param.weight_decay = 0.5  # of which the bias takes nothing
        if iteration == 2:
            net.learnable[1].decay_mult, net.learnable[0].lr_mult = 1, 0
        gradients, before = give_gradients(net, iteration), values(net)
        updater.run(iteration)
        decay = 0 if iteration == 0 else 0.5
        for entry in net.learnable[:2]:
            name = entry.blob.name
            gradient = gradients[name] + decay * entry.decay_mult * before[name]
            expected[name] = before[name] - 0.1 * entry.lr_mult * gradient
            np.testing.assert_allclose(values(net)[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
