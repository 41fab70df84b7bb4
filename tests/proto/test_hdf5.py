"""The HDF5 format: what is written is what Caffe writes, and nothing that is read can do harm."""

import os
import subprocess
import sys
import tracemalloc

import h5py
import numpy as np
import pytest
from hdf5_files import HOSTILE, put_number, put_text, replace_with

from blobmem.errors import NetError
from blobmem.proto import hdf5

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def save(path, items):
    path.write_bytes(hdf5.encode(items))
    return path


# -------------------------------------------------------------------- writing


def test_types_are_those_that_caffe_writes(tmp_path):
    path = save(
        tmp_path / "f.h5",
        [("data", None), ("data/a/0", VALUES), ("data/b", None), ("iter", 7), ("net", "a/b.h5"),
         ("scalar", np.array(2.5)), ("none", np.zeros((0, 3), np.float32))],
    )  # fmt: skip
    with h5py.File(path) as file:
        assert {name: type(item) for name, item in file["data"].items()} == {"a": h5py.Group, "b": h5py.Group}
        dataset = file["data/a/0"]
        assert (dataset.dtype, dataset.shape, dataset.chunks) == (np.float32, (3, 4), None)
        np.testing.assert_array_equal(dataset[()], VALUES)
        assert (file["iter"].dtype, file["iter"].shape, file["iter"][0]) == (np.int32, (1,), 7)
        text = file["net"].id.get_type()
        assert (text.get_class(), text.is_variable_str(), text.get_size()) == (h5py.h5t.STRING, False, 7)
        assert (file["net"].shape, file["net"][()]) == ((), b"a/b.h5")
        assert (file["scalar"].dtype, file["scalar"].shape, file["scalar"][()]) == (np.float64, (), 2.5)
        assert file["none"].shape == (0, 3)


def test_the_format_is_one_that_old_libraries_read(tmp_path):
    data = hdf5.encode([("a", VALUES)])
    assert data.startswith(b"\x89HDF\r\n\x1a\n\0")  # version 0 of what a file begins with


def test_equal_items_are_equal_bytes():
    assert hdf5.encode([("a/0", VALUES), ("i", 1)]) == hdf5.encode([("a/0", VALUES), ("i", 1)])


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a/./b", ".", "a\0b"], ids=repr)
def test_paths_that_hdf5_cannot_hold(path):
    assert not hdf5.is_name(path)
    with pytest.raises(NetError, match="cannot be a path in an HDF5 file"):
        hdf5.encode([(path, VALUES)])


@pytest.mark.parametrize(
    "items",
    [[("a", VALUES), ("a", VALUES)], [("a/0", VALUES), ("a/0/1", VALUES)], [("a/0/1", VALUES), ("a/0", VALUES)],
     [("a", VALUES), ("a", None)]],
    ids=["twice", "below an array", "at a group", "a group at an array"],
)  # fmt: skip
def test_paths_that_clash(items):
    with pytest.raises(NetError, match=f"'/{items[1][0]}' has no place in the HDF5 file"):
        hdf5.encode(items)


# -------------------------------------------------------------------- reading


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "f.h5", [("g/x", VALUES), ("g/deep/y", VALUES), ("iter", 7), ("net", "näme.h5")])


def test_arrays_come_in_the_dtype_wanted(path):
    with hdf5.File(path) as file:
        dataset = file.dataset("g/x")
        assert (dataset.shape, dataset.where) == ((3, 4), f"{path}: /g/x")
        for dtype in (np.float32, np.float64):
            values = dataset.read(dtype)
            assert values.dtype == dtype
            np.testing.assert_array_equal(values, VALUES)


@pytest.mark.parametrize("dtype", [">f4", "<f8", "f2", "i4", ">u2", "i8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (2, 3)}, {"compression": "gzip"}], ids=["plain", "chunks", "gzip"])
def test_any_type_of_number_in_any_layout(tmp_path, dtype, options):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=VALUES.astype(dtype), **options)
    with hdf5.File(tmp_path / "f.h5") as file:
        np.testing.assert_array_equal(file.dataset("x").read(np.float32), VALUES)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0)], ids=str)
def test_small_shapes(tmp_path, shape):
    values = np.full(shape, 5, np.float32)
    with hdf5.File(save(tmp_path / "f.h5", [("x", values)])) as file:
        np.testing.assert_array_equal(file.dataset("x").read(np.float32), values)


def test_groups_numbers_and_strings(path):
    with hdf5.File(path) as file:
        assert file.members("g") == {"deep": True, "x": False}
        assert file.members("g/deep") == {"y": False}
        assert [file.members(name) for name in ("h", "g/x", "iter", "g//deep", "", "g/x/y")] == [None] * 6
        assert file.integer("iter") == 7
        assert file.text("net") == "näme.h5"
        assert file.text("other") is None


def test_numbers_and_strings_as_c_writes_them(tmp_path):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        put_number(file, "iter", 12)
        put_text(file, "net", "a.caffemodel.h5")
        file["plain"] = 5
    with hdf5.File(tmp_path / "f.h5") as file:
        assert (file.integer("iter"), file.text("net"), file.integer("plain")) == (12, "a.caffemodel.h5", 5)


@pytest.mark.parametrize(
    "value, message",
    [(np.zeros(2, np.int32), r"/x has shape \(2,\), expected one whole number"),
     (np.float32(1), "/x is of another type, expected one whole number"),
     (None, "/x is missing")],
    ids=["two", "fraction", "missing"],
)  # fmt: skip
def test_what_is_no_number(tmp_path, value, message):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        if value is not None:
            file["x"] = value
    with hdf5.File(tmp_path / "f.h5") as file, pytest.raises(NetError, match=rf"f\.h5: {message}"):
        file.integer("x")


@pytest.mark.parametrize(
    "value", ["of any length", np.array(b"x" * 70_000), np.array([b"a", b"b"]), 5, h5py.Empty("S3")],
    ids=["variable", "long", "two", "number", "empty"],
)  # fmt: skip
def test_what_is_no_string(tmp_path, value):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"] = value
    with hdf5.File(tmp_path / "f.h5") as file, pytest.raises(NetError, match=r"f\.h5: /x"):
        file.text("x")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arrays_are_refused_before_anything_is_allocated(tmp_path, path, kind):
    message = replace_with(kind, path, "g/x", tmp_path)

    def load():
        with hdf5.File(path) as file:
            dataset = file.dataset("g/x")
            if dataset.shape != (3, 4):
                raise NetError(f"{dataset.where} has shape {dataset.shape}")
            dataset.read(np.float32)

    tracemalloc.start()
    try:
        with pytest.raises(NetError, match=rf"f\.h5: /g/x.*{message}"):
            load()
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_link_on_the_way_is_refused(tmp_path, path):
    with h5py.File(path, "a") as file:
        file["soft"] = h5py.SoftLink("/g")
        file["external"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/g")
    with hdf5.File(path) as file:
        for name in ("soft", "external"):
            with pytest.raises(NetError, match=f"'{name}' is a link to another place"):
                file.dataset(f"{name}/x")
            with pytest.raises(NetError, match=f"'{name}' is a link to another place"):
                file.members(name)


def test_links_among_the_members_are_not_followed(path):
    with h5py.File(path, "a") as file:
        file["g/loop"] = h5py.SoftLink("/g")
    with hdf5.File(path) as file:
        assert file.members("g") == {"deep": True, "loop": False, "x": False}


# -------------------------------------------------------------------- files


def test_which_files_are_hdf5(tmp_path, path):
    copy, text = tmp_path / "f.caffemodel", tmp_path / "text"
    copy.write_bytes(path.read_bytes())
    text.write_text("layer {}")
    assert [hdf5.is_hdf5(name) for name in (path, str(copy), "absent.h5")] == [True] * 3
    assert [hdf5.is_hdf5(name) for name in (text, tmp_path, "absent")] == [False] * 3


@pytest.mark.parametrize("data", [b"", b"layer {}", b"\x89HDF\r\n\x1a\n", b"\x0a\x03abc"], ids=repr)
def test_foreign_files(tmp_path, data):
    (tmp_path / "f.h5").write_bytes(data)
    with pytest.raises(NetError, match=r"f\.h5 cannot be read as HDF5"):
        hdf5.File(tmp_path / "f.h5")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(NetError, match=r"there is no file .*absent\.h5"):
        hdf5.File(tmp_path / "absent.h5")
    with pytest.raises(NetError, match="is a folder"):
        hdf5.File(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_nothing_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.h5")
    assert not hdf5.is_hdf5(tmp_path / "pipe")
    with pytest.raises(NetError, match="is a pipe or a device"):
        hdf5.File(tmp_path / "pipe.h5")


def read_all(path):
    with hdf5.File(path) as file:
        for name in ("g/x", "g/deep/y"):
            dataset = file.dataset(name)
            if dataset.shape != (3, 4):
                raise NetError("shape")
            dataset.read(np.float32)
        file.members("g")
        return file.integer("iter"), file.text("net")


def test_cut_short_anywhere(tmp_path, path):
    data, cut = path.read_bytes(), tmp_path / "cut.h5"
    assert read_all(path) == (7, "näme.h5")
    for size in range(0, len(data), 97):
        cut.write_bytes(data[:size])
        with pytest.raises(NetError):
            read_all(cut)


def test_damage_is_an_error_or_other_values_but_never_another_exception(tmp_path, path):
    data, damaged = path.read_bytes(), tmp_path / "damaged.h5"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), 20):
            changed[at] ^= 1 << rng.integers(8)
        damaged.write_bytes(changed)
        try:
            read_all(damaged)
        except NetError:
            refused += 1
    assert refused > 20


def test_h5py_is_not_imported_before_it_is_needed():
    code = "import sys, blobmem; assert 'h5py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
