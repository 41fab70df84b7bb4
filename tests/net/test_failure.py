"""A pass that fails half-way: another try takes the same records, and nobody reads what it left in shared memory."""

import h5py
import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, OutOfDeviceMemory, SharedBlobError, SimulatedDevice, build_nets

ROWS = """
layer {{ name: "rows" type: "HDF5Data" top: "x" top: "chosen" hdf5_data_param {{ source: "{list}" batch_size: 4 }} }}
layer {{ name: "f" type: "Filter" bottom: "x" bottom: "chosen" top: "y" }}
layer {{ name: "ip" type: "InnerProduct" bottom: "y" top: "z" inner_product_param {{ num_output: 2 }} }}
layer {{ name: "out" type: "HDF5Output" bottom: "y" bottom: "y" hdf5_output_param {{ file_name: "{out}" }} }}
layer {{ name: "z2" type: "Power" bottom: "z" top: "z2" }}
"""
MLP = """
layer { name: "in" type: "DummyData" top: "x" dummy_data_param { shape { dim: 4 dim: 3 } data_filler { type: "gaussian" } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 5 } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 2 } }
"""


class Stopped(Exception):
    pass


def fail_before(net, name):
    """Have the first pass that comes to this layer fail there."""
    armed = [True]

    def callback(index):
        if net.layer_names[index] == name and armed:
            armed.clear()
            raise Stopped

    net.before_forward(callback)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@pytest.fixture
def rows(tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.arange(24.0).reshape(8, 3)
        file["chosen"] = np.array([1, 0, 0, 0, 1, 1, 1, 1])
    (tmp_path / "list.txt").write_text(f"{tmp_path}/in.h5")
    return ROWS.format(list=tmp_path / "list.txt", out=tmp_path / "out.h5")


def test_another_try_takes_and_writes_the_same_rows(rows, tmp_path, device):
    net = Net(rows, TEST, device=device)
    fail_before(net, "z2")
    with pytest.raises(Stopped):
        net.forward()
    assert (net.layer_dict["rows"].position, net.layer_dict["out"].rows, net.state.iteration) == (0, 0, 0)
    net.forward()
    assert net.blobs["y"].cpu_data().tolist() == [[0, 1, 2]]
    net.forward()
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["data"][:, 0, 0, 0].tolist() == [0, 12, 15, 18, 21]


def test_running_out_once_shapes_are_known_takes_no_record(rows):
    device = SimulatedDevice()
    net = Net(rows, TEST, device=device)
    net.forward()
    net.blobs["z2"].data_view.memory.trim()
    device.fail_at = lambda name, ordinal: name in ("allocate", "grow")
    for memory in {blob.data_view.memory for blob in net.blobs.values()}:
        memory.trim()  # to what the small batch took
    with pytest.raises(OutOfDeviceMemory):
        net.forward()
    device.fail_at = None
    assert net.layer_dict["rows"].position == 4
    assert net.forward()["z2"].shape == (4, 2)


def test_what_an_unfinished_pass_left_is_nobodys(device):
    nets = build_nets(MLP, device=device, seed=1)
    train, test = nets.train, nets.tests[0]
    train.forward()
    fail_before(test, "b")
    with pytest.raises(Stopped):
        test.forward()
    assert test.blobs["b"].data_view.memory.shared
    for net in (train, test):
        with pytest.raises(SharedBlobError, match="did not end"):
            net.blobs["b"].cpu_data()
    with pytest.raises(SharedBlobError, match="did not end"):
        test.forward(start="b")
    alone = Net(MLP, TRAIN, device=device, seed=1)
    alone.forward(), test.forward(), train.forward(), alone.forward()
    np.testing.assert_array_equal(train.blobs["b"].cpu_data(), alone.blobs["b"].cpu_data())
