"""Iterations that are queued as the last one was: which, what they ask for, and that their numbers are those of others."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from late_streams import ORDERS, LateCuda

import blobmem
from blobmem.data import feed
from blobmem.data.writer import new_database
from blobmem.errors import DeviceError, NetError
from blobmem.memory import SyncedMemory
from blobmem.net import captured
from blobmem.net.begun import Begun
from blobmem.net.losses import LossReader
from blobmem.net.settled import Settled
from blobmem.net.steps import Step
from blobmem.net.whole import Whole
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import Solver, base
from blobmem.solvers.update import Updater

NET = """
name: "settled"
layer { name: "data" type: "Input" top: "data" top: "label" include { phase: TRAIN }
  input_param { shape { dim: 3 dim: 2 dim: 4 dim: 4 } shape { dim: 3 } } }
layer { name: "data" type: "Input" top: "data" top: "label" include { phase: TEST }
  input_param { shape { dim: 2 dim: 2 dim: 4 dim: 4 } shape { dim: 2 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { kernel_size: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "drop" }
layer { name: "one" type: "InnerProduct" bottom: "drop" top: "one" param { lr_mult: 1 } param { lr_mult: 2 }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "one" bottom: "label" top: "loss" }
"""
MEMORY = ["keep", "train"]


def made(device, memory="keep", **fields):
    param = caffe_pb2.SolverParameter(
        base_lr=0.1, momentum=0.9, lr_policy="inv", gamma=0.1, power=0.5, random_seed=3, test_iter=[1],
        test_interval=1000, test_initialization=False, **fields,
    )  # fmt: skip
    param.net_param.CopyFrom(read_net(NET))
    solver = blobmem.get_solver(param, device=device, share=True, forward_only_tests=False, memory=memory)
    rng = np.random.default_rng(0)
    for net in (solver.net, *solver.test_nets):
        net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)
        net.blobs["label"].data[...] = rng.integers(0, 4, net.blobs["label"].shape)
    return solver


@pytest.fixture(params=[pytest.param(LateCuda, marks=needs_compiler), EXACT_GPU])
def device(request):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        yield request.param()


@pytest.fixture
def repeated():
    """The numbers of iterations that were queued as the ones before."""
    found, repeat = [], Updater.repeat

    def noted(self, iteration, *how):
        begun = repeat(self, iteration, *how)
        found.append(iteration)
        return begun

    with mock.patch.object(Updater, "repeat", noted):
        yield found


def params_of(solver):
    return [entry.blob.cpu_data().tobytes() for entry in solver.net.learnable]


def never():
    """Meanwhile every iteration asks for everything."""
    return mock.patch.object(Settled, "holds", lambda *_: False)


@pytest.mark.parametrize("memory", MEMORY)
def test_they_begin_when_all_is_captured_and_give_the_same_bits(device, repeated, memory):
    solver, other = made(device, memory), made(device, memory)
    losses = []
    for one in (solver, other):
        one.add_callback(on_iteration=lambda _, loss: losses.append(loss))
    solver.step(9)
    assert repeated[-4:] == [5, 6, 7, 8]
    count = len(repeated)
    with never():
        other.step(9)
    assert len(repeated) == count
    assert losses[:9] == losses[9:] and len(set(losses)) == 9
    assert params_of(solver) == params_of(other)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory", MEMORY)
def test_in_whatever_order_a_device_works(repeated, memory, order):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        solver, other = made(LateCuda(order), memory), made(LateCuda(order), memory)
        solver.step(9)
        assert repeated
        with never():
            other.step(9)
        assert params_of(solver) == params_of(other)


@pytest.mark.parametrize("memory", MEMORY)
def test_they_access_nothing(device, repeated, memory):
    solver = made(device, memory)
    solver.step(8)
    accessed, access = [], SyncedMemory.access

    def noted(self, *arguments):
        accessed.append(self.name)
        return access(self, *arguments)

    count = len(repeated)
    with mock.patch.object(SyncedMemory, "access", noted):
        solver.step(3)
    assert len(repeated) == count + 3 and not accessed


@needs_compiler
@pytest.mark.parametrize("memory", MEMORY)
def test_they_are_one_graph_that_stays_whatever_happens_in_between(memory):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        device = LateCuda()
        solver = made(device, memory)
        solver.step(8)
        graphs, copies = [*device.captured], device.statistics.dtoh_copies
        before = [graph.launched for graph in graphs]
        solver.step(5)
        assert [graph.launched for graph in graphs] == [*before[:-1], before[-1] + 5]
        assert device.statistics.dtoh_copies == copies + 5  # of the loss, by a kernel
        write_a_parameter(solver)
        solver.test_all()
        solver.step(5)
        assert graphs[-1].launched > before[-1] + 5
        assert [graph for graph in device.captured if graph.launched] == graphs  # and the test net's are none yet
        give_it_another_batch(solver)
        solver.step(12)
        assert device.captured[-1] is not graphs[-1] and device.captured[-1].launched > 3


@needs_compiler
def test_where_the_device_refuses_one_graph_there_are_several(repeated, caplog):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        solver, other = made(LateCuda()), made(LateCuda())
        with mock.patch.object(Whole, "_queue", mock.Mock(side_effect=DeviceError("no room"))):
            solver.step(12)
        assert caplog.text.count("cannot be captured as one CUDA graph, and is queued as several: no room") == 1
        assert len(repeated) > 5
        with never():
            other.step(12)
        assert params_of(solver) == params_of(other)


def look_at(name):
    return lambda solver: solver.net.blobs[name].cpu_data()


def write_a_parameter(solver):
    solver.net.params["one"][0].data[0] = 0.5


def clear_a_gradient(solver):
    solver.net.params["one"][1].clear_diff()


def run_it(solver):
    solver.net.run_forward()


def change_a_multiplier(solver):
    solver.net.learnable[0].lr_mult = 0.25


def give_it_another_batch(solver):
    solver.net.blobs["data"].reshape(2, 2, 4, 4)
    solver.net.blobs["label"].reshape(2)
    solver.net.blobs["data"].data[...] = 0.5
    solver.net.blobs["label"].data[...] = [1, 2]


def test_it(solver):
    solver.test_all()


def test_it_twice(solver):
    solver.test_all()
    solver.test_all()


HAPPENINGS = [look_at("data"), look_at("loss"), write_a_parameter, clear_a_gradient, run_it, change_a_multiplier,
              give_it_another_batch, test_it, test_it_twice]  # fmt: skip


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("happen", HAPPENINGS, ids=lambda happen: happen.__qualname__.split(".")[0])
def test_what_happens_in_between_is_seen(device, repeated, memory, happen):
    results = []
    for one in (made(device, memory), made(device, memory)):
        with never() if results else nullcontext():
            losses = []
            one.add_callback(on_iteration=lambda _, loss, losses=losses: losses.append(loss))
            one.step(8)
            count = len(repeated)
            for _ in range(2):
                happen(one)
                one.step(1)
                happen(one)
                one.step(6)
            results.append([losses, params_of(one), one.test_all()[0].loss])
        if len(results) == 1:
            assert count > 2 and len(repeated) > count
    assert results[0] == results[1]


test_it.__test__ = test_it_twice.__test__ = False


@pytest.mark.parametrize("memory", MEMORY)
def test_another_net_that_takes_the_arena_is_seen(device, repeated, memory):
    """It has the same bytes, in which the train net's pass leaves nothing of its own."""
    solver = made(device, memory)
    solver.step(8)
    test, count = solver.test_nets[0], len(repeated)
    loss = test.run_forward()
    solver.step(1)
    assert len(repeated) == count + (memory == "keep" and not test.blobs["one"].data_view.memory.shared)
    solver.step(8)
    assert len(repeated) > count and test.run_forward() != loss


@pytest.mark.parametrize(
    "fields",
    [{"iter_size": 2}, {"clip_gradients": 0.1}, {"debug_info": True, "display": 1}, {"display": 1}],
    ids=lambda fields: min(fields),
)
def test_iterations_of_another_kind_are_never_repeated(device, repeated, fields):
    made(device, **fields).step(8)
    assert not repeated


def test_who_looks_in_the_middle_is_heard(device, repeated):
    solver = made(device)
    solver.step(8)
    seen, count = [], len(repeated)
    solver.add_callback(on_gradients_ready=lambda: seen.append(solver.net.params["one"][0].diff.copy()))
    solver.step(2)
    assert len(repeated) == count and not np.array_equal(*seen)


def test_layers_looked_at_one_by_one_are_not_repeated(device, repeated):
    solver = made(device)
    solver.step(8)
    layers, count = [], len(repeated)
    solver.net.after_forward(layers.append)
    solver.step(2)
    assert len(repeated) == count and len(layers) == 2 * len(solver.net.layers)


@pytest.mark.parametrize("memory", MEMORY)
def test_a_bad_label_is_raised_before_any_update_and_takes_the_pass_back(device, repeated, memory):
    solver = made(device, memory)
    label = solver.net.blobs["label"]
    good, address = label.cpu_data().copy(), label.gpu_data()
    solver.step(8)
    before = params_of(solver)
    solver.step(3)
    with never():
        other = made(device, memory)
        other.step(11)
    assert params_of(solver) == params_of(other) != before
    solver.step(12)
    iteration, count = solver.net.state.iteration, len(repeated)
    device.synchronize()
    device.memcpy_htod(address, np.full(3, 7, np.float32))  # where nobody sees that it is written
    with pytest.raises(NetError, match="label"):
        solver.step(2)
    assert (solver.iter, solver.net.state.iteration, len(repeated)) == (23, iteration, count + 2)
    other.step(12)
    assert params_of(solver) == params_of(other)
    device.synchronize()
    device.memcpy_htod(address, good)
    for one in (solver, other):
        one.step(4)
    assert params_of(solver) == params_of(other)


FED = NET.replace(
    'type: "Input" top: "data" top: "label" include { phase: TRAIN }\n'
    "  input_param { shape { dim: 3 dim: 2 dim: 4 dim: 4 } shape { dim: 3 } }",
    'type: "Data" top: "data" top: "label" include { phase: TRAIN } transform_param { scale: 0.01 }\n'
    '  data_param { source: "SOURCE" batch_size: 3 backend: LMDB }',
)


def fed(device, memory, folder, bad=None, floats=()):
    """A solver fed from 40 records, of which one may have a label of no class, and some may have no bytes."""
    rng = np.random.default_rng(1)
    if not (folder / "lmdb").exists():
        with new_database(folder / "lmdb") as writer:
            for index in range(40):
                data = rng.integers(0, 256, (2, 4, 4), np.uint8).tobytes()
                label = 9 if index == bad else int(rng.integers(4))
                datum = caffe_pb2.Datum(channels=2, height=4, width=4, label=label)
                if index in floats:
                    datum.float_data.extend(np.frombuffer(data, np.uint8).astype(float))
                else:
                    datum.data = data
                writer.put(b"%04d" % index, datum.SerializeToString())
    with mock.patch(f"{__name__}.NET", FED.replace("SOURCE", str(folder / "lmdb"))):
        return made(device, memory)


@pytest.mark.parametrize("memory", MEMORY)
def test_a_bad_record_is_raised_a_few_iterations_late_and_nothing_of_it_stays(device, repeated, memory, tmp_path):
    """Record 31 is of iteration 10; three after it have been queued by then, and are taken back too."""
    solver, other = fed(device, memory, tmp_path, 31), fed(device, memory, tmp_path, 31)
    open_losses, catch_up = [], Solver._catch_up

    def noted(self, most=0):
        open_losses.append(len(self._late))
        catch_up(self, most)

    few = mock.patch.object(base, "_AHEAD", 3)
    with few, mock.patch.object(Solver, "_catch_up", noted), pytest.raises(NetError, match="label 9"):
        solver.step(20)
    # a device may find it before it is asked for the last
    assert repeated[-1] in range(10, 14) and max(open_losses) == 4
    with never(), pytest.raises(NetError, match="label 9"):
        other.step(20)
    for one in (solver, other):
        assert (one.iter, one.net.layers[0].position, one.net.state.iteration) == (10, 30, 10)
    assert params_of(solver) == params_of(other) and solver.smoothed_loss == other.smoothed_loss
    for one in (solver, other):
        one.net.layers[0].position = 33
        one.step(3)
    assert params_of(solver) == params_of(other)


@pytest.mark.parametrize("memory", MEMORY)
def test_what_is_fed_in_units_is_part_of_the_one_graph(device, repeated, memory, tmp_path):
    """Records 70 and 71, of the second time round, have no bytes: they come in units that are not sent as such."""
    with mock.patch.object(feed, "_MOST_TOGETHER", 4):
        solver, other = (fed(device, memory, tmp_path, floats=(30, 31)) for _ in range(2))
        launched, launch = [], Whole.launch
        with mock.patch.object(Whole, "launch", lambda self: (launched.append(solver.iter), launch(self))[1]):
            solver.step(40)
        assert launched[-25:] == [*range(15, 40)] and solver.net.layers[0].position == 120
        with never():
            other.step(40)
    assert params_of(solver) == params_of(other) and solver.smoothed_loss == other.smoothed_loss


@needs_compiler
@pytest.mark.parametrize("memory", MEMORY)
def test_an_iteration_left_out_for_what_another_thread_was_told_is_not_lost(memory, repeated, tmp_path):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        device = LateCuda()
        solver, other = fed(device, memory, tmp_path, 31), fed(device, memory, tmp_path, 31)
        read = Begun.wait

        def told_elsewhere(self):
            loss = read(self)
            if device.faults.found:  # whoever waits for the device is told
                with pytest.raises(NetError, match="label 9"):
                    device.synchronize()
            return loss

        with mock.patch.object(Begun, "wait", told_elsewhere), pytest.raises(NetError, match="another thread"):
            solver.step(20)
        other.step(10)
        assert (solver.iter, solver.net.layers[0].position) == (10, 30)
        assert params_of(solver) == params_of(other)


@pytest.mark.parametrize("steps", [10, 30])
def test_an_interruption_leaves_no_loss_behind(device, repeated, steps):
    solver, other = made(device), made(device)
    solver.step(8)
    wait, count = Begun.wait, []

    def interrupted(self):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return wait(self)

    with mock.patch.object(Begun, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        solver.step(steps)
    assert not solver._late and repeated[-1] == solver.iter - 1
    solver.step(3)
    with never():
        other.step(solver.iter)
    assert params_of(solver) == params_of(other) and solver.smoothed_loss == other.smoothed_loss


@needs_compiler
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("told", [0, 1])
def test_an_interruption_before_the_one_graph_is_queued_changes_nothing(memory, told):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        solver, other = made(LateCuda(), memory), made(LateCuda(), memory)
        solver.step(8)
        launch, count = Step.launch, []

        def interrupted(self, *how):
            count.append(1)
            if len(count) > told:
                raise KeyboardInterrupt
            launch(self, *how)

        with mock.patch.object(Step, "launch", interrupted), pytest.raises(KeyboardInterrupt):
            solver.step(1)
        assert (solver.iter, solver.net.state.iteration) == (8, 8)
        solver.step(3)
        with never():
            other.step(11)
        assert params_of(solver) == params_of(other)


@needs_compiler
def test_an_interruption_once_it_is_queued_is_said_to_have_updated(caplog):
    with mock.patch.multiple(captured, LEAST=1, _RUNS=1):
        solver = made(LateCuda())
        solver.step(8)
        with mock.patch.object(LossReader, "after", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            solver.step(1)
    assert solver.iter == 8 and "an iteration has ended amid its updates" in caplog.text


def test_a_callback_has_the_loss_of_its_iteration(device, repeated):
    solver, found = made(device), []
    solver.add_callback(on_iteration=lambda number, loss: found.append((number, loss, solver.smoothed_loss)))
    solver.step(9)
    assert [number for number, _, _ in found] == [*range(1, 10)] and len(repeated) > 3
    assert all(loss == smoothed for _, loss, smoothed in found)


def test_states_that_never_stay_are_looked_at_ever_less(device):
    solver = made(device)
    ended, collect = [], Settled._collect

    def noted(self, runs):
        ended.append(solver.iter)
        collect(self, runs)

    with mock.patch.object(Settled, "_collect", noted):
        for _ in range(40):
            solver.step(1)
            solver.net.blobs["loss"].cpu_data()
    assert 3 <= len(ended) <= 6


@needs_compiler
@pytest.mark.parametrize("memory", MEMORY)
def test_what_was_done_once_before_these_schedules_were_made_is_no_part_of_the_one_graph(memory):
    with mock.patch.object(captured, "LEAST", 100):  # what is done once is a piece by itself
        device = LateCuda()
        solver, other = made(device, memory), made(device, memory)
        for one in (solver, other):
            one.step(2)
            one.net.reseed(8)
        count = len(device.captured)
        solver.step(6)
        assert len(device.captured) == count + 1
        with never():
            other.step(6)
        assert params_of(solver) == params_of(other)
