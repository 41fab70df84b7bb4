"""Snapshot and restore: training goes on bit for bit, and files that do not fit change nothing."""

import logging
import os

import numpy as np
import pytest
from hdf5_files import replace_with, write_state
from update_formulas import HISTORIES, OPTIONS, fields

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_binary
from blobmem.solvers import get_solver

MORE = "display: 2 iter_size: 2 clip_gradients: 2"


def run_on(solver, tools, count):
    seen = tools.record(solver)
    solver.step(count)
    displays = [(d.iteration, d.loss, d.rate) for d in seen.displays]
    return seen.losses, tools.flat_tests(seen), displays


@pytest.mark.parametrize("share", [False, True], ids=["params", "blobs"])
@pytest.mark.parametrize("at", [1, 3, 4, 5, 11])
def test_goes_on_bit_for_bit(noisy, tools, device, at, share):
    whole = noisy(MORE, device=device, share=share)
    losses, tests, displays = run_on(whole, tools, 12)
    first = noisy(MORE, device=device, share=share)
    first.step(at)
    path = first.snapshot()
    second = noisy(MORE, device=device, share=share, seed=12345)
    second.restore(path)
    assert second.iter == at
    rest = run_on(second, tools, 12 - at)
    assert rest[0] == losses[at:]
    assert rest[1] == [test for test in tests if test[1] >= at]
    assert rest[2] == [display for display in displays if display[0] >= at]
    tools.same(tools.weights(second), tools.weights(whole))
    tools.same(tools.history(second), tools.history(whole))


@pytest.mark.parametrize("share", [False, True], ids=["params", "blobs"])
@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_type_in_every_format(noisy, tools, device, kind, form, share):
    if not device.is_host and share != (form == "HDF5"):
        pytest.skip("the others have either with each type")
    options = {"update": fields(kind), "device": device, "share": share}
    more = f'{MORE} snapshot_format: {form} regularization_type: "L1"'
    whole, first = noisy(more, **options), noisy(more, **options)
    losses, tests, displays = run_on(whole, tools, 8)
    first.step(5)
    path = first.snapshot()
    assert path.endswith(".h5" if form == "HDF5" else ".solverstate")
    second = noisy(more, seed=99, **options)
    second.restore(path)
    assert run_on(second, tools, 3) == (losses[5:], [t for t in tests if t[1] >= 5], [d for d in displays if d[0] >= 5])
    tools.same(tools.weights(second), tools.weights(whole))
    tools.same(tools.history(second), tools.history(whole))
    assert len({loss for _, loss in losses}) == 8


@pytest.mark.parametrize("kind", OPTIONS)
def test_sharing_changes_no_type(noisy, tools, device, kind):
    apart, together = (noisy(MORE, update=fields(kind), device=device, share=share) for share in (False, True))
    assert run_on(apart, tools, 6) == run_on(together, tools, 6)
    tools.same(tools.weights(apart), tools.weights(together))
    assert together.reports[0].shared


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_double_precision_too(noisy, tools, form):
    whole, first, second = (noisy(f"snapshot_format: {form}", dtype=np.float64) for _ in range(3))
    losses = run_on(whole, tools, 6)[0]
    first.step(3)
    second.restore(first.snapshot())
    assert run_on(second, tools, 3)[0] == losses[3:]
    tools.same(tools.weights(second), tools.weights(whole))


def test_a_snapshot_does_not_disturb(noisy, tools, device):
    plain, often = noisy(device=device), noisy("snapshot: 1", device=device)
    assert run_on(plain, tools, 6) == run_on(often, tools, 6)
    tools.same(tools.weights(plain), tools.weights(often))


def test_solve_resumes(noisy, tools):
    whole = noisy("snapshot: 5")
    whole.solve()
    resumed = noisy("snapshot: 5")
    resumed.solve(f"{whole.snapshot_prefix}_iter_5.solverstate")
    assert resumed.iter == 12
    tools.same(tools.weights(resumed), tools.weights(whole))


def test_restoring_over_a_run_that_has_gone_on(noisy, tools, device):
    solver = noisy(device=device)
    solver.step(4)
    path = solver.snapshot()
    ahead = run_on(solver, tools, 5)
    solver.restore(path)
    solver._callbacks.on_iteration.clear()
    solver._callbacks.on_test.clear()
    solver._callbacks.on_display.clear()
    assert run_on(solver, tools, 5) == ahead


MEMORY = """
layer {
  name: "data" type: "MemoryData" top: "x" top: "label"
  memory_data_param { batch_size: 2 channels: 3 height: 1 width: 1 }
}
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 4 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }
"""


def test_data_positions_go_on(tools, tmp_path):
    (tmp_path / "net.prototxt").write_text(MEMORY)
    rng = np.random.default_rng(0)
    data, labels = rng.standard_normal((10, 3, 1, 1)).astype(np.float32), np.arange(10) % 4
    text = f'net: "{tmp_path}/net.prototxt"\nbase_lr: 0.1 lr_policy: "fixed" snapshot_prefix: "{tmp_path}/m"'

    def make():
        solver = get_solver(text, seed=1)
        solver.net.layers[0].reset(data, labels)
        return solver

    whole = make()
    losses = run_on(whole, tools, 12)[0]
    first = make()
    first.step(7)
    second = make()
    second.restore(first.snapshot())
    assert run_on(second, tools, 5)[0] == losses[7:]


# -------------------------------------------------------------------- files that Caffe wrote, or might have


def without_sidecar(solver):
    path = solver.snapshot()
    os.unlink(path.replace(".solverstate.h5", ".h5.blobmem.json").replace(".solverstate", ".blobmem.json"))
    return path


def stepped(solver, steps=4):
    solver.step(steps)
    return solver


def test_without_sidecar_as_caffe_does_and_says_so(noisy, tools, caplog):
    first = noisy()
    first.step(6)
    second = noisy()
    with caplog.at_level(logging.WARNING, "blobmem"):
        second.restore(without_sidecar(first))
    assert "has no s_iter_6.blobmem.json beside it" in caplog.text
    assert second.iter == 6
    assert second.updater.rate.current_step == 1
    assert second.net.state.iteration == 0
    tools.same(tools.weights(second), tools.weights(first))
    tools.same(tools.history(second), tools.history(first))


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_hdf5_that_caffe_wrote(noisy, tools, tmp_path, kind):
    first, second = noisy(update=fields(kind)), noisy(update=fields(kind))
    first.step(6)
    first.net.save_hdf5(tmp_path / "m.caffemodel.h5")
    history = [blobs[slot].cpu_data() for slot in range(HISTORIES[kind]) for blobs in first.updater.history]
    write_state(tmp_path / "m.solverstate.h5", 6, 1, history, tmp_path / "m.caffemodel.h5")
    second.restore(tmp_path / "m.solverstate.h5")
    assert (second.iter, second.updater.rate.current_step) == (6, 1)
    tools.same(tools.weights(second), tools.weights(first))
    tools.same(tools.history(second), tools.history(first))


def test_another_type_takes_the_history_with_a_warning(noisy, tools, caplog):
    first = noisy(update=fields("SGD"))
    path = snapshot_of(first)
    second = noisy(update=fields("Nesterov"))
    with caplog.at_level(logging.WARNING, "blobmem"):
        second.restore(path)
    assert "was written by SGD, whose history Nesterov takes for its own" in caplog.text
    tools.same(tools.history(second), tools.history(first))


def test_a_type_with_another_number_of_arrays(noisy, refused):
    refused(
        snapshot_of(noisy(update=fields("Adam"))), "8 history arrays, expected 4 for the 4 parameters of .* under SGD"
    )


def test_state_without_a_model_keeps_the_parameters(noisy, tools):
    first = noisy()
    first.step(2)
    path = without_sidecar(first)
    state = read_binary(path, caffe_pb2.SolverState)
    state.ClearField("learned_net")
    with open(path, "wb") as file:
        file.write(state.SerializeToString())
    second = noisy()
    before = tools.weights(second)
    second.restore(path)
    assert second.iter == 2
    tools.same(tools.weights(second), before)
    tools.same(tools.history(second), tools.history(first))


def test_gradients_are_written_if_asked_for(noisy):
    solver = noisy("snapshot_diff: true")
    solver.step(1)
    model = read_binary(solver.snapshot().replace("solverstate", "caffemodel"), caffe_pb2.NetParameter)
    layer = next(layer for layer in model.layer if layer.name == "i1")
    np.testing.assert_array_equal(layer.blobs[1].diff, solver.net.params["i1"][1].cpu_diff())


# -------------------------------------------------------------------- files that do not fit


@pytest.fixture
def refused(noisy, tools):
    """`refused(path, message)`: restoring raises, and neither values nor counters have changed."""

    def check(path, message):
        solver = noisy()
        solver.step(1)
        before = tools.weights(solver), tools.history(solver)
        with pytest.raises(NetError, match=message):
            solver.restore(path)
        assert solver.iter == 1
        assert [net.state.iteration for net in (solver.net, *solver.test_nets)] == [1, 2, 3]
        tools.same(tools.weights(solver), before[0])
        tools.same(tools.history(solver), before[1])
        twin = noisy()
        twin.step(1)
        assert run_on(solver, tools, 3) == run_on(twin, tools, 3)

    return check


def snapshot_of(solver, steps=4):
    solver.step(steps)
    return solver.snapshot()


def test_missing(refused, tmp_path):
    refused(tmp_path / "s_iter_4.solverstate", "there is no file")


def test_truncated_model_without_sidecar(noisy, refused):
    solver = noisy()
    solver.step(4)
    path = without_sidecar(solver)
    model = path.replace("solverstate", "caffemodel")
    with open(model, "rb") as file:
        data = file.read()
    with open(model, "wb") as file:
        file.write(data[:-7])
    refused(path, r"s_iter_4\.caffemodel")


def test_truncated_model_with_sidecar(noisy, refused):
    path = snapshot_of(noisy())
    model = path.replace("solverstate", "caffemodel")
    with open(model, "r+b") as file:
        file.truncate(100)
    refused(path, "were not written together")


def test_caffemodel_given_instead_of_the_state(noisy, refused):
    path = snapshot_of(noisy())
    refused(path.replace("solverstate", "caffemodel"), "it looks like a net")


def test_another_nets_state(noisy, tools, refused, tmp_path):
    other = tmp_path / "other.prototxt"
    other.write_text(tools.noisy_text.replace("num_output: 8", "num_output: 9"))
    text = f'net: "{other}" base_lr: 0.1 lr_policy: "fixed" snapshot_prefix: "{tmp_path}/other"\n'
    refused(snapshot_of(noisy(text=text)), r"other_iter_4\.solverstate: history of parameter 0 of layer 'i1'")


@pytest.mark.parametrize("name", ["history/1", "iter"])
def test_hostile_hdf5_state(noisy, refused, tmp_path, name):
    path = without_sidecar(stepped(noisy("snapshot_format: HDF5")))
    message = replace_with("external link", path, name, tmp_path)
    refused(path, rf"s_iter_4\.solverstate\.h5: /{name}: .*{message}")


def test_hostile_hdf5_model(noisy, refused, tmp_path):
    path = without_sidecar(stepped(noisy("snapshot_format: HDF5")))
    message = replace_with("huge", path.replace("solverstate", "caffemodel"), "data/i2/0", tmp_path)
    refused(path, rf"s_iter_4\.caffemodel\.h5: /data/i2/0 .*{message}")


def test_hdf5_with_sidecar_of_another_snapshot(noisy, refused):
    solver = stepped(noisy("snapshot_format: HDF5"))
    path = solver.snapshot()
    with open(path, "ab") as file:
        file.write(b"more")
    refused(path, "were not written together")


def test_another_nets_model(noisy, tools, refused, tmp_path):
    solver = noisy()
    solver.step(4)
    path = without_sidecar(solver)
    model = path.replace("solverstate", "caffemodel")
    net = read_binary(model, caffe_pb2.NetParameter)
    layer = next(layer for layer in net.layer if layer.name == "i2")
    del layer.blobs[1:]
    with open(model, "wb") as file:
        file.write(net.SerializeToString())
    refused(path, r"s_iter_4\.caffemodel: layer 'i2'")
