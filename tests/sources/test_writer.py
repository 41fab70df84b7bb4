import os

import pytest

from blobmem.data import writer
from blobmem.data.database import Records
from blobmem.data.writer import new_database
from blobmem.errors import NetError


def fill(path, count=5, size=10, **options):
    with new_database(path, **options) as database:
        for number in range(count):
            database.put(b"%08d" % number, bytes(size))
    return database


def test_what_is_put_is_what_is_read(tmp_path):
    path = tmp_path / "deep" / "db"
    assert fill(path, 2500).count == 2500
    records = Records(path)
    assert len(records) == 2500
    assert list(records.read(2498, 3)) == [(b"%08d" % n, bytes(10)) for n in (2498, 2499, 0)]
    assert os.listdir(path.parent) == ["db"]


@pytest.mark.parametrize("size", [700, 5000])
def test_the_map_grows_and_the_file_is_no_larger_than_it_must(tmp_path, monkeypatch, size):
    monkeypatch.setattr(writer, "_FIRST_MAP", 65536)
    fill(tmp_path / "db", 2200, size)
    assert len(Records(tmp_path / "db")) == 2200
    file = tmp_path / "db" / "data.mdb"
    # whole pages: five records of 700 bytes in one, one of 5000 in two
    assert file.stat().st_size < 2200 * size * (1.25 if size == 700 else 1.7)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_of_an_interrupted_one(tmp_path, error):
    with pytest.raises(error), new_database(tmp_path / "db") as database:
        for number in range(1500):
            database.put(b"%08d" % number, b"x")
        raise error
    assert os.listdir(tmp_path) == []


def test_errors_of_whoever_writes_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="mine"), new_database(tmp_path / "db"):
        raise FileNotFoundError("mine")
    assert os.listdir(tmp_path) == []


def test_an_existing_database_stays_unless_told(tmp_path):
    path = tmp_path / "db"
    fill(path, 3)
    with pytest.raises(NetError, match="exists already"):
        fill(path, 4)
    assert len(Records(path)) == 3
    with pytest.raises(RuntimeError), new_database(path, overwrite=True) as database:
        database.put(b"a", b"b")
        raise RuntimeError
    assert len(Records(path)) == 3
    fill(path, 4, overwrite=True)
    assert len(Records(path)) == 4
    assert os.listdir(tmp_path) == ["db"]


def test_a_reader_of_the_replaced_one_goes_on_with_what_it_had(tmp_path):
    path = tmp_path / "db"
    fill(path, 3)
    before = Records(path)
    fill(path, 4, overwrite=True)
    assert len(Records(path)) == 4
    assert len(list(before.read(0, 3))) == 3


def test_overwriting_removes_databases_only(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        with pytest.raises(NetError, match="not just an LMDB database"):
            fill(tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "thesis.tex").exists()
    assert (tmp_path / "file").exists()


def test_keys_must_ascend(tmp_path):
    with pytest.raises(ValueError, match="b'1' comes after b'2'"), new_database(tmp_path / "db") as database:
        database.put(b"2", b"")
        database.put(b"1", b"")


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NetError, match="cannot be written"):
        fill(tmp_path / "file" / "db")


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    path = tmp_path / "db"
    fill(path, 3)
    rename = type(path).rename

    def failing(self, target):
        if self.suffix == ".tmp" and target == path:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", failing)
    with pytest.raises(NetError, match="No space left"):
        fill(path, 4, overwrite=True)
    monkeypatch.undo()
    assert len(Records(path)) == 3
    assert os.listdir(tmp_path) == ["db"]
