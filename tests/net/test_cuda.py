"""Nets on a CUDA device: room, threads, exactness, moves. On a GPU, and with emulated kernels where that tells anything."""

import gc
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EMULATED, EXACT_GPU, alone_on_gpu, make_gpu, needs_gpu, red_zones
from cuda_emulation import EmulatedCuda

from blobmem import TRAIN, Net, OutOfDeviceMemory, build_nets, devices
from blobmem.devices import HOST
from blobmem.footprint import feed_zeros
from blobmem.net import steps
from blobmem.ops.registry import table
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import get_solver

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
DEVICES = pytest.mark.parametrize("make_device", [EMULATED, EXACT_GPU])

SMALL = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    shape { dim: 6 dim: 3 dim: 8 dim: 8 } shape { dim: 6 } } }
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TEST }
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    shape { dim: 4 dim: 3 dim: 8 dim: 8 } shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }
layer { name: "relu" type: "ReLU" bottom: "bn" top: "bn" }
layer { name: "pool" type: "Pooling" bottom: "bn" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "drop" }
layer { name: "ip" type: "InnerProduct" bottom: "drop" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def solver_of(device, seed=1, text=SMALL, **fields):
    param = caffe_pb2.SolverParameter(
        base_lr=0.01, momentum=0.9, weight_decay=1e-3, lr_policy="fixed", test_iter=[2], test_interval=2, **fields
    )
    param.net_param.CopyFrom(read_net(text))
    return get_solver(param, seed=seed, device=device)


def train(device, seed, steps):
    """The losses and the parameters of a run."""
    solver = solver_of(device, seed)
    losses = []
    solver.add_callback(on_iteration=lambda iteration, loss: losses.append(loss))
    solver.step(steps)
    return losses, [entry.blob.cpu_data().tobytes() for entry in solver.net.learnable]


def a_step(nets):
    nets.tests[0].run_forward()
    nets.train.clear_param_diffs()
    nets.train.run_forward()
    nets.train.run_backward()


def in_threads(*calls):
    """Run calls at once, each in a thread of its own; what they gave."""
    results = {}

    def run(index):
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[index] for index in range(len(calls))]


def come_and_go(device, times):
    def work():
        for _ in range(times):
            a_step(build_nets(SMALL, device=device, seed=3))

    in_threads(*[work] * 4)
    gc.collect()
    device.synchronize()


@DEVICES
def test_nets_that_come_and_go_leave_nothing(make_device):
    device = make_device()
    come_and_go(device, 2)
    assert device.statistics.bytes_held == 0, device.holders()
    assert device.statistics.frees == device.statistics.allocations > 0


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.xdist_group("memory")
def test_free_memory_after_200_nets_is_what_it_was():
    device = make_gpu()
    come_and_go(device, 2)  # modules, and four handles of each library
    assert device.physical_bytes == 0
    before = devices.memory_info(0)[0]
    come_and_go(device, 50)
    assert device.physical_bytes == device.statistics.bytes_held == 0
    if alone_on_gpu():
        assert devices.memory_info(0)[0] > before - 8 * MIB


@DEVICES
def test_threads_compute_what_they_compute_alone(make_device):
    steps = 3 if make_device is EmulatedCuda else 30
    device = make_device()
    alone = [train(device, seed, steps) for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert in_threads(*[lambda seed=seed: train(device, seed, steps) for seed in (1, 2)]) == alone


@DEVICES
def test_two_runs_are_the_same_bits(make_device):
    steps = 3 if make_device is EmulatedCuda else 30
    assert train(make_device(), 5, steps) == train(make_device(), 5, steps)


def limit(device, nbytes):
    if isinstance(device, EmulatedCuda):
        device.capacity = nbytes
    else:
        device.limit = nbytes


@DEVICES
def test_running_out_comes_before_anything_is_written(make_device):
    device = make_device()
    net = Net(SMALL, TRAIN, device=device, seed=3)
    expected = [net.run_forward() for _ in range(2)]
    plan = device.statistics.bytes_held
    del net
    device = make_device()
    limit(device, plan - 1)
    net = Net(SMALL, TRAIN, device=device, seed=3)
    before = device.statistics.snapshot()
    with pytest.raises(OutOfDeviceMemory, match="asked for.*free.*largest holders"):
        net.run_forward()
    change = device.statistics - before
    assert change.bytes_held == change.htod_copies == change.memsets == change.dtod_copies == 0
    assert net.state.iteration == 0
    limit(device, plan)
    assert [net.run_forward() for _ in range(2)] == expected
    assert device.statistics.bytes_held == device.statistics.peak_bytes == plan


def order_of_the_pull_request(model, make_device, batches, **options):
    """A test pass at the smaller batch, then a step at the larger one, in room for exactly the plan."""

    def build(device):
        nets = build_nets(model, device=device, seed=3, train_batch=batches[0], test_batches=[batches[1]], **options)
        for net in (nets.train, *nets.tests):
            feed_zeros(net)
        return nets

    device = make_device()
    nets = build(device)
    nets.train.run_forward()
    nets.train.run_backward()
    nets.tests[0].run_forward()
    plan = device.statistics.bytes_held
    del nets
    gc.collect()
    device = make_device()
    nets = build(device)
    limit(device, plan)
    nets.tests[0].run_forward()
    nets.train.run_forward()
    nets.train.run_backward()
    assert device.statistics.bytes_held == device.statistics.peak_bytes == plan
    moves = device.statistics.moves  # of memories below a chunk, which share one
    assert device.statistics.dtod_bytes < 2 * MIB * max(moves, 1) or red_zones()
    assert moves == 0 or not isinstance(device, EmulatedCuda)
    before = device.statistics.snapshot()
    nets.tests[0].run_forward()
    nets.train.run_forward()
    assert (device.statistics - before).allocator_calls == 0


@DEVICES
def test_the_order_of_the_pull_request(make_device):
    order_of_the_pull_request(SMALL, make_device, (16, 3))


@pytest.mark.gpu
@needs_gpu[1]
def test_the_order_of_the_pull_request_with_caffenet(monkeypatch):
    monkeypatch.chdir(ROOT)  # paths in the model start there
    order_of_the_pull_request(
        ROOT / "models" / "caffenet" / "train_val.prototxt",
        lambda: make_gpu(red_zones=False),
        (256, 50),
        input_shapes={"data": (3, 227, 227)},
    )


@DEVICES
def test_an_op_that_is_missing_runs_on_the_host_and_says_so_once(make_device, monkeypatch):
    device = make_device()
    net = Net(SMALL, TRAIN, device=device, seed=3)
    expected = net.run_forward()
    monkeypatch.delitem(table("cuda"), "relu_forward")
    monkeypatch.setattr(steps, "_told", set())
    with pytest.warns(UserWarning, match="op relu_forward runs on the host, as it has no cuda version"):
        net = Net(SMALL, TRAIN, device=device, seed=3)
        assert net.run_forward() == pytest.approx(expected, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Net(SMALL, TRAIN, device=device, seed=3).run_forward()


@DEVICES
def test_moves_keep_bytes(make_device):
    device = make_device()
    net = Net(SMALL, TRAIN, device=device, seed=3)
    net.run_forward()
    net.run_backward()

    def contents():
        blobs = [
            *net.blobs.values(),
            *net.internals.values(),
            *(blob for blobs in net.params.values() for blob in blobs),
        ]
        return [blob.cpu_data().tobytes() for blob in blobs] + [e.blob.cpu_diff().tobytes() for e in net.learnable]

    before = contents()
    net.move_to(HOST)
    assert contents() == before and {label for label, _ in device.holders()} <= {"workspace"}
    net.move_to(device)
    assert contents() == before
    loss = net.run_forward()
    again = Net(SMALL, TRAIN, device=device, seed=3)
    again.run_forward()
    assert again.run_forward() == loss


@DEVICES
def test_a_step_copies_the_losses_and_nothing_else(make_device):
    device = make_device()
    solver = solver_of(device)
    solver.step(3)
    before = device.statistics.snapshot()
    solver.step(4)  # with two tests of two passes
    spent = device.statistics - before
    assert (spent.htod_copies, spent.allocator_calls, spent.dtod_copies) == (0, 0, 0)
    # a test pass gives its outputs, too, of which the loss is one
    outputs = 2 * 2 if device.compute_stream() is not None else 0
    assert spent.dtoh_copies == 4 + 2 * 2 + outputs and spent.dtoh_bytes == 4 * spent.dtoh_copies


@DEVICES
def test_a_snapshot_goes_on_bit_for_bit(make_device, tmp_path):
    device = make_device()
    solver = solver_of(device, snapshot_prefix=str(tmp_path / "s"))
    solver.step(3)
    path = solver.snapshot()
    solver.step(3)
    again = solver_of(device, seed=9, snapshot_prefix=str(tmp_path / "s"))
    again.restore(path)
    again.step(3)
    for mine, theirs in zip(again.net.learnable, solver.net.learnable, strict=True):
        np.testing.assert_array_equal(mine.blob.cpu_data(), theirs.blob.cpu_data())
