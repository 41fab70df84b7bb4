"""Sharing on or off: the same bits in every loss, accuracy and parameter, over 50 steps with a test every 5.

Fewer on the simulated device, whose ops are the host's, and on the emulated one, whose kernels take their time.
"""

from pathlib import Path

import numpy as np
import pytest
from cuda_devices import DEVICES
from cuda_emulation import EmulatedCuda

from blobmem import SimulatedDevice
from blobmem.devices import HOST
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import get_solver

ROOT = Path(__file__).parents[2]
NETS = ROOT / "tests" / "data" / "nets"


def run(model, share, device, batches, steps=20):
    """Losses, test outputs and parameters of a run."""
    param = caffe_pb2.SolverParameter(
        base_lr=5e-4, momentum=0.9, weight_decay=5e-4, lr_policy="fixed", test_interval=5, test_iter=[2], random_seed=5
    )
    param.net_param.CopyFrom(read_net(model))
    solver = get_solver(param, share=share, device=device, train_batch=batches[0], test_batches=batches[1:])
    losses, tests = [], []
    solver.add_callback(
        on_iteration=lambda iteration, loss: losses.append(loss),
        on_test=lambda result: tests.append({name: values.copy() for name, values in result.outputs.values.items()}),
    )
    solver.step(steps)
    return losses, tests, [entry.blob.cpu_data().copy() for entry in solver.net.learnable], solver


def same(shared, alone):
    assert shared[0] == alone[0]
    assert len(shared[1]) == len(alone[1]) > 0
    for mine, theirs in zip(shared[1], alone[1], strict=True):
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name])
    for mine, theirs in zip(shared[2], alone[2], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(set(shared[0])) > 0.8 * len(shared[0]), "a run that does not learn shows nothing"
    assert any(report.shared for report in shared[3].reports)


@pytest.mark.parametrize("batches", [(8, 4), (4, 9)], ids=["smaller", "larger"])
@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("name", ["resnet_small", "inception_small", "flatten_test_phase", "flatten_alias"])
def test_small_nets(name, make_device, batches):
    model = NETS / f"{name}.prototxt"
    if make_device is EmulatedCuda:
        if batches[0] < batches[1] and name != "flatten_alias":
            pytest.skip("the other order says it")
        steps, batches = 2, (2, 1) if batches[0] > batches[1] else (1, 2)  # kernels take their time there
    else:
        steps = 10 if make_device is SimulatedDevice else 20
    same(run(model, True, make_device(), batches, steps), run(model, False, make_device(), batches, steps))


@pytest.mark.parametrize("batches", [(16, 10), (10, 25)], ids=["smaller", "larger"])
def test_lenet(lenet, batches):
    same(run(lenet, True, HOST, batches), run(lenet, False, HOST, batches))


def test_lenet_on_the_simulated_device(lenet):
    device = SimulatedDevice()
    shared = run(lenet, True, device, (8, 4), steps=10)
    alone = run(lenet, False, HOST, (8, 4), steps=10)
    assert shared[0] == alone[0]
    before = device.statistics.snapshot()
    shared[3].step(10)
    assert (device.statistics - before).allocator_calls == 0
