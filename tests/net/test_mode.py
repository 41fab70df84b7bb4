"""pycaffe's modes: nets made without a device of their own follow the default device at their next pass."""

import numpy as np
import pytest

import blobmem
from blobmem import TRAIN, DeviceError, Net, SGDSolver, SimulatedDevice, devices
from blobmem.devices import HOST

NET = """
name: "small"
layer { name: "in" type: "DummyData" top: "x" top: "t" dummy_data_param { shape { dim: 4 dim: 6 } shape { dim: 4 dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(devices, "_default", HOST)
    monkeypatch.setattr(devices, "_accelerator", "cuda")


def solver_of(**options):
    param = blobmem.proto.caffe_pb2.SolverParameter(base_lr=0.1, lr_policy="fixed", momentum=0.9, clip_gradients=1)
    param.net_param.CopyFrom(blobmem.proto.text.read_net(NET))
    return SGDSolver(param, seed=5, **options)


def test_a_solver_that_changes_mode_trains_as_one_that_does_not():
    plain = solver_of(device="cpu")
    plain.step(6)
    device = SimulatedDevice()
    blobmem.set_device(device)
    solver = solver_of()
    solver.step(2)
    assert device.statistics.allocations == 0
    blobmem.set_mode_gpu()
    assert device.statistics.allocations == 0, "the net follows at its next pass"
    solver.step(2)
    assert solver.net.device is device and device.statistics.bytes_held > 0
    blobmem.set_mode_cpu()
    solver.step(2)
    assert device.statistics.bytes_held == 0
    for mine, other in zip(solver.net.params["ip"], plain.net.params["ip"], strict=True):
        np.testing.assert_array_equal(mine.data, other.data)
    for mine, other in zip(solver.updater.state_blobs()[:2], plain.updater.state_blobs()[:2], strict=True):
        np.testing.assert_array_equal(mine.data, other.data)


def test_arrays_survive_the_move():
    device = SimulatedDevice()
    blobmem.set_device(device)
    blobmem.set_mode_gpu()
    net = Net(NET, TRAIN)
    net.forward()
    loss = net.blobs["loss"].data
    value = float(loss)
    blobmem.set_mode_cpu()
    net.forward(start="ip")
    assert float(net.blobs["loss"].cpu_data()) == value == float(loss)


def test_a_net_with_a_device_of_its_own_stays_there():
    device = SimulatedDevice()
    net = Net(NET, TRAIN, device=device)
    net.forward()
    blobmem.set_mode_cpu()
    net.forward()
    assert net.device is device
    other = Net(NET, TRAIN, device=device)
    other.share_with(net)
    other.forward()


def test_nets_that_share_stay_together():
    net, fixed = Net(NET, TRAIN), Net(NET, TRAIN, device=HOST)
    net.share_with(fixed)
    blobmem.set_default(SimulatedDevice())
    net.forward()
    assert net.device is HOST is fixed.device


def test_gpu_mode_without_a_gpu():
    blobmem.set_device(3)
    with pytest.raises(DeviceError, match="cuda:3"):
        blobmem.set_mode_gpu()
    assert devices.default() is HOST


def test_set_device_in_gpu_mode_changes_it_at_once():
    one, two = SimulatedDevice(), SimulatedDevice()
    blobmem.set_device(one)
    blobmem.set_mode_gpu()
    blobmem.set_device(two)
    assert devices.default() is two
