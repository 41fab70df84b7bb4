"""Solvers whose nets' arrays take turns: the same training to the bit, and all that is shown and written of it."""

import logging
from pathlib import Path

import numpy as np
import pytest

from blobmem import SharedBlobError, SimulatedDevice
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import get_solver

NETS = Path(__file__).parents[1] / "data" / "nets"


def made(device, memory, folder, model=NETS / "flatten_alias.prototxt", **options):
    param = caffe_pb2.SolverParameter(
        base_lr=0.01, momentum=0.9, lr_policy="fixed", test_interval=2, test_iter=[2], random_seed=5, display=1,
        max_iter=5, iter_size=2, debug_info=True, snapshot=3, snapshot_prefix=f"{folder}/{memory}",
        snapshot_diff=True,
    )  # fmt: skip
    param.net_param.CopyFrom(read_net(model))
    return get_solver(param, device=device, memory=memory, **options)


@pytest.mark.parametrize("share", [True, False])
def test_all_that_training_says_and_writes_is_the_same(device, tmp_path, caplog, share):
    said, tests, models = [], [], []
    for memory in ("keep", "train"):
        solver, found = made(device, memory, tmp_path, share=share, train_batch=4, test_batches=[6]), []
        solver.add_callback(on_test=lambda result, found=found: found.append(result.outputs.values))
        caplog.clear()
        with caplog.at_level(logging.INFO, "blobmem"):
            solver.solve()
        said.append([record.getMessage().replace(f"/{memory}_", "/") for record in caplog.records])
        tests.append(found)
        models.append([(tmp_path / f"{memory}_iter_{at}.caffemodel").read_bytes() for at in (3, 5)])
    assert said[0] == said[1] and any("[backward]" in line for line in said[0])
    assert len(tests[0]) == len(tests[1]) == 3
    for kept, planned in zip(*tests, strict=True):
        assert {name: values.tolist() for name, values in kept.items()} == {
            name: values.tolist() for name, values in planned.items()
        }
    assert models[0] == models[1]


def test_going_on_from_a_snapshot(tmp_path):
    whole = made(SimulatedDevice(), "train", tmp_path, share=True)
    whole.step(5)
    again = made(SimulatedDevice(), "train", tmp_path, share=True)
    again.restore(tmp_path / "train_iter_3.solverstate")
    again.step(2)
    for one, other in zip(whole.net.learnable, again.net.learnable, strict=True):
        np.testing.assert_array_equal(one.blob.cpu_data(), other.blob.cpu_data())


def test_a_step_that_does_not_fit_changes_nothing(tmp_path):
    device = SimulatedDevice()
    solver = made(device, "train", tmp_path, share=True, train_batch=4, test_batches=[90])
    solver.step(2)
    exact = device.statistics.peak_bytes
    assert exact == device.statistics.bytes_held
    small = made(SimulatedDevice(capacity=exact - 1), "train", tmp_path, share=True, train_batch=4, test_batches=[90])
    with pytest.raises(MemoryError):
        small.step(2)
    assert small.iter == 0
    fits = made(SimulatedDevice(capacity=exact), "train", tmp_path, share=True, train_batch=4, test_batches=[90])
    fits.step(2)
    for one, other in zip(solver.net.learnable, fits.net.learnable, strict=True):
        np.testing.assert_array_equal(one.blob.cpu_data(), other.blob.cpu_data())


def test_what_is_kept_is_there_when_gradients_are_ready(device, tmp_path):
    gradients = {}
    for memory in ("keep", "train"):
        solver = made(device, memory, tmp_path, share=True, keep=["a_tanh"])
        look = lambda solver=solver, memory=memory: gradients.setdefault(memory, solver.net.blobs["a_tanh"].diff.copy())  # noqa: E731
        solver.add_callback(on_gradients_ready=look)
        solver.step(1)
    np.testing.assert_array_equal(gradients["train"], gradients["keep"])
    with pytest.raises(SharedBlobError, match="keep="):
        solver.net.blobs["ip"].cpu_diff()


def test_a_solver_trains(tmp_path):
    with pytest.raises(ValueError, match="'keep' or 'train', not 'inference'"):
        made(SimulatedDevice(), "inference", tmp_path)
