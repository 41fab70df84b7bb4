"""Training on a GPU: what the driver is asked for in a step, once everything is in place."""

from pathlib import Path

import pytest
from cuda_devices import make_gpu, needs_gpu
from driver_trace import driver_calls, growing

from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import get_solver

pytestmark = [*needs_gpu]

NETS = Path(__file__).parents[1] / "data" / "nets"


def trace(model, steps, **options):
    """The driver's calls in some steps with a test after each, from the third step on; the calls of ours to allocate."""
    param = caffe_pb2.SolverParameter(
        base_lr=5e-4, momentum=0.9, lr_policy="fixed", test_interval=1, test_iter=[2], random_seed=5
    )
    param.net_param.CopyFrom(read_net(model))
    device = make_gpu()
    solver = get_solver(param, device=device, **options)
    solver.step(2)
    device.synchronize()
    before = device.statistics.snapshot()
    with driver_calls() as calls:
        solver.step(steps)
        device.synchronize()
    return calls, (device.statistics - before).allocator_calls


@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
def test_a_residual_net_makes_nothing(share):
    calls, allocations = trace(NETS / "resnet_small.prototxt", 3, share=share)
    assert any(name.startswith("cuLaunchKernel") for name in calls)
    assert growing(calls) == {} and allocations == 0


@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
def test_lenet_fed_from_databases_makes_nothing(lenet, share):
    steps = 70  # 64 batches travel at a time
    calls, allocations = trace(lenet, steps, share=share, train_batch=64, test_batches=[100])
    assert any(name.startswith("cuMemcpyHtoD") for name in calls)
    assert growing(calls) == {} and allocations == 0
