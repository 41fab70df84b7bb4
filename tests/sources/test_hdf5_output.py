import os

import h5py
import numpy as np
import pytest

from blobmem import TEST, Net, NetError, SimulatedDevice
from blobmem.proto.text import read_net


def net(path, shapes=("2 3", "2"), device=None, **options):
    dims = " ".join(f'layer {{ name: "{n}" type: "Input" top: "{n}" input_param {{ shape {{ {_dims(shape)} }} }} }}'
                    for n, shape in zip("xy", shapes, strict=True))  # fmt: skip
    output = f'layer {{ name: "out" type: "HDF5Output" bottom: "x" bottom: "y" hdf5_output_param {{ file_name: "{path}" }} }}'
    return Net(read_net(dims + output), TEST, source="net.prototxt", device=device, **options)


def _dims(shape):
    return " ".join(f"dim: {n}" for n in shape.split())


def run(made, number):
    """One pass with values that tell it from others."""
    made.blobs["x"].data[...] = np.arange(made.blobs["x"].count).reshape(made.blobs["x"].shape) + 100 * number
    made.blobs["y"].data[...] = number
    made.forward()


def contents(path):
    with h5py.File(path) as file:
        assert sorted(file) == ["data", "label"]
        return file["data"][...], file["label"][...]


@pytest.mark.parametrize("device", [None, SimulatedDevice(2**24)], ids=["host", "simulated"])
def test_every_pass_adds_its_rows_and_the_file_is_whole_in_between(tmp_path, device):
    path = tmp_path / "out.h5"
    made = net(path, device=device)
    assert not path.exists()
    for passes in range(1, 4):
        run(made, passes - 1)
        data, label = contents(path)
        # as Caffe's: four axes
        assert data.shape == (2 * passes, 3, 1, 1) and label.shape == (2 * passes, 1, 1, 1)
        assert data.dtype == np.float32
    assert np.array_equal(data[:, 0].ravel(), [0, 3, 100, 103, 200, 203])
    assert label.ravel().tolist() == [0, 0, 1, 1, 2, 2]
    assert os.listdir(tmp_path) == ["out.h5"]


def test_a_new_net_begins_a_new_file(tmp_path):
    path = tmp_path / "out.h5"
    for _ in range(2):
        made = net(path, dtype=np.float64)
        for number in range(2):
            run(made, number)
        data, _ = contents(path)
        assert len(data) == 4 and data.dtype == np.float64


def test_building_leaves_an_old_file_alone(tmp_path):
    path = tmp_path / "out.h5"
    path.write_text("old")
    made = net(path)
    made.needs()
    assert path.read_text() == "old"


def test_a_restored_layer_writes_behind_the_rows_of_its_snapshot(tmp_path):
    path = tmp_path / "out.h5"
    made = net(path)
    run(made, 0)
    state = made.layers[-1].state_dict()
    assert state == {"rows": 2}
    run(made, 1)
    again = net(path)
    again.layers[-1].load_state_dict(state)
    run(again, 7)
    assert contents(path)[1].ravel().tolist() == [0, 0, 7, 7]
    with pytest.raises(NetError, match="expected 0 or more"):
        again.layers[-1].load_state_dict({"rows": -1})


def test_what_it_writes_hdf5_data_reads(tmp_path):
    path = tmp_path / "out.h5"
    made = net(path, ("2 3 4 5", "2"))
    for number in range(3):
        run(made, number)
    (tmp_path / "list.txt").write_text(str(path))
    back = Net(read_net(
        'layer { name: "d" type: "HDF5Data" top: "data" top: "label" '
        f'hdf5_data_param {{ source: "{tmp_path}/list.txt" batch_size: 6 }} }}'), TEST)  # fmt: skip
    outputs = back.forward()
    assert outputs["data"].shape == (6, 3, 4, 5) and outputs["label"].shape == (6, 1, 1, 1)
    assert outputs["label"].ravel().tolist() == [0, 0, 1, 1, 2, 2]


def test_batches_may_change_and_items_may_not(tmp_path):
    path = tmp_path / "out.h5"
    made = net(path)
    run(made, 0)
    for name, shape in (("x", (3, 3)), ("y", (3,))):
        made.blobs[name].reshape(*shape)
    run(made, 1)
    assert len(contents(path)[0]) == 5
    made.blobs["x"].reshape(3, 4)
    with pytest.raises(
        NetError, match=r"layer 'out' \(HDF5Output\), file_name: .*dataset 'data' should have rows of 4 x 1 x 1"
    ):
        run(made, 2)
    assert len(contents(path)[0]) == len(contents(path)[1]) == 5


def test_single_values_are_a_row_each(tmp_path):
    made = net(tmp_path / "out.h5", ("", ""))
    for number in range(3):
        run(made, number)
    assert contents(tmp_path / "out.h5")[0].shape == (3, 1, 1, 1)


def test_a_pass_that_failed_is_written_once(tmp_path):
    path = tmp_path / "out.h5"
    made = net(path)
    run(made, 0)
    with h5py.File(path), pytest.raises(NetError, match=r"out\.h5 cannot be written"):
        run(made, 1)
    run(made, 2)
    assert contents(path)[1].ravel().tolist() == [0, 0, 2, 2]


def test_a_file_that_somebody_shortened(tmp_path):
    path = tmp_path / "out.h5"
    made = net(path)
    run(made, 0)
    with h5py.File(path, "a") as file:
        file["label"].resize(1, axis=0)
    with pytest.raises(
        NetError, match="dataset 'label' should have rows of 1 x 1 x 1, 2 of them or more, and is 1 x 1"
    ):
        run(made, 1)


def test_wrong_use(tmp_path):
    with pytest.raises(NetError, match="file_name: expected the name of a file to write, got ''"):
        net("")
    with pytest.raises(NetError, match="file_name: expected the name of a file"):
        net(tmp_path)
    with pytest.raises(NetError, match=r"bottom: expected two blobs of one batch size"):
        net(tmp_path / "a.h5", ("2 3", "3"))
