"""Parameters in HDF5 files, in Caffe's layout, from anybody."""

import tracemalloc

import h5py
import numpy as np
import pytest
from cuda_devices import DEVICES
from device_tools import write
from hdf5_files import HOSTILE, replace_with

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice
from blobmem.net import weights

NET = """
name: "n"
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer {
  name: "first" type: "InnerProduct" bottom: "x" top: "h" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 3 weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }
}
layer { name: "relu" type: "ReLU" bottom: "h" top: "h" }
layer {
  name: "second" type: "InnerProduct" bottom: "h" top: "i" param { name: "w" } param { }
  inner_product_param { num_output: 3 weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }
}
layer {
  name: "inception/1x1" type: "InnerProduct" bottom: "i" top: "y"
  inner_product_param { num_output: 4 weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } }
}
layer {
  name: "third" type: "InnerProduct" bottom: "h" top: "j" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 3 }
}
"""
OWN = NET.replace('param { name: "w" }', "").replace('param { name: "b" }', "").replace("param { }", "")


def make(text=NET, seed=1, **options):
    return Net(text, TRAIN, seed=seed, **options)


def values(net):
    return {f"{name}/{i}": blob.cpu_data().copy() for name, blobs in net.params.items() for i, blob in enumerate(blobs)}


def same(one, two):
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


def groups_and_arrays(path):
    groups, arrays = [], {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: groups.append(name) if isinstance(item, h5py.Group) else arrays.update({name: item[()]})
        )
    return groups, arrays


@pytest.fixture
def path(tmp_path):
    make().save_hdf5(tmp_path / "f.h5")
    return tmp_path / "f.h5"


# -------------------------------------------------------------------- writing


def test_layout_is_caffes(tmp_path):
    net = make()
    net.save_hdf5(tmp_path / "f.h5")
    groups, arrays = groups_and_arrays(tmp_path / "f.h5")
    layers = [f"data/{name}" for name in net.layer_names]
    assert set(groups) == {"data", "data/inception", *layers}
    expected = values(net)
    for shared in ("second/0", "third/0", "third/1"):  # with their owner only
        del expected[shared]
    same(arrays, {f"data/{name}": array for name, array in expected.items()})


def test_gradients_are_written_with_every_layer(tmp_path):
    net = make()
    for index, entry in enumerate(net.learnable):
        entry.blob.diff[...] = index + 1
    net.save_hdf5(tmp_path / "f.h5", True)
    arrays = groups_and_arrays(tmp_path / "f.h5")[1]
    diffs = {f"diff/{name}/{i}": b.cpu_diff() for name, blobs in net.params.items() for i, b in enumerate(blobs)}
    same({name: array for name, array in arrays.items() if name.startswith("diff/")}, diffs)
    assert {float(array.flat[0]) for array in diffs.values()} == {1, 2, 3, 4, 5}


def test_a_device_writes_what_it_holds(tmp_path):
    device = SimulatedDevice()
    net = make(device=device)
    blob = net.params["first"][0]
    write(device, blob.mutable_gpu_data(), 1, blob.nbytes)
    net.save_hdf5(tmp_path / "f.h5")
    stored = groups_and_arrays(tmp_path / "f.h5")[1]["data/first/0"]
    assert stored.tobytes() == b"\1" * blob.nbytes


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_precision_is_the_nets(tmp_path, dtype):
    net = make(dtype=dtype)
    net.save_hdf5(tmp_path / "f.h5")
    assert {array.dtype for array in groups_and_arrays(tmp_path / "f.h5")[1].values()} == {np.dtype(dtype)}
    for target in (np.float32, np.float64):
        other = make(seed=2, dtype=target)
        other.load_hdf5(tmp_path / "f.h5")
        same(values(other), {name: array.astype(target) for name, array in values(net).items()})


def test_names_that_clash_are_an_error_and_leave_the_old_file(tmp_path):
    net = make(OWN.replace('"second"', '"first/0"'))
    (tmp_path / "f.h5").write_text("old")
    with pytest.raises(NetError, match=r"'/data/first/0' has no place in the HDF5 file"):
        net.save_hdf5(tmp_path / "f.h5")
    assert [item.name for item in tmp_path.iterdir()] == ["f.h5"]
    assert (tmp_path / "f.h5").read_text() == "old"


@pytest.mark.parametrize("name", ["", "/absolute", "a//b", "a/."])
def test_names_that_hdf5_cannot_hold(tmp_path, name):
    with pytest.raises(NetError, match=r"cannot be a path in an HDF5 file"):
        make(OWN.replace('name: "second"', f'name: "{name}"')).save_hdf5(tmp_path / "f.h5")
    make(NET.replace('name: "relu"', f'name: "{name}"')).save_hdf5(tmp_path / "f.h5")  # it has nothing to write


def test_folder_that_is_missing(tmp_path):
    with pytest.raises(NetError, match="create the folder"):
        make().save_hdf5(tmp_path / "absent" / "f.h5")


# -------------------------------------------------------------------- reading


@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("text", [NET, OWN], ids=["shared", "own"])
def test_there_and_back(tmp_path, make_device, text):
    net, other = make(text, device=make_device()), make(text, seed=2, device=make_device())
    other.forward()
    net.save_hdf5(tmp_path / "f.h5")
    other.load_hdf5(tmp_path / "f.h5")
    same(values(other), values(net))
    inputs = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(other.forward(x=inputs)["y"], net.forward(x=inputs)["y"])


def test_old_bytes_on_the_device_are_not_fetched(path):
    device = SimulatedDevice()
    net = make(device=device)
    net.forward()
    net.params["first"][0].mutable_gpu_data()
    before = device.statistics.snapshot()
    net.load_hdf5(path)
    assert (device.statistics - before).dtoh_copies == 0


def test_every_door_takes_either_kind_of_file(tmp_path, path):
    expected = values(make())
    (tmp_path / "f.caffemodel").write_bytes(path.read_bytes())
    make().save(tmp_path / "binary")
    for name in ("f.h5", "f.caffemodel", "binary"):
        net = make(seed=2)
        net.copy_trained_layers_from(tmp_path / name)
        same(values(net), expected)
        same(values(Net(NET, str(tmp_path / name), TEST)), expected)
    assert weights.load(make(), path) == ["first", "second", "inception/1x1", "third"]


def test_a_file_of_a_net_that_shares_is_not_for_one_that_does_not(path):
    with pytest.raises(
        NetError, match=r"f\.h5: /data/second has parameters \['1'\], \['0', '1'\] in net 'n' \(TRAIN\)"
    ):
        make(OWN).load_hdf5(path)


def test_a_file_of_a_net_that_does_not_share_is_for_one_that_does(tmp_path):
    net = make(OWN)
    net.save_hdf5(tmp_path / "f.h5")
    other = make()
    other.load_hdf5(tmp_path / "f.h5")
    np.testing.assert_array_equal(other.params["first"][0].cpu_data(), net.params["third"][0].cpu_data())  # the last


def test_other_layers_keep_theirs(path):
    net = make(NET.replace("inception/1x1", "inception").replace('"first"', '"renamed"'), seed=2)
    before = values(net)
    net.load_hdf5(path)
    after = values(net)
    for name in ("renamed/0", "inception/0", "inception/1"):
        np.testing.assert_array_equal(after[name], before[name])
    np.testing.assert_array_equal(after["second/1"], values(make())["second/1"])


def test_a_layer_named_like_the_beginning_of_another(tmp_path):
    text = NET.replace('name: "second"', 'name: "inception"')
    net, other = make(text), make(text, seed=2)
    net.save_hdf5(tmp_path / "f.h5")
    other.load_hdf5(tmp_path / "f.h5")
    same(values(other), values(net))


def test_gradients_in_a_file_are_left(tmp_path):
    net = make()
    net.params["first"][0].diff[...] = 5
    net.save_hdf5(tmp_path / "f.h5", write_diff=True)
    other = make(seed=2)
    other.load_hdf5(tmp_path / "f.h5")
    assert (other.params["first"][0].cpu_diff() == 0).all()


# -------------------------------------------------------------------- files that do not fit


def refused(path, message, net=None):
    net = net or make(seed=2)
    before = values(net)
    with pytest.raises(NetError, match=message):
        net.load_hdf5(path)
    same(values(net), before)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_change_nothing_and_name_the_dataset(tmp_path, path, kind):
    message = replace_with(kind, path, "data/inception/1x1/0", tmp_path)
    if kind == "group":
        message = "has parameters"
    tracemalloc.start()
    try:
        refused(path, rf"f\.h5: /data/inception/1x1.*{message}")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_shapes_are_compared_with_the_nets(path):
    net = make(NET.replace("num_output: 4", "num_output: 6"), seed=2)
    refused(
        path, r"f\.h5: /data/inception/1x1/0 has shape \(4, 3\), \(6, 3\) in net 'n' \(TRAIN\); rename the layer", net
    )


def change(path, function):
    with h5py.File(path, "a") as file:
        function(file)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda f: f["data/first"].create_dataset("2", data=1.0), r"/data/first has parameters \['0', '1', '2'\], \['0', '1'\]"),
        (lambda f: f["data/first"].move("1", "one"), r"/data/first has parameters \['0', 'one'\]"),
        (lambda f: f.__delitem__("data/first/1"), r"/data/first has parameters \['0'\], \['0', '1'\]"),
        (lambda f: f["data/first"].clear(), r"/data/first has parameters \[\], \['0', '1'\]"),
        (lambda f: f.move("data", "weights"), "has no group /data"),
    ],
    ids=["too many", "renamed", "too few", "none", "no data"],
)  # fmt: skip
def test_other_numbers_of_parameters(path, function, message):
    change(path, function)
    refused(path, message)


def test_data_behind_a_link(path, tmp_path):
    change(path, lambda f: f.move("data", "weights"))
    with h5py.File(path, "a") as file:
        file["data"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/data")
    refused(path, r"f\.h5: /data: 'data' is a link to another place")


def test_cut_short(path):
    data = path.read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(path, r"f\.h5 cannot be read as HDF5")


def test_a_binary_caffemodel_named_as_hdf5(tmp_path):
    make().save(tmp_path / "f.h5")
    refused(tmp_path / "f.h5", r"f\.h5 cannot be read as HDF5")


def test_missing(tmp_path):
    refused(tmp_path / "f.h5", r"there is no file .*f\.h5")
