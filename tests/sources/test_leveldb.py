import builtins
import gc
import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from blobmem.data.database import kind_of, open_records
from blobmem.errors import NetError

plyvel = pytest.importorskip("plyvel", reason="plyvel, an optional extra, is not installed")


def fill(path, values, **options):
    with_defaults = {"create_if_missing": True, "error_if_exists": True, **options}
    database = plyvel.DB(str(path), **with_defaults)
    for start in range(0, len(values), 300):
        with database.write_batch() as batch:
            for number, value in enumerate(values[start : start + 300], start):
                batch.put(b"%08d" % number, value)
    database.compact_range()
    database.close()
    return str(path)


@pytest.fixture
def hundred(tmp_path):
    return fill(tmp_path / "db", [b"value %d" % n for n in range(100)])


def keys(records, position, count):
    return [int(key) for key, _ in records.read(position, count)]


def test_reads_in_key_order_and_begins_again_at_the_end(hundred):
    assert kind_of(hundred) == "LEVELDB"
    records = open_records(hundred)
    assert keys(records, 0, 4) == [0, 1, 2, 3]
    assert keys(records, 4, 200) == [n % 100 for n in range(4, 204)]
    assert [value for _, value in records.read(99, 2)] == [b"value 99", b"value 0"]
    assert len(records) == 100


@pytest.mark.parametrize("position", [0, 3, 31, 32, 33, 95, 96, 99, 100, 250, 10**12 + 7])
@pytest.mark.parametrize("before", [None, 0, 40, 98])
def test_any_position_after_any_other(hundred, position, before):
    records = open_records(hundred)
    if before is not None:
        keys(records, before, 3)
    assert keys(records, position, 2) == [position % 100, (position + 1) % 100]
    assert len(records) == 100


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64])
def test_the_number_of_records_is_counted_once(tmp_path, count, monkeypatch):
    records = open_records(fill(tmp_path / "db", [b"x"] * count))
    assert len(records) == count
    monkeypatch.setattr(type(records._database), "walk", None)
    assert len(records) == count
    assert len(records._database._keys) == -(-count // 32)


def test_readers_share_one_database_which_closes_with_the_last(hundred):
    first, second = open_records(hundred), open_records(os.path.join(hundred, "..", "db"))
    assert keys(first, 0, 3) == [0, 1, 2]
    assert keys(second, 50, 2) == [50, 51]
    assert keys(first, 3, 2) == [3, 4]
    del first
    gc.collect()
    assert keys(second, 52, 1) == [52]
    with pytest.raises(plyvel.Error):
        plyvel.DB(hundred)
    del second
    gc.collect()
    plyvel.DB(hundred).close()


def test_readers_in_garbage_close_their_iterators_before_their_database(hundred):
    for _ in range(5):
        records = open_records(hundred)
        reading = records.items(5)
        next(reading)
        cycle = [records, reading, records._walk, records._database, records._database._handle]
        cycle.append(cycle)
        del records, reading, cycle
        gc.collect()
    plyvel.DB(hundred).close()


def test_a_database_that_something_else_has_open(hundred):
    other = plyvel.DB(hundred)
    with pytest.raises(NetError, match=f"{hundred} cannot be read as a LevelDB database: another process has it open"):
        open_records(hundred)
    other.close()
    assert keys(open_records(hundred), 1, 1) == [1]


def test_an_empty_one_and_a_folder_that_is_none(tmp_path):
    plyvel.DB(str(tmp_path / "empty"), create_if_missing=True).close()
    with pytest.raises(NetError, match="empty holds no records"):
        open_records(tmp_path / "empty")
    (tmp_path / "CURRENT").write_text("MANIFEST-000007\n")
    with pytest.raises(NetError, match="damaged: Corruption: CURRENT points to a non-existent file"):
        open_records(tmp_path)


def tables(path):
    return sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith((".ldb", ".sst")))


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "block": lambda data: flip(data, len(data) // 2),
    "last": lambda data: flip(data, len(data) - 4500),
    "index": lambda data: flip(data, len(data) - 100),
    "magic": lambda data: flip(data, len(data) - 1),
    "gone": None,
}


@pytest.fixture(scope="module")
def several_tables(tmp_path_factory):
    """A database of several tables."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tables") / "db"
    path = fill(folder, [rng.bytes(3000) for _ in range(1500)], write_buffer_size=2**20, max_file_size=2**20)
    assert len(tables(path)) > 1
    assert len(list(open_records(path).read(0, 1500))) == 1500
    gc.collect()
    return path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("table", [0, -1])
def test_damage_anywhere_is_an_error(several_tables, tmp_path, damage, table):
    path = shutil.copytree(several_tables, str(tmp_path / "db"))
    file = tables(path)[table]
    if DAMAGES[damage] is None:
        os.remove(file)
    else:
        with open(file, "rb") as old:
            data = DAMAGES[damage](old.read())
        with open(file, "wb") as new:
            new.write(data)
    for _ in range(2):
        with pytest.raises(NetError, match=path):
            list(open_records(path).read(0, 1501))
    with pytest.raises(NetError, match=path):
        len(open_records(path))


def test_a_single_damaged_table_is_not_an_empty_database(tmp_path):
    path = fill(tmp_path / "db", [b"x" * 500] * 200)
    (file,) = tables(path)
    os.truncate(file, 1000)
    with pytest.raises(NetError, match="no records, or none that can be read"):
        open_records(path)


def test_a_reader_that_met_an_error_goes_on_where_the_database_is_whole(tmp_path):
    rng = np.random.default_rng(0)
    path = fill(tmp_path / "db", [rng.bytes(3000) for _ in range(1500)], write_buffer_size=2**20, max_file_size=2**20)
    shutil.copytree(path, tmp_path / "whole")
    with open(tables(path)[0], "rb") as old:
        data = flip(old.read(), 10**6)
    with open(tables(path)[0], "wb") as new:
        new.write(data)
    records = open_records(path)
    for _ in range(2):
        assert keys(records, 0, 100) == list(range(100))
        with pytest.raises(NetError, match="checksum"):
            keys(records, 100, 1000)
    assert keys(open_records(tmp_path / "whole"), 100, 1000) == list(range(100, 1100))


def test_an_abandoned_read_does_not_confuse_the_next(hundred):
    records = open_records(hundred)
    assert [int(key) for key, _ in itertools.islice(records.items(2), 2)] == [2, 3]
    assert keys(records, 4, 2) == [4, 5]
    assert keys(records, 3, 2) == [3, 4]


FORKING = """
import os, sys
from blobmem.data.database import open_records
from blobmem.errors import NetError
records = open_records(sys.argv[1])
list(records.read(0, 3))
child = os.fork()
if not child:
    for attempt in (lambda: list(records.read(3, 1)), lambda: open_records(sys.argv[1])):
        try:
            attempt()
        except NetError as error:
            assert "copy its records into an LMDB database" in str(error)
        else:
            os._exit(1)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert [key for key, _ in records.read(3, 1)] == [b"00000003"]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_is_told_to_use_another_kind(hundred):
    subprocess.run([sys.executable, "-c", FORKING, hundred], check=True, timeout=60)


def test_without_plyvel_the_error_says_what_to_install(hundred, monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **options):
        if name == "plyvel":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(NetError, match=r"pip install 'blobmem\[leveldb\]'"):
        open_records(hundred)
