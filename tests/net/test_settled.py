"""Iterations that are queued as the last one was: which, what they ask for, and that their numbers are those of others."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from late_streams import ORDERS, LateCuda

import blobmem
from blobmem.errors import NetError
from blobmem.memory import SyncedMemory
from blobmem.net import captured
from blobmem.net.settled import Settled
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
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

    def noted(self, iteration):
        loss = repeat(self, iteration)
        found.append(iteration)
        return loss

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
def test_they_access_the_loss_and_nothing_else(device, repeated, memory):
    solver = made(device, memory)
    solver.step(8)
    accessed, access = [], SyncedMemory.access

    def noted(self, *arguments):
        accessed.append(self.name)
        return access(self, *arguments)

    count = len(repeated)
    with mock.patch.object(SyncedMemory, "access", noted):
        solver.step(3)
    assert len(repeated) == count + 3 and accessed == ["loss"] * 3


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
    solver.step(4)
    iteration, count = solver.net.state.iteration, len(repeated)
    device.synchronize()
    device.memcpy_htod(address, np.full(3, 7, np.float32))  # where nobody sees that it is written
    with pytest.raises(NetError, match="label"):
        solver.step(1)
    assert (solver.iter, solver.net.state.iteration, len(repeated)) == (15, iteration, count)
    other.step(4)
    assert params_of(solver) == params_of(other)
    device.synchronize()
    device.memcpy_htod(address, good)
    for one in (solver, other):
        one.step(4)
    assert params_of(solver) == params_of(other)


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
