"""All solver types and policies against what the original Caffe computed in 30 steps, on all devices."""

from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU

from blobmem.devices import SimulatedDevice
from blobmem.proto import caffe_pb2
from blobmem.proto.text import parse_text
from blobmem.solvers import get_solver

CASES = sorted((Path(__file__).parents[1] / "data" / "solvers").glob("*.npz"))
TOLERANCE = 1e-4  # of the largest value


def solver_of(case, **options):
    param = parse_text(str(case["solver"]), caffe_pb2.SolverParameter)
    param.net_param.CopyFrom(parse_text(str(case["net"]), caffe_pb2.NetParameter))
    solver = get_solver(param, seed=1, **options)
    for key in case.files:
        if key.startswith("param/"):
            _, layer, index = key.split("/")
            solver.net.params[layer][int(index)].data[...] = case[key]
        elif key.startswith("in/"):
            solver.net.blobs[key[3:]].data[...] = case[key]
    return solver


def test_all_cases_are_there():
    assert len(CASES) == 16


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_matches_caffe(path, device):
    case = np.load(path)
    solver = solver_of(case, device=device)
    assert solver.type.lower() == path.stem.split("-")[0]
    losses = []
    solver.add_callback(on_iteration=lambda iteration, loss: losses.append(loss))
    solver.step(30)
    np.testing.assert_allclose(losses, case["losses"], rtol=0, atol=TOLERANCE * np.abs(case["losses"]).max())
    for key in case.files:
        if key.startswith("final/"):
            _, layer, index = key.split("/")
            values = solver.net.params[layer][int(index)].cpu_data()
            np.testing.assert_allclose(values, case[key], rtol=0, atol=TOLERANCE * np.abs(case[key]).max(), err_msg=key)


AWAY = pytest.mark.parametrize("make_device", [pytest.param(SimulatedDevice, id="simulated"), EMULATED, GPU])


@AWAY
@pytest.mark.parametrize("name", ["sgd-momentum-l2", "nesterov", "adagrad", "rmsprop", "adadelta", "adam"])
def test_no_byte_leaves_the_device_but_the_loss(name, make_device):
    device = make_device()
    case = np.load(next(path for path in CASES if path.stem == name))
    solver = solver_of(case, device=device)
    solver.step(2)
    before = device.statistics.snapshot()
    solver.step(5)
    spent = device.statistics - before
    assert spent.dtoh_bytes == 5 * 4  # a float for each iteration's loss
    assert spent.htod_bytes == 0
    assert spent.allocator_calls == 0


@AWAY
def test_clipping_reads_one_number(make_device):
    device = make_device()
    solver = solver_of(np.load(next(path for path in CASES if path.stem == "sgd-clip")), device=device)
    solver.step(2)
    before = device.statistics.snapshot()
    solver.step(5)
    spent = device.statistics - before
    assert spent.dtoh_copies == 5 * 2  # loss and norm
    assert spent.dtoh_bytes == 5 * (4 + 8)
    assert spent.allocator_calls == 0
