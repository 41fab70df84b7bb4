"""The flow of training: order, tests, reports, loss; running out of memory; pycaffe's habits."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from update_formulas import OPTIONS, fields

import blobmem
from blobmem import SharedBlobError
from blobmem.devices import HOST, SimulatedDevice
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import SGD, SGDSolver, Solver, get_solver, register_solver
from blobmem.solvers.base import _types

# -------------------------------------------------------------------- making one


def test_types(noisy):
    assert type(noisy()) is SGDSolver
    with pytest.raises(NetError, match=r"solver\.prototxt: type: expected one of .*SGD.*; got 'Newton'"):
        noisy('type: "Newton"')
    with pytest.raises(TypeError, match="get_solver"):
        Solver("x")


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_type_has_a_class_with_pycaffes_name(noisy, tmp_path, kind):
    cls = getattr(blobmem, f"{kind}Solver")
    solver = noisy(update=fields(kind))
    assert type(solver) is cls
    assert solver.type == kind
    assert cls(str(tmp_path / "solver.prototxt")).type == kind


def test_a_type_is_registered_once(noisy):
    class Late(SGD):
        type = "Late"

    @register_solver
    class LateSolver(Solver):
        updater_type = Late

    try:
        solver = noisy('type: "Late"')
        assert type(solver) is LateSolver
        solver.step(1)
        with pytest.raises(ValueError, match="solver type Late is already registered by .*LateSolver"):
            register_solver(type("Other", (Solver,), {"updater_type": Late}))
    finally:
        del _types["Late"]


def test_from_a_message(tools):
    param = caffe_pb2.SolverParameter(base_lr=0.1, lr_policy="fixed")
    from blobmem.proto.text import parse_text

    param.net_param.CopyFrom(parse_text(tools.noisy_text, caffe_pb2.NetParameter))
    solver = get_solver(param, device=HOST)
    solver.step(1)
    assert solver.iter == 1
    assert solver.test_nets == []


def test_device_by_its_word(noisy):
    assert noisy(device="simulated:1MiB").net.device.memory_info() == (2**20, 2**20)


def test_seed_comes_from_the_file_unless_given(noisy, tools):
    fill = [tools.weights(noisy("random_seed: 5", seed=seed)) for seed in (None, None, 6)]
    tools.same(fill[0], fill[1])
    assert (fill[0]["i1/0"] != fill[2]["i1/0"]).any()


def test_wrong_policy_is_found_at_once(noisy):
    with pytest.raises(NetError, match=r"solver\.prototxt: lr_policy: expected one of"):
        noisy('lr_policy: "cosine"', text='net: "{net}" base_lr: 1\n')


def test_weights_to_start_from_in_hdf5(noisy, tools, tmp_path):
    first = noisy()
    first.step(2)
    first.net.save_hdf5(tmp_path / "one.h5")
    tools.same(tools.weights(noisy('weights: "one.h5"')), tools.weights(first))


def test_weights_to_start_from(noisy, tools, tmp_path):
    first = noisy()
    first.step(2)
    first.net.save(tmp_path / "one.caffemodel")
    other = noisy()
    other.net.params["i1"][1].data[...] = 42
    keep = other.net.to_proto()
    del keep.layer[-2]
    (tmp_path / "two.caffemodel").write_bytes(keep.SerializeToString())
    started = noisy('weights: "one.caffemodel, two.caffemodel"')
    assert (started.net.params["i1"][1].cpu_data() == 42).all()
    np.testing.assert_array_equal(started.net.params["i2"][0].cpu_data(), first.net.params["i2"][0].cpu_data())
    again = noisy(f'weights: "{tmp_path}/two.caffemodel" weights: "{tmp_path}/one.caffemodel"')
    tools.same(tools.weights(again), tools.weights(first))


# -------------------------------------------------------------------- an iteration


def test_order_of_an_iteration(noisy):
    solver = noisy("display: 2 snapshot: 2")
    seen = []
    solver.add_callback(
        lambda: seen.append("start"),
        lambda: seen.append("gradients"),
        on_iteration=lambda iteration, loss: seen.append(f"done {iteration}"),
        on_test=lambda result: seen.append(f"test {result.index} at {result.iteration}"),
        on_display=lambda display: seen.append(f"display {display.iteration}"),
        on_snapshot=lambda path: seen.append(f"snapshot {path.rsplit('_', 1)[1]}"),
    )
    solver.step(4)
    assert seen == [
        "test 0 at 0", "test 1 at 0", "start", "display 0", "gradients", "done 1",
        "start", "gradients", "snapshot 2.solverstate", "done 2",
        "start", "display 2", "gradients", "done 3",
        "test 0 at 3", "test 1 at 3", "start", "gradients", "snapshot 4.solverstate", "done 4",
    ]  # fmt: skip


def test_no_test_before_the_first_iteration(noisy, tools):
    solver = noisy("test_initialization: false")
    seen = tools.record(solver)
    solver.step(4)
    assert [t.iteration for t in seen.tests] == [3, 3]


def test_gradients_ready_may_change_them(noisy, tools):
    solver = noisy()
    solver.add_callback(on_gradients_ready=lambda: [e.blob.diff.fill(0) for e in solver.net.learnable])
    solver.param.weight_decay = 0
    before = tools.weights(solver)
    solver.step(3)
    tools.same(before, tools.weights(solver))


def test_iter_size_sums_gradients_and_averages_the_loss(noisy):
    solver = noisy("iter_size: 3 test_initialization: false", device=HOST)
    by_hand = noisy()
    by_hand.net.clear_param_diffs()
    losses = []
    for _ in range(3):
        losses.append(by_hand.net.run_forward())
        by_hand.net.run_backward()
    gradients = {}
    solver.add_callback(
        on_gradients_ready=lambda: gradients.update({e.blob.name: e.blob.cpu_diff() for e in solver.net.learnable}),
        on_iteration=lambda iteration, loss: losses.append(loss),
    )
    solver.step(1)
    assert losses[3] == sum(losses[:3]) / 3
    for entry in by_hand.net.learnable:
        np.testing.assert_array_equal(gradients[entry.blob.name], entry.blob.cpu_diff())


def test_loss_is_smoothed_over_the_last_iterations_however_they_are_asked_for(noisy, tools):
    solver = noisy("display: 1")
    seen = tools.record(solver)
    solver.step(2)
    solver.step(3)
    losses = [loss for _, loss in seen.losses]
    for index, display in enumerate(seen.displays):
        window = losses[max(0, index - 2) : index + 1]
        assert display.loss == pytest.approx(sum(window) / len(window), rel=1e-12)
        assert display.outputs.values["loss"] == pytest.approx(losses[index])
        assert display.outputs.weights == {"loss": 1.0}
    assert solver.smoothed_loss == pytest.approx(sum(losses[-3:]) / 3)


def test_reported_rate_is_the_one_that_is_used(noisy, tools):
    solver = noisy("display: 1")
    seen = tools.record(solver)
    solver.step(12)
    steps = [(i >= 4) + (i >= 9) for i in range(12)]
    assert [display.rate for display in seen.displays] == pytest.approx([0.05 * 0.5**step for step in steps])


def test_debug_info_only_with_a_report(noisy, caplog):
    solver = noisy("display: 2 debug_info: true")
    with caplog.at_level(logging.INFO, "blobmem"):
        solver.step(1)
        reported = sum("[forward]" in message for message in caplog.messages)
        solver.step(1)
    assert reported > 0
    assert sum("[forward]" in message for message in caplog.messages) == reported


def test_debug_info_is_for_every_test_too(noisy, caplog):
    for more, logged in (("", False), ("debug_info: true", True)):
        solver = noisy(more)
        with caplog.at_level(logging.INFO, "blobmem"):
            solver.test_all()
        assert any("[forward]" in message for message in caplog.messages) == logged


def test_apply_update_is_the_end_of_an_iteration(noisy, tools):
    stepped, by_hand = noisy("test_initialization: false"), noisy()
    stepped.step(1)
    by_hand.net.clear_param_diffs()
    by_hand.net.forward()
    by_hand.net.backward()
    by_hand.apply_update()
    tools.same(tools.weights(stepped), tools.weights(by_hand))


# -------------------------------------------------------------------- tests


def test_results_are_means_over_the_passes(noisy):
    solver, twin = noisy("test_compute_loss: true"), noisy()
    for index, passes in enumerate((2, 3)):
        result = solver.test(index)
        outputs = [twin.test_nets[index].forward()["loss"].copy() for _ in range(passes)]
        assert result.passes == passes
        assert (result.index, result.iteration, result.name) == (index, 0, "noisy")
        np.testing.assert_allclose(result.outputs.values["loss"], np.mean(outputs), rtol=1e-6)
        assert result.loss == pytest.approx(float(np.mean(outputs)))


def test_loss_only_if_asked_for(noisy):
    assert noisy().test(0).loss is None


def test_test_all_tests_every_net(noisy):
    assert [result.index for result in noisy().test_all()] == [0, 1]


# -------------------------------------------------------------------- solve


def test_solve(noisy, tools, tmp_path):
    solver = noisy("display: 4")
    seen = tools.record(solver)
    solver.solve()
    assert solver.iter == 12
    assert seen.snapshots == [f"{tmp_path}/snapshots/s_iter_12.solverstate"]
    assert [t.iteration for t in seen.tests] == [0, 0, 3, 3, 6, 6, 9, 9, 12, 12]
    assert [d.iteration for d in seen.displays] == [0, 4, 8, 12]
    assert solver.net.state.iteration == 13  # the last report takes one more pass


def test_solve_writes_no_snapshot_twice(noisy, tools):
    solver = noisy("snapshot: 6")
    seen = tools.record(solver)
    solver.solve()
    assert len(seen.snapshots) == 2


def test_solve_without_snapshot(noisy, tools, tmp_path):
    solver = noisy("snapshot_after_train: false")
    solver.solve()
    assert not (tmp_path / "snapshots").exists()


def test_solve_needs_max_iter(noisy):
    with pytest.raises(NetError, match="max_iter is missing"):
        noisy(text='net: "{net}" base_lr: 1 lr_policy: "fixed"\n').solve()


def test_stop_ends_after_the_iteration_and_snapshots(noisy, tools):
    solver = noisy("display: 1")
    seen = tools.record(solver)
    solver.add_callback(on_gradients_ready=lambda: solver.iter == 4 and solver.stop())
    solver.solve()
    assert solver.iter == 5
    assert solver.stopped
    assert [path.rsplit("_", 1)[1] for path in seen.snapshots] == ["5.solverstate"]
    solver.step(1)
    assert not solver.stopped


def test_a_folder_that_cannot_be_written_is_found_before_training(noisy, tmp_path):
    (tmp_path / "snapshots").write_text("a file where the folder should be")
    solver = noisy("snapshot: 5")
    for run in (lambda: solver.step(1), solver.solve):
        with pytest.raises(NetError, match="nothing can be written to the folder"):
            run()
    assert solver.iter == 0
    assert solver.net.state.iteration == 0


def test_hdf5_snapshots(noisy, tools, tmp_path):
    solver = noisy("snapshot_format: HDF5 snapshot: 6")
    seen = tools.record(solver)
    solver.solve()
    assert seen.snapshots == [f"{tmp_path}/snapshots/s_iter_{n}.solverstate.h5" for n in (6, 12)]
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {
        f"s_iter_{n}.{ending}" for n in (6, 12) for ending in ("caffemodel.h5", "solverstate.h5", "h5.blobmem.json")
    }


def test_snapshot_prefix(noisy, tmp_path, monkeypatch):
    text = 'net: "{net}" base_lr: 1 lr_policy: "fixed"\n'
    assert noisy(text=text).snapshot_prefix == f"{tmp_path}/solver"
    assert noisy(f'snapshot_prefix: "{tmp_path}"', text=text).snapshot_prefix == f"{tmp_path}/solver"
    assert noisy('snapshot_prefix: "new/"', text=text).snapshot_prefix == "new/solver"
    assert noisy('snapshot_prefix: "a/b"', text=text).snapshot_prefix == "a/b"


# -------------------------------------------------------------------- device memory

FULL = "iter_size: 2 clip_gradients: 0.5 display: 1"


@pytest.mark.parametrize("update", ["momentum: 0.9", 'type: "Adam" momentum: 0.9'], ids=["SGD", "Adam"])
@pytest.mark.parametrize("share", [False, True], ids=["params", "blobs"])
def test_out_of_memory_at_every_call(noisy, tools, share, update):
    device = SimulatedDevice()
    undisturbed = noisy(FULL, update=update, device=device, share=share)
    seen = tools.record(undisturbed)
    undisturbed.step(5)
    calls = device.statistics.allocations + device.statistics.grows
    assert calls > 10
    for at in range(1, calls + 1):
        solver = noisy(FULL, update=update, device=SimulatedDevice(fail_at=at), share=share)
        other = tools.record(solver)
        failures = 0
        for _ in range(5):
            done = solver.iter
            try:
                solver.step(1)
            except OutOfDeviceMemory:
                failures += 1
                assert solver.iter == done
                solver.step(1)
        assert failures == 1, f"call {at}"
        assert other.losses == seen.losses
        assert tools.flat_tests(other) == tools.flat_tests(seen)
        tools.same(tools.weights(solver), tools.weights(undisturbed))
        tools.same(tools.history(solver), tools.history(undisturbed))


@pytest.mark.parametrize("share", [False, True], ids=["params", "blobs"])
def test_room_for_exactly_what_is_needed(noisy, share):
    device = SimulatedDevice()
    noisy(FULL, device=device, share=share).step(1)
    needed = device.statistics.peak_bytes
    noisy(FULL, device=SimulatedDevice(needed), share=share).step(5)
    short = SimulatedDevice(needed - 1)
    solver = noisy(FULL, device=short, share=share)
    with pytest.raises(OutOfDeviceMemory):
        solver.step(1)
    assert short.statistics.bytes_held == 0
    assert [net.state.iteration for net in (solver.net, *solver.test_nets)] == [0, 0, 0]
    short.capacity = needed
    solver.step(5)
    assert solver.iter == 5


def test_no_allocation_after_the_first_iteration_of_each_kind(noisy):
    device = SimulatedDevice()
    solver = noisy("clip_gradients: 1 snapshot: 1", device=device)
    solver.step(1)
    before = device.statistics.allocator_calls
    solver.step(8)
    assert device.statistics.allocator_calls == before


def test_a_device_that_only_counts(noisy):
    real, counting = SimulatedDevice(), SimulatedDevice(compute=False)
    noisy(FULL, device=real).step(4)
    noisy(FULL, device=counting).step(4)
    # but for the losses, which there is no use in reading
    unread = {"dtoh_copies": 0, "dtoh_bytes": 0}
    assert replace(counting.statistics, **unread) == replace(real.statistics, **unread)


# -------------------------------------------------------------------- sharing, and pycaffe's habits


def test_sharing_changes_no_result(noisy, tools, device):
    apart, together = noisy(device=device), noisy(share=True, device=device)
    seen = tools.record(apart), tools.record(together)
    apart.step(12)
    together.step(12)
    assert seen[0].losses == seen[1].losses
    assert tools.flat_tests(seen[0]) == tools.flat_tests(seen[1])
    tools.same(tools.weights(apart), tools.weights(together))
    assert together.reports[0].shared
    assert not apart.reports[0].shared


def inner_products(x, solver):
    """What i1, ReLU and i2 make of x (dropout does nothing in a test)."""
    (w1, b1), (w2, b2) = ([blob.cpu_data() for blob in solver.net.params[name]] for name in ("i1", "i2"))
    return np.maximum(x @ w1.T + b1, 0) @ w2.T + b2


def test_step_then_part_of_the_test_net(noisy, device):
    solver = noisy(
        "test_interval: 100 test_initialization: false",
        text='net: "{net}" base_lr: 0.1 lr_policy: "fixed" test_iter: 1\n',
        device=device,
    )
    test_net = solver.test_nets[0]
    test_net.forward()
    x = test_net.blobs["x"].data.copy()
    for _ in range(3):
        solver.step(1)
        test_net.forward(start="i1")
        np.testing.assert_array_equal(test_net.blobs["x"].data, x)
        np.testing.assert_allclose(test_net.blobs["y"].data, inner_products(x, solver), rtol=1e-4, atol=1e-5)


def test_test_net_between_forward_and_backward(noisy, device):
    solver, plain = noisy(device=device), noisy(device=device)
    for s in (solver, plain):
        s.net.clear_param_diffs()
    solver.net.forward()
    solver.test_nets[0].forward()
    solver.net.backward()
    plain.net.forward()
    plain.net.backward()
    for entry, other in zip(solver.net.learnable, plain.net.learnable, strict=True):
        np.testing.assert_array_equal(entry.blob.cpu_diff(), other.blob.cpu_diff())


def test_with_shared_blobs_these_are_errors_and_never_wrong_numbers(noisy, device):
    solver = noisy(share=True, device=device)
    solver.net.forward()
    solver.test_nets[0].forward()
    with pytest.raises(SharedBlobError, match="share=False"):
        solver.net.backward()
    solver.step(1)
    with pytest.raises(SharedBlobError, match="share=False"):
        solver.test_nets[0].forward(start="i1")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("test_interval: 3", "", "test_interval: expected 1 or more"),
        ("max_iter: 3", "max_iter: -4", "max_iter: expected 0 or more, got -4"),
        ("base_lr: 0.05", "base_lr: nan", "base_lr: expected a number, got nan"),
    ],
)
def test_fields_that_make_no_sense(noisy, old, new, message):
    text = 'net: "{net}" base_lr: 0.05 lr_policy: "fixed" max_iter: 3 test_iter: 1 test_interval: 3 '
    assert old in text
    with pytest.raises(NetError, match=message):
        noisy(text=text.replace(old, new))


VARYING = """
layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 8 dim: 3 } data_filler { type: "gaussian" } } }
layer { name: "u" type: "DummyData" top: "u"
  dummy_data_param { shape { dim: 8 } data_filler { type: "uniform" min: -1 max: 1 } } }
layer { name: "t" type: "Threshold" bottom: "u" top: "t" }
layer { name: "f" type: "Filter" bottom: "x" bottom: "t" top: "f" }
layer { name: "mean" type: "Reduction" bottom: "x" top: "sum" }
"""


def test_outputs_whose_shapes_change_are_left_out_of_averages(tools, caplog):
    param = caffe_pb2.SolverParameter(base_lr=0.1, lr_policy="fixed", test_iter=[5], test_interval=1)
    param.train_net_param.CopyFrom(read_net(tools.noisy_text))
    param.test_net_param.add().CopyFrom(read_net(VARYING))
    solver = SGDSolver(param, seed=1)
    result = solver.test()
    assert set(result.outputs.values) == {"sum"}
    assert "test net 0: no averages of f, whose shapes change" in caplog.text
