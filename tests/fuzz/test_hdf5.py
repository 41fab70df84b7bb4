"""Damaged HDF5 files: of data, and of parameters."""

import h5py
import numpy as np
import pytest
from mutations import damage_bytes
from strangers import fuzz, success_or_error

from blobmem import TRAIN, Net, NetError

STORAGE = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "checked": {"chunks": True, "fletcher32": True, "shuffle": True},
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Bytes of files of one table, in every kind of storage and both generations of the format."""
    folder, rng, files = tmp_path_factory.mktemp("tables"), np.random.default_rng(0), []
    for name, options in STORAGE.items():
        for version in ("earliest", "latest"):
            path = folder / f"{name}_{version}.h5"
            with h5py.File(path, "w", libver=version) as file:
                file.create_dataset("x", data=rng.normal(size=(10, 3, 2)).astype(np.float32), **options)
                file.create_dataset("y", data=np.arange(10.0), **options)
            files.append(path.read_bytes())
    return files


def read_batches(path, batches=4):
    listed = path.with_suffix(".txt")
    listed.write_text(f"{path}\n")
    source = f'hdf5_data_param {{ source: "{listed}" batch_size: 4 }}'
    net = Net(f'layer {{ name: "d" type: "HDF5Data" top: "x" top: "y" {source} }}', TRAIN)
    for _ in range(batches):
        net.run_forward()


@fuzz(40)
def test_tables(chance, tables, tmp_path):
    path = tmp_path / "damaged.h5"
    path.write_bytes(damage_bytes(chance.choice(tables), chance))
    with success_or_error():
        read_batches(path)


def test_a_chunk_is_no_larger_than_it_needs_to_be(tmp_path):
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        # all of it zeros, and compressed nothing: to read one row takes the whole chunk
        rows = file.create_dataset("x", (10, 2), np.float32, maxshape=(None, 2), chunks=(2**28, 2), compression="gzip")
        assert rows.chunks == (2**28, 2)
        file["y"] = np.zeros(10)
    with pytest.raises(NetError, match=r"bomb\.h5, dataset 'x': lies in chunks of 2147483648 bytes, more than its 80"):
        read_batches(path)


def test_rows_without_number_are_not_allocated(tmp_path):
    path = tmp_path / "wide.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 2**50), np.float32, chunks=(1, 2**16))
        file["y"] = np.zeros(10)
    with pytest.raises(NetError, match="layer 'd'.*would take more than 64 TiB"):
        read_batches(path)


NET = """layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 4 } }"""


@fuzz(40)
def test_models_are_taken_whole_or_not_at_all(chance, tmp_path):
    net, path = Net(NET, TRAIN, seed=1), tmp_path / "damaged.caffemodel.h5"
    before = [blob.cpu_data().copy() for blob in net.params["a"]]
    net.save_hdf5(path)
    path.write_bytes(damage_bytes(path.read_bytes(), chance))
    taken = False
    with success_or_error():
        net.copy_from(path)
        taken = True
    assert taken or all(np.array_equal(old, blob.cpu_data()) for old, blob in zip(before, net.params["a"], strict=True))


@pytest.mark.parametrize("place", ["data", "data/a"])
def test_a_name_that_is_no_text(tmp_path, place):
    net, path = Net(NET, TRAIN, seed=1), tmp_path / "names.caffemodel.h5"
    net.save_hdf5(path)
    with h5py.File(path, "a") as file:
        file[place].create_group(b"\xff\xfe")
    with pytest.raises(NetError, match=rf"names\.caffemodel\.h5: /{place} cannot be read, the file is damaged"):
        net.copy_from(path)
