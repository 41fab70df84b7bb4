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
    with pytest.raises(DeviceError, match="pip install|no CUDA driver|no GPU"):
        blobmem.set_mode_gpu()
    assert devices.default() is HOST


def test_set_device_in_gpu_mode_changes_it_at_once():
    one, two = SimulatedDevice(), SimulatedDevice()
    blobmem.set_device(one)
    blobmem.set_mode_gpu()
    blobmem.set_device(two)
    assert devices.default() is two


def test_parameters_that_another_net_took_elsewhere_and_back_are_found():
    device = SimulatedDevice()
    blobmem.set_default(device)
    train = Net(NET, TRAIN)
    test = Net(NET, TRAIN, params_from=train)
    train.forward(), test.forward()
    blobmem.set_mode_cpu()
    train.forward()  # the parameters are on the host now
    blobmem.set_default(device)
    test.forward()
    assert test.params["ip"][0].device is device and train.device is HOST
    train.forward()


def test_a_net_moved_by_hand_stays_there_with_all_that_share_with_it():
    device = SimulatedDevice()
    net, test = Net(NET, TRAIN), Net(NET, TRAIN)
    test.share_with(net)
    net.move_to(device)
    net.forward(), test.forward()
    assert net.device is test.device is device
    net.move_to(HOST)
    test.forward(), net.forward()
    assert net.device is test.device is HOST and not net.follows


def test_nets_share_after_a_change_of_mode():
    older = Net(NET, TRAIN)
    blobmem.set_default(SimulatedDevice())
    net = Net(NET, TRAIN)
    net.share_with(older)
    net.forward(), older.forward()


def test_one_net_that_stays_keeps_all_that_share_with_it():
    first, second, fixed = Net(NET, TRAIN), Net(NET, TRAIN), Net(NET, TRAIN, device=HOST)
    second.share_with(first)
    fixed.share_with(second)
    blobmem.set_default(SimulatedDevice())
    for net in (first, second, fixed):
        net.forward()
        assert net.device is HOST


def test_nets_of_two_devices_do_not_share():
    net, other = Net(NET, TRAIN, device=HOST), Net(NET, TRAIN, device=SimulatedDevice())
    with pytest.raises(blobmem.SharedBlobError, match="different devices"):
        net.share_with(other)
    net.forward(), other.forward()


def test_a_move_that_fails_changes_nothing():
    device = SimulatedDevice()
    net = Net(NET, TRAIN, device=device)
    net.forward(), net.backward()
    copies = iter(range(3))
    device.fail_at = lambda name, _: name == "memcpy_dtoh" and next(copies) == 2
    with pytest.raises(DeviceError):
        net.move_to(HOST)
    device.fail_at = None
    assert net.device is device and {blob.device for blob in net.blobs.values()} == {device}
    expected = net.blobs["y"].cpu_data().copy()
    net.forward(start="ip")
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), expected)


def test_a_restored_history_goes_where_the_net_is(tmp_path):
    plain, solver = solver_of(), solver_of()
    solver.param.snapshot_prefix = str(tmp_path / "s")
    plain.step(4)
    solver.step(2)
    path = solver.snapshot()
    blobmem.set_default(SimulatedDevice())
    solver.net.forward()
    solver.restore(path)
    solver.step(2)
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, plain.net.params["ip"][0].data)
