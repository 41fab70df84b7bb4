import os

import h5py
import numpy as np
import pytest

from blobmem import NetError
from blobmem.data.hdf5 import Tables


@pytest.fixture
def make(tmp_path):
    def build(name="a.h5", options=None, **datasets):
        path = str(tmp_path / name)
        with h5py.File(path, "w") as file:
            for key, values in datasets.items():
                file.create_dataset(key, data=values, **(options or {}))
        return path

    return build


X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
Y = np.arange(10, dtype=np.int64) * 7


def read(tables, file, rows, dtype=np.float32):
    out = [np.full((len(rows), *shape), -1, dtype) for shape in tables.shapes]
    tables.read(file, np.asarray(rows), out)
    return out


STORED = {
    "plain": (None, np.float32), "double": (None, np.float64), "big-endian": (None, ">f8"), "half": (None, np.float16),
    "bytes": (None, np.uint8), "longs": (None, np.int64), "chunked": ({"chunks": (3, 2, 1)}, np.float32),
    "packed": ({"chunks": (4, 2, 3), "compression": "gzip"}, np.int16),
}  # fmt: skip


@pytest.mark.parametrize("case", STORED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f4", "f8"])
def test_rows_in_any_order_whatever_they_are_stored_as(make, case, dtype):
    options, stored = STORED[case]
    tables = Tables([make(options=options, x=X.astype(stored))], ["x"])
    assert tables.rows == [10] and tables.shapes == [(2, 3)]
    for rows in ([3, 4, 5], [0], [9, 0, 4], [7, 2], list(range(10)), [1, 3, 8], []):
        (found,) = read(tables, 0, rows, dtype)
        assert np.array_equal(found, X[rows])


def test_several_datasets_and_files(make):
    paths = [make("a.h5", x=X, y=Y), make("b.h5", x=-X[:4], y=-Y[:4]), make("c.h5", x=X[:0], y=Y[:0])]
    tables = Tables(paths, ["y", "x"])
    assert tables.rows == [10, 4, 0] and tables.shapes == [(), (2, 3)]
    for file, rows in ((0, [8, 1]), (1, [3, 0]), (0, [2, 3])):
        y, x = read(tables, file, rows)
        sign = -1 if file else 1
        assert np.array_equal(y, sign * Y[rows]) and np.array_equal(x, sign * X[rows])


def test_truth_values_are_0_and_1_and_groups_are_found(make, tmp_path):
    path = make(b=np.array([True, False, True]))
    with h5py.File(path, "a") as file:
        file["deep/er"] = np.arange(3)
    assert [a.tolist() for a in read(Tables([path], ["b", "deep/er"]), 0, [2, 1])] == [[1, 0], [2, 1]]


def test_what_is_wrong_is_named(make, tmp_path):
    path = make(x=X, y=Y[:9], s=np.array([b"a"] * 10), one=np.float32(3), z=X + 1j)
    cases = {
        "has no dataset 'q': a top is filled from the dataset of its name": ["q"],
        r"the datasets differ in their number of rows: 'x' 10, 'y' 9": ["x", "y"],
        "dataset 's': expected numbers": ["s"],
        "dataset 'z': expected numbers": ["z"],
        "dataset 'one': expected rows": ["one"],
    }
    for message, names in cases.items():
        with pytest.raises(NetError, match=message) as raised:
            Tables([path], names)
        assert path in str(raised.value)
    with pytest.raises(NetError, match=r"b\.h5: a row of 'x' is 2 x 4, and in .*a\.h5 it is 2 x 3"):
        Tables([path, make("b.h5", x=np.zeros((3, 2, 4)))], ["x"])
    with pytest.raises(NetError, match="no rows in any file"):
        Tables([make("e.h5", x=X[:0])], ["x"])


def test_files_that_are_none(make, tmp_path):
    with pytest.raises(NetError, match=r"there is no file absent\.h5 \(relative paths start at"):
        Tables(["absent.h5"], ["x"])
    (tmp_path / "text").write_text("text")
    with pytest.raises(NetError, match="text is no HDF5 file"):
        Tables([str(tmp_path / "text")], ["x"])
    path = make(x=np.zeros((1000, 10)))
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(NetError, match=r"a\.h5 cannot be read: truncated file"):
        Tables([path], ["x"])


def test_damage_within_a_file_is_found_when_it_is_read(make):
    path = make(options={"chunks": (5, 2, 3), "compression": "gzip", "fletcher32": True}, x=X)
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(1)
    tables = Tables([path], ["x"])
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + 4)
        file.write(b"\xff" * 8)
    assert np.array_equal(read(Tables([path], ["x"]), 0, [1])[0], X[[1]])
    with pytest.raises(NetError, match=r"a\.h5 is damaged, dataset 'x'"):
        read(tables, 0, [6])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_opens_the_file_for_itself(make):
    tables = Tables([make(x=X)], ["x"])
    read(tables, 0, [0])
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(read(tables, 0, [5, 2])[0], X[[5, 2]]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(read(tables, 0, [4])[0], X[[4]])
