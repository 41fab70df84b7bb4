import gc
import os
import subprocess
import sys
import threading

import pytest

from blobmem.data import database
from blobmem.data.database import Records
from blobmem.errors import NetError


def keys(records, position, count):
    return [int(key) for key, _ in records.read(position, count)]


@pytest.fixture
def ten(make):
    return make([b"value %d" % n for n in range(10)])


def test_reads_in_key_order_and_begins_again_at_the_end(ten):
    records = Records(ten)
    assert len(records) == 10
    assert keys(records, 0, 4) == [0, 1, 2, 3]
    assert keys(records, 4, 13) == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    assert [value for _, value in records.read(9, 2)] == [b"value 9", b"value 0"]


@pytest.mark.parametrize("position", [0, 3, 9, 10, 25, 10**12 + 7])
def test_any_position_after_any_other(ten, position):
    records = Records(ten)
    for before in (0, 5, 9):
        keys(records, before, 3)
        assert keys(records, position, 2) == [position % 10, (position + 1) % 10]


def test_an_abandoned_read_does_not_confuse_the_next(ten):
    records = Records(ten)
    reading = records.read(2, 5)
    next(reading)
    next(reading)
    del reading
    assert keys(records, 4, 2) == [4, 5]
    assert keys(records, 3, 2) == [3, 4]


def test_a_database_of_one_record(make):
    assert keys(Records(make([b"only"])), 5, 3) == [0, 0, 0]


def test_readers_share_one_environment_which_closes_with_the_last(ten):
    import lmdb

    first, second = Records(ten), Records(os.path.join(ten, "..", "db"))
    assert first._environment is second._environment
    assert keys(first, 0, 3) == [0, 1, 2]
    assert keys(second, 5, 2) == [5, 6]
    del first
    gc.collect()
    assert keys(second, 7, 1) == [7]
    with pytest.raises(lmdb.Error):
        lmdb.open(ten, readonly=True, lock=False)
    del second
    gc.collect()
    lmdb.open(ten, readonly=True, lock=False).close()


def test_a_reader_collected_while_another_one_opens_is_closed_later(ten):
    reader = Records(ten)
    with database._lock:
        del reader
        gc.collect()
    again = Records(ten)
    assert again._environment.users == 1


def test_threads_read_one_database_at_once(make):
    path = make([b"%d" % n for n in range(500)])
    failures = []

    def read(start):
        try:
            records = Records(path)
            for position in range(start, start + 3000, 60):
                assert keys(records, position, 60) == [p % 500 for p in range(position, position + 60)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(7 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


FORKING = """
import os, sys
from blobmem.data.database import Records
records = Records(sys.argv[1])
list(records.read(0, 3))
child = os.fork()
if not child:
    seen = [key for key, _ in records.read(3, 2)] + [key for key, _ in Records(sys.argv[1]).read(0, 1)]
    os._exit(0 if seen == [b"00000003", b"00000004", b"00000000"] else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert [key for key, _ in records.read(3, 1)] == [b"00000003"]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_parent_and_forked_child_go_on_reading(ten):
    # in a process of its own: forking one with threads is no good
    subprocess.run([sys.executable, "-c", FORKING, ten], check=True, timeout=60)


def test_opening_writes_nothing(ten):
    assert os.listdir(ten) == ["data.mdb"]
    keys(Records(ten), 0, 1)
    assert os.listdir(ten) == ["data.mdb"]


def damage(path, change):
    file = os.path.join(path, "data.mdb")
    with open(file, "rb") as old:
        data = old.read()
    with open(file, "wb") as new:
        new.write(change(data))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:100], "cannot be opened as an LMDB database"),
        (lambda data: b"\xff" * len(data), "cannot be opened as an LMDB database"),
        (lambda data: data[: len(data) - 4096], "cut short"),
        (lambda data: data[: 2 * 4096], "cut short"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(ten, change, said):
    damage(ten, change)
    with pytest.raises(NetError, match=said) as raised:
        keys(Records(ten), 0, 1)
    assert ten in str(raised.value)


def test_pages_that_lead_nowhere_are_an_error(ten):
    # the roots of the two versions of the main tree (a 48-byte record from 104 in each meta page ends with them)
    damage(ten, lambda data: b"".join((data[:128], b"\x77" * 8, data[136:4224], b"\x77" * 8, data[4232:])))
    with pytest.raises(NetError, match="damaged"):
        keys(Records(ten), 0, 1)


def test_a_missing_file_and_one_without_records(make, tmp_path):
    with pytest.raises(NetError, match=r"no LMDB database: there is no .*data\.mdb"):
        Records(tmp_path)
    with pytest.raises(NetError, match="holds no records"):
        Records(make([]))


def test_a_database_that_other_code_has_open(ten):
    import lmdb

    with lmdb.open(ten, readonly=True, lock=False), pytest.raises(NetError, match="open in this process"):
        Records(ten)
