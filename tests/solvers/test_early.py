"""Parameters updated as soon as their gradients are complete: the bits of the late update, and what forbids it."""

import gc
import logging

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda
from update_formulas import OPTIONS, fields

from blobmem import OutOfDeviceMemory, SharedBlobError, SimulatedDevice
from blobmem.devices import HOST
from blobmem.errors import NetError
from blobmem.memory import Side
from blobmem.memory.slot import Slot
from blobmem.net import steps
from blobmem.net.needs import secure
from blobmem.proto.text import read_net, read_solver
from blobmem.solvers import get_solver


def dense(name, bottom, top, outputs, more=""):
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {more} inner_product_param {{'
        f' num_output: {outputs} weight_filler {{ type: "xavier" }} bias_filler {{ type: "gaussian" }} }} }}\n'
    )


def data(*shape, classes=4):
    dims = " ".join(f"dim: {dim}" for dim in shape)
    return (
        'name: "net" layer { name: "data" type: "DummyData" top: "x" top: "t" dummy_data_param {\n'
        f"  shape {{ {dims} }} shape {{ dim: {shape[0]} }} data_filler {{ type: 'gaussian' }}\n"
        f"  data_filler {{ type: 'constant' value: {classes - 1} }} }} }}\n"
    )


LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "t" top: "loss" }\n'
TWICE = "param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }"
SAME = 'param { name: "w" } param { name: "b" }'
CONV = """
layer { name: "c1" type: "Convolution" bottom: "x" top: "c1" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "r1" type: "ReLU" bottom: "c1" top: "c1" }
layer { name: "p1" type: "Pooling" bottom: "c1" top: "p1" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "n1" type: "LRN" bottom: "p1" top: "n1" lrn_param { local_size: 3 } }
layer { name: "c2" type: "Convolution" bottom: "n1" top: "c2" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 group: 2 weight_filler { type: "xavier" } } }
layer { name: "r2" type: "ReLU" bottom: "c2" top: "c2" }
"""


def normed(name, bottom, gamma="", beta=""):
    return (
        f'layer {{ name: "{name}" type: "BatchNorm" bottom: "{bottom}" top: "{name}" }}\n'
        f'layer {{ name: "{name}s" type: "Scale" bottom: "{name}" top: "{name}" scale_param {{ bias_term: true }}'
        f" param {{ {gamma} }} param {{ {beta} }} }}\n"
        f'layer {{ name: "{name}r" type: "ReLU" bottom: "{name}" top: "{name}" }}\n'
    )


def conv(name, bottom):
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{'
        ' num_output: 3 kernel_size: 3 pad: 1 bias_term: false weight_filler { type: "xavier" } } }\n'
    )


CAFFENET = data(2, 3, 13, 13) + CONV + dense("f6", "c2", "f6", 9, TWICE) + (
    'layer { name: "r6" type: "ReLU" bottom: "f6" top: "f6" }\n'
    'layer { name: "d6" type: "Dropout" bottom: "f6" top: "f6" }\n'
) + dense("f8", "f6", "y", 4, TWICE) + LOSS  # fmt: skip
NETS = {
    "caffenet": CAFFENET,
    # one weight in three layers, first and last among them
    "shared": data(3, 5) + dense("a", "x", "a", 5, SAME) + 'layer { name: "s" type: "Sigmoid" bottom: "a" top: "s" }\n'
    + dense("b", "s", "b", 5) + dense("c", "b", "c", 5, SAME) + dense("d", "c", "y", 5, SAME) + LOSS,
    # a parameter without gradient, which decays, and one that does not learn
    "pruned": data(3, 5) + dense("a", "x", "a", 5) + dense("no loss", "a", "z", 6, "propagate_down: false")
    + dense("frozen", "a", "f", 4, "param { lr_mult: 0 } param { lr_mult: 0 }") + dense("b", "f", "y", 4) + LOSS,
    # one launch begins one gradient and adds to another
    "mixed": data(2, 3, 6, 6) + conv("k1", "x") + normed("n1", "k1", 'name: "gamma"') + conv("k2", "n1")
    + normed("n2", "k2", 'name: "gamma"') + dense("b", "n2", "y", 4) + LOSS,
    "deep": data(2, 32) + "".join(dense(f"l{i}", f"l{i - 1}" if i else "x", f"l{i}", 32) for i in range(7))
    + dense("b", "l6", "y", 4) + LOSS,
}  # fmt: skip


def make(device, memory="train", net="caffenet", more="", update="momentum: 0.9", **options):
    rate = 'base_lr: 0.1 lr_policy: "multistep" stepvalue: 2 gamma: 0.5'
    param = read_solver(f"{rate} weight_decay: 0.01 {update} {more}")
    param.net_param.CopyFrom(read_net(NETS[net]))
    return get_solver(param, device=device, memory=memory, seed=5, **options)


def late(solver):
    """The solver, updating after backward, as somebody looks at gradients then."""
    solver.add_callback(on_gradients_ready=lambda: None)
    return solver


def traced(solver, steps=4):
    """Losses, parameters and history of so many iterations."""
    losses = []
    solver.add_callback(on_iteration=lambda iteration, loss: losses.append(loss))
    solver.step(steps)
    return [*losses, *state(solver)]


def state(solver):
    return [e.blob.cpu_data().copy() for e in solver.net.learnable] + [a.copy() for a in solver.updater.arrays()]


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def is_early(solver):
    return solver.net.updates_in_backward


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_type_trains_to_the_same_bits(device, kind):
    update = fields(kind)
    kept, after, early = (
        make(device, "keep", update=update), late(make(device, update=update)), make(device, update=update)
    )  # fmt: skip
    expected = traced(kept)
    assert_same(traced(after), expected)
    assert_same(traced(early), expected)
    assert [is_early(solver) for solver in (kept, after, early)] == [False, False, True]
    assert len({*expected[:4]}) == 4


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("share", [1, 1 << 40], ids=["at the end", "one by one"])
def test_each_net_trains_to_the_same_bits(monkeypatch, device, net, share):
    monkeypatch.setattr("blobmem.net.plan.early.SHARE", share)
    expected = traced(make(device, "keep", net))
    early = make(device, net=net)
    assert_same(traced(early), expected)
    assert is_early(early)


def test_lenet_trains_to_the_same_bits(lenet):
    found = []
    for memory, on in (("keep", HOST), ("train", HOST), ("train", SimulatedDevice())):
        rate = 'base_lr: 0.01 lr_policy: "inv" gamma: 0.0001 power: 0.75'
        param = read_solver(f"{rate} momentum: 0.9 test_iter: 1 test_interval: 2")
        param.net_param.CopyFrom(lenet)
        solver = get_solver(param, device=on, memory=memory, share=True, seed=1, train_batch=8, test_batches=[4])
        found.append(traced(solver))
        assert is_early(solver) == (memory == "train")
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("device", [HOST, SimulatedDevice()], ids=["host", "simulated"])
def test_all_that_training_says_and_writes_is_the_same(lenet, device, tmp_path, caplog):
    said, models = [], []
    for memory in ("keep", "train"):
        param = read_solver(
            f'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 display: 1 test_interval: 2 test_iter: 1 max_iter: 2'
            f' snapshot: 1 snapshot_prefix: "{tmp_path}/{memory}"'
        )
        param.net_param.CopyFrom(lenet)
        solver = get_solver(param, device=device, memory=memory, share=True, seed=1, train_batch=1, test_batches=[1])
        caplog.clear()
        with caplog.at_level(logging.INFO, "blobmem"):
            solver.solve()
        assert is_early(solver) == (memory == "train")
        said.append([message.replace(f"/{memory}_", "/") for message in caplog.messages])
        models.append([(tmp_path / f"{memory}_iter_{at}.caffemodel").read_bytes() for at in (1, 2)])
    assert said[0] == said[1] and models[0] == models[1]


def test_parameters_that_come_to_share_their_values_are_both_counted(device):
    found = []
    for memory in ("keep", "train"):
        solver = make(device, memory, "shared")
        solver.step(2)
        solver.net.params["b"][0].share_data(solver.net.params["a"][0])
        found.append(traced(solver))
        assert is_early(solver) == (memory == "train")
    assert_same(*found)


# -------------------------------------------------------------------- where gradients lie


def gradients(solver):
    return {entry.blob.name: entry.blob.diff_view.memory for entry in solver.net.learnable}


def test_gradients_take_turns():
    """What is held is what was foretold, less by the gradients' bytes but for those that the arena has to have room for:
    those of one layer, and those that wait for a sixteenth of all to be there."""
    held, arenas = {}, {}
    for name, prepared in (("late", late), ("early", lambda solver: solver)):
        device = SimulatedDevice()
        solver = prepared(make(device, net="deep"))
        solver._secure([])
        predicted = device.statistics.bytes_held
        solver.step(3)
        assert device.statistics.bytes_held == device.statistics.peak_bytes == predicted
        slots = [isinstance(memory, Slot) for memory in gradients(solver).values()]
        assert all(slots) if name == "early" else not any(slots)
        held[name], arenas[name] = predicted, solver.net.planned().nbytes
        before = device.statistics.snapshot()
        solver.step(3)
        assert (device.statistics - before).allocator_calls == 0
    nbytes, more = sum(e.blob.nbytes for e in solver.net.learnable), arenas["early"] - arenas["late"]
    assert held["late"] - held["early"] == nbytes - more
    assert 0 < more <= 32 * 32 * 4 + 1024 + nbytes / 16


def test_what_was_held_before_is_given_back():
    device = SimulatedDevice()
    solver = make(device)
    solver.step(1)
    held = device.statistics.bytes_held
    solver.net.clear_param_diffs()
    solver.net.run_forward()
    solver.net.run_backward()
    assert device.statistics.bytes_held > held
    solver.step(1)
    gc.collect()
    assert gradients(solver)["f6/0"].name == "f6/0.diff" and is_early(solver)
    arena = solver.net.planned().arena.gpu_capacity - solver.net.planned().nbytes  # which only grows
    assert device.statistics.bytes_held == held + max(0, arena)


def test_a_gradient_that_somebody_holds_an_array_over_stays(device):
    solver, other = make(device), make(device, "keep")
    array = solver.net.params["f6"][0].diff
    for each in (solver, other):
        each.step(2)
    assert not isinstance(gradients(solver)["f6/0"], Slot) and isinstance(gradients(solver)["f8/0"], Slot)
    expected = other.net.params["f6"][0].cpu_diff()
    np.testing.assert_array_equal(solver.net.params["f6"][0].cpu_diff(), expected)
    if device.is_host:
        np.testing.assert_array_equal(array, expected)


@needs_compiler
def test_launches_of_the_updates():
    """Weights and biases: after f6, with f8's, which are less than a sixteenth; after c2; at the end."""
    counts = []
    for solver in (make(EmulatedCuda()), late(make(EmulatedCuda()))):
        solver.step(1)
        counts.append(solver.net.device.launches.count("sgd"))
    assert counts == [3, 1]


# -------------------------------------------------------------------- what forbids it


@pytest.mark.parametrize(
    "more", ["iter_size: 2", "clip_gradients: 0.1", "debug_info: true display: 1", "snapshot_diff: true"]
)
def test_fields_that_forbid_it(device, more):
    found = []
    for memory in ("keep", "train"):
        solver = make(device, memory, more=more)
        found.append(traced(solver) + [e.blob.cpu_diff().copy() for e in solver.net.learnable])
        assert not is_early(solver)
    assert_same(*found)


def test_callbacks_that_come_later_are_served_from_then_on(device):
    found = {}
    for memory in ("keep", "train"):
        seen = found[memory] = []
        solver = make(device, memory)
        solver.step(2)
        early = is_early(solver)
        look = lambda solver=solver, seen=seen: seen.extend(e.blob.cpu_diff().copy() for e in solver.net.learnable)  # noqa: E731
        solver.add_callback(on_gradients_ready=look)
        solver.step(2)
        assert early == (memory == "train") and not is_early(solver)
        seen += state(solver)
    assert_same(found["keep"], found["train"])


def test_callbacks_of_the_net_during_backward_see_gradients(device):
    found = []
    for memory in ("keep", "train"):
        solver, seen = make(device, memory), []
        solver.step(1)
        blob = solver.net.params["c1"][0]
        look = lambda index, blob=blob, seen=seen: index == 1 and seen.append(blob.cpu_diff().copy())  # noqa: E731
        solver.net.after_backward(look)
        found.append(traced(solver, 2) + seen)
        assert len(seen) == 2 and not is_early(solver)
    assert_same(*found)


# -------------------------------------------------------------------- with passes of one's own


def own_pass(solver):
    solver.net.clear_param_diffs()
    solver.net.run_forward()
    solver.net.run_backward()


def test_steps_and_passes_of_ones_own_in_turn(device):
    found = []
    for memory in ("keep", "train"):
        solver, trace = make(device, memory), []
        own_pass(solver)
        solver.apply_update()
        for _ in range(2):
            solver.step(2)
            assert is_early(solver) == (memory == "train")
            trace.append(solver.net.run_forward())
            own_pass(solver)
            solver.net.run_forward()
            solver.net.run_backward()
            trace += [entry.blob.cpu_diff().copy() for entry in solver.net.learnable]
            solver.apply_update()
            trace += [e.blob.diff.copy() for e in solver.net.learnable]
        found.append(trace + traced(solver))
    assert_same(*found)


def test_gradients_that_are_gone_say_what_to_do(device):
    solver = make(device)
    solver.step(1)
    blob = solver.net.params["f8"][0]
    for use in (lambda: blob.diff, blob.cpu_diff, blob.clear_diff, blob.update, solver.apply_update):
        with pytest.raises(
            SharedBlobError, match=r"'(f8|c2)/0(\.diff)?'.*on_gradients_ready.*net\.clear_param_diffs\(\)"
        ):
            use()
    before = state(solver)
    solver.net.run_forward()
    with pytest.raises(SharedBlobError, match=r"Call net\.clear_param_diffs\(\), then run it forward"):
        solver.net.run_backward()
    assert_same(state(solver), before)
    own_pass(solver)
    assert blob.cpu_diff().any()
    solver.step(1)


def test_a_callback_at_the_start_may_run_the_net(device):
    found = []
    for memory in ("keep", "train"):
        solver = make(device, memory)
        solver.add_callback(on_start=lambda solver=solver: own_pass(solver))
        found.append(traced(solver))
        assert is_early(solver) == (memory == "train")
    assert_same(*found)


def test_multipliers_that_a_script_changes(device):
    found = []
    for memory in ("keep", "train"):
        solver = make(device, memory)
        solver.step(1)
        solver.net.learnable[0].lr_mult = 0
        solver.net.learnable[2].lr_mult = 3
        found.append(traced(solver))
    assert_same(*found)


def test_going_on_from_a_snapshot(device, tmp_path):
    more = f'snapshot_prefix: "{tmp_path}/s"'
    whole = make(device, more=more)
    whole.step(3)
    path = whole.snapshot()
    whole.step(2)
    again = make(device, more=more)
    again.step(1)
    again.restore(path)
    again.step(2)
    assert_same(state(again), state(whole))


def test_moved_to_another_device():
    solver, kept = make(SimulatedDevice()), make(HOST, "keep")
    solver.step(2)
    second = SimulatedDevice()
    solver.net.move_to(second)
    solver.step(2)
    kept.step(4)
    assert_same(state(solver), state(kept))
    assert is_early(solver) and gradients(solver)["f6/0"].device is second


# -------------------------------------------------------------------- what goes wrong


def test_room_for_exactly_what_is_needed():
    device = SimulatedDevice()
    make(device).step(1)
    needed = device.statistics.peak_bytes
    make(SimulatedDevice(needed)).step(3)
    with pytest.raises(OutOfDeviceMemory) as caught:
        make(SimulatedDevice(1)).step(1)
    short = SimulatedDevice(caught.value.requested - 1)
    solver = make(short)
    before = state(solver)
    with pytest.raises(OutOfDeviceMemory):
        solver.step(1)
    assert short.statistics.bytes_held == 0 and solver.iter == solver.net.state.iteration == 0
    assert_same(state(solver), before)
    short.capacity = needed
    assert_same(traced(solver), traced(make(SimulatedDevice())))


@pytest.mark.parametrize("updates", [0, 1], ids=["before the first update", "amid updates"])
def test_an_interruption_does_not_count(monkeypatch, device, caplog, updates):
    monkeypatch.setattr(device, "graphs", False)  # in which nothing is between two steps
    solver = make(device)
    solver.step(2)
    before, loss, rate = state(solver), solver.smoothed_loss, solver.updater.rate.current_step
    run, seen = steps.Step.run, []

    def interrupted(step, *arguments):
        seen.append(step.call.op == "sgd_update")
        if sum(seen) > updates or (updates == 0 and step.call.op == "softmax_loss_backward"):
            raise KeyboardInterrupt
        run(step, *arguments)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "blobmem"):
        patch.setattr(steps.Step, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            solver.step(1)
    warned = [message for message in caplog.messages if "ended amid its updates" in message]
    changed = [not np.array_equal(a, b) for a, b in zip(before, state(solver), strict=True)]
    assert len(warned) == updates and any(changed) == bool(updates) and not all(changed)
    assert (solver.iter, solver.smoothed_loss, solver.updater.rate.current_step) == (2, loss, rate)
    with pytest.raises(SharedBlobError):
        solver.net.params["f8"][0].cpu_diff()
    solver.step(1)
    assert solver.iter == 3
    if not updates:  # that batch was taken, as if the pass had been the user's own
        other = make(HOST, "keep")
        other.step(2)
        other.net.run_forward()
        other.step(1)
        if device.is_host:
            assert_same(state(solver), state(other))


def test_what_a_callback_raises_leaves_a_whole_iteration(device):
    def fail(display):
        raise OSError("no terminal")

    solver, kept = make(device, more="display: 3"), make(device, "keep")
    solver.add_callback(on_display=fail)
    for done in (1, 4):
        with pytest.raises(OSError):
            solver.step(3)
        assert solver.iter == done
    kept.step(4)
    assert_same(state(solver), state(kept))


def test_rates_that_are_shown_are_those_that_are_used(device):
    """Steps that come together are taken one in an iteration."""
    shown = []
    for memory in ("keep", "train"):
        solver, rates = make(device, memory, more="display: 1 stepvalue: 2 stepvalue: 2"), []
        solver.add_callback(on_display=lambda display, rates=rates: rates.append(display.rate))
        shown.append([traced(solver, 6), rates])
    assert_same(shown[0][0], shown[1][0])
    assert shown[0][1] == shown[1][1] == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.0125, 0.0125])


def test_a_bad_label_changes_no_parameter(device):
    text = CAFFENET.replace("value: 3", "value: 9")
    solver = get_solver(with_net(text), device=device, memory="train", seed=5)
    before = state(solver)
    for _ in range(2):
        with pytest.raises(NetError, match="label"):
            solver.step(1)
    assert_same(state(solver), before)
    assert solver.iter == solver.net.state.iteration == 0


def with_net(text):
    param = read_solver('base_lr: 0.1 lr_policy: "fixed" momentum: 0.9')
    param.net_param.CopyFrom(read_net(text))
    return param


def test_needs_are_secured_with_the_pass():
    device = SimulatedDevice()
    solver = make(device)
    solver.updater.place()
    assert solver.updater.needs() == solver.updater.missing() == []
    needs = solver.net.needs(backward=True)
    secure(needs)
    held = device.statistics.bytes_held
    solver.step(2)
    assert device.statistics.bytes_held == held
    histories = {blob.data_view.memory for blob in solver.updater.state_blobs()}
    assert histories <= {need.memory for need in needs if need.side is Side.DEVICE}


def test_gradients_that_nobody_updates_are_those_of_the_last_iteration(device):
    """Of parameters with a rate of 0, where force_backward wants them all the same."""
    text = "force_backward: true " + data(2, 3, 5, 5) + dense("c", "x", "c", 4, "param { lr_mult: 0 }")
    gradients = []
    for memory in ("keep", "train"):
        param = read_solver('base_lr: 0.1 lr_policy: "fixed" random_seed: 1')
        param.net_param.CopyFrom(read_net(text + dense("f", "c", "y", 4) + LOSS))
        solver = get_solver(param, device=device, memory=memory)
        solver.step(3)
        gradients.append(solver.net.params["c"][0].cpu_diff().copy())
    np.testing.assert_array_equal(*gradients)
    assert gradients[0].any()
