import os

import h5py
import numpy as np
import pytest

from blobmem import NetError
from blobmem.data.hdf5_write import new_file, old_file

X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
Y = np.arange(10, dtype=np.int64) * 7


def test_rows_are_appended_and_written_again(tmp_path):
    path = tmp_path / "deep" / "a.h5"
    with new_file(path) as file:
        file.put(0, {"x": X[:4], "y": Y[:4]})
        file.put(4, {"x": X[4:7], "y": Y[4:7]})
    with old_file(path) as file:
        file.put(5, {"x": X[5:], "y": Y[5:]})
    with h5py.File(path) as file:
        assert file["x"].dtype == np.float32 and file["y"].dtype == np.int64
        assert np.array_equal(file["x"], X) and np.array_equal(file["y"], Y)
    assert os.listdir(path.parent) == ["a.h5"]
    with old_file(path) as file:
        file.put(2, {"x": X[:0]})
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], X[:2])


def test_a_new_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.h5"
    with pytest.raises(KeyError), new_file(path) as file:
        file.put(0, {"x": X})
        raise KeyError
    assert os.listdir(tmp_path) == []
    path.write_text("before")
    with pytest.raises(NetError, match=r"a\.h5 exists already: remove it"), new_file(path):
        pass
    with pytest.raises(KeyError), new_file(path, overwrite=True):
        raise KeyError
    assert path.read_text() == "before"
    with new_file(path, overwrite=True) as file:
        file.put(0, {"x": X})
    assert h5py.is_hdf5(path)
    with pytest.raises(NetError, match="exists already and is no file"), new_file(tmp_path, overwrite=True):
        pass


def test_rows_that_do_not_fit(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["fixed"] = X
        file.create_group("group")
    cases = (("x", 10, X[:, :1]), ("x", 11, X), ("fixed", 10, X), ("group", 10, X), ("none", 10, X))
    with old_file(path) as file:
        file.put(0, {"x": X, "y": Y})
        for name, start, values in cases:
            with pytest.raises(NetError, match=rf"a\.h5: (dataset )?'{name}' should"):
                file.put(start, {name: values, "y": Y})
        with pytest.raises(NetError, match=r"a\.h5: there cannot be a dataset 'x/inner'"):
            file.put(0, {"x/inner": X})
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], X) and np.array_equal(file["y"], Y)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(NetError, match=r"a\.h5 cannot be written: (Not a directory|File exists)"),
        new_file(tmp_path / "file" / "a.h5"),
    ):
        pass
    with pytest.raises(NetError, match=r"gone\.h5 cannot be written"), old_file(tmp_path / "gone.h5"):
        pass
