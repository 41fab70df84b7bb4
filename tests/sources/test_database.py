import gc
import itertools
import os
import subprocess
import sys
import threading

import lmdb
import numpy as np
import pytest

from blobmem.data import lmdb_file
from blobmem.data.database import Records, kind_of, open_records
from blobmem.data.datum import RecordError
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


@pytest.mark.parametrize("seed", range(4))
def test_databases_of_any_history_read_as_lmdb_reads_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = str(tmp_path / "db")
    sizes = [(0, 50), (0, 3000), (1500, 20000), (0, 9000)][seed]
    with lmdb.open(path, map_size=2**26) as environment:
        for _ in range(5):
            with environment.begin(write=True) as transaction:
                for key in rng.integers(0, 600, 300):
                    if rng.random() < 0.3:
                        transaction.delete(b"%05d" % key)
                    else:
                        transaction.put(b"%05d" % key * int(1 + key % 30), rng.bytes(rng.integers(*sizes)))
        with environment.begin() as transaction:
            expected = list(transaction.cursor())
    records = Records(path)
    assert len(records) == len(expected) > 100
    assert list(records.read(0, len(expected))) == expected
    for position in rng.integers(0, len(expected), 20).tolist():
        assert list(records.read(position, 1)) == [expected[position]]


def test_leaves_that_lie_near_one_another_are_read_together_ever_more(make, monkeypatch):
    reads, read = [], lmdb_file._read_at
    monkeypatch.setattr(lmdb_file, "_read_at", lambda *args: reads.append(args[2] // 4096) or read(*args))
    path = make(
        [b"%d" % n * 200 for n in range(8000)]
    )  # in transactions of 1000, which leave gaps that later ones fill
    records = Records(path)
    assert max(reads) == 1
    assert keys(records, 0, 8000) == list(range(8000))
    leaves = os.path.getsize(os.path.join(path, lmdb_file.DATA_FILE)) // 4096
    assert max(reads) == 512 and sum(count > 1 for count in reads) < 12 and sum(reads) < 2 * leaves


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
from blobmem.data import lmdb_file
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_does_not_move_its_parents_place(make):
    path = make([b"%05d" % n * 400 for n in range(400)])
    subprocess.run([sys.executable, "-c", RACING, path], check=True, timeout=60)


RACING = """
import os, sys
from blobmem.data import lmdb_file
from blobmem.data.database import Records
records = Records(sys.argv[1])
child = os.fork()
good = all(value == key[3:] * 400 for _ in range(20) for key, value in records.read(0, 400))
if not child:
    os._exit(not good)
assert good and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_files_are_closed_with_their_readers(ten):
    psutil = pytest.importorskip("psutil")

    def files():
        return [file.path for file in psutil.Process().open_files() if file.path == os.path.join(ten, "data.mdb")]

    readers = [Records(ten) for _ in range(3)]
    assert len(files()) == 3
    del readers
    gc.collect()
    assert files() == []


def test_other_code_may_have_it_open(ten):
    with lmdb.open(ten, readonly=True, lock=False):
        assert keys(Records(ten), 3, 2) == [3, 4]


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
        (lambda data: data[:100], "cannot be opened as an LMDB database: data.mdb ends within its header"),
        (lambda data: b"\xff" * len(data), "cannot be opened as an LMDB database: data.mdb has not the header"),
        (lambda data: data[: len(data) - 4096], "cut short"),
        (lambda data: data[: 2 * 4096], "cut short"),
        (lambda data: data[:20] + b"\2" + data[21:], "its format has version 2, not 1"),
        (lambda data: data[:16] + data[16:20][::-1] + data[20:], "another kind of machine"),
        (lambda data: data[:12] + data[16:], "another kind of machine"),
        (lambda data: data[:40] + b"\1\2\3\4" + data[44:], "its header is damaged"),
    ],
    ids=["empty", "start", "noise", "page", "half", "version", "swapped", "narrow", "pagesize"],
)
def test_a_damaged_file_is_an_error_that_names_it(ten, change, said):
    damage(ten, change)
    with pytest.raises(NetError, match=said) as raised:
        keys(Records(ten), 0, 1)
    assert ten in str(raised.value)


def test_pages_that_lead_nowhere_are_an_error(ten):
    # the roots of the two versions of the main tree (a 48-byte record from 88 in each meta page ends with them)
    damage(ten, lambda data: b"".join((data[:128], b"\x77" * 8, data[136:4224], b"\x77" * 8, data[4232:])))
    with pytest.raises(NetError, match="damaged: it refers to page 8608480567731124087 of 3"):
        keys(Records(ten), 0, 1)


def page_of(path, wanted):
    """Number of the first page whose bytes say so."""
    with open(os.path.join(path, "data.mdb"), "rb") as file:
        data = file.read()
    return next(n for n in range(2, len(data) // 4096) if wanted(data[4096 * n : 4096 * (n + 1)]))


def test_a_damaged_page_stops_the_reading_where_it_is(make):
    values = [b"%04d" % n * 200 for n in range(100)]
    path = make(values)
    page = page_of(path, lambda page: b"0050" * 200 in page)
    first = next(n for n in range(100) if page == page_of(path, lambda page, n=n: values[n] in page))
    damage(path, lambda data: data[: 4096 * page] + b"\xee" + data[4096 * page + 1 :])
    records = Records(path)
    for _ in range(2):
        assert len(list(records.read(0, first))) == first
        with pytest.raises(NetError, match=f"{path} is damaged: page {page} is not what it should be"):
            list(records.read(first, 1))
        with pytest.raises(NetError, match=f"page {page}"):
            list(records.read(99, 1))


def test_a_damaged_record_leaves_the_others_readable(make):
    path = make([b"%04d" % n * 2000 for n in range(10)])
    page = page_of(path, lambda page: page[16:].startswith(b"0003"))
    damage(path, lambda data: data[: 4096 * page] + b"\xee" + data[4096 * page + 1 :])
    records = Records(path)
    found = list(itertools.islice(records.items(0), 12))
    assert [int(key) for key, _ in found] == [*range(10), 0, 1]
    assert [int(key) for key, value in found if isinstance(value, RecordError)] == [3]
    assert f"page {page}" in str(found[3][1])
    with pytest.raises(NetError, match=f"record b'00000003' of {path} cannot be used: page {page}"):
        list(records.read(2, 3))
    assert keys(records, 4, 2) == [4, 5]


def test_a_database_cut_short_while_it_is_read_is_an_error(make):
    path = make([b"%04d" % n * 2000 for n in range(50)])
    records = Records(path)
    list(records.read(0, 5))
    os.truncate(os.path.join(path, "data.mdb"), 20 * 4096)
    with pytest.raises(NetError, match="cut short since it was opened"):
        list(records.read(5, 45))


FUZZED = {"small": lambda n: 30, "mixed": lambda n: n * 977 % 9000}


@pytest.mark.parametrize("kind", FUZZED)
def test_any_damage_is_an_error_or_other_bytes(make, kind):
    path = make([bytes([n % 256]) * FUZZED[kind](n) for n in range(200)])
    rng = np.random.default_rng(5)
    with open(os.path.join(path, "data.mdb"), "rb") as file:
        good = file.read()
    stopped = 0
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 3, 10])):
            place = (
                4096 * rng.integers(len(bad) // 4096) + rng.integers(64)
                if rng.random() < 0.7
                else rng.integers(len(bad))
            )
            bad[place] = rng.choice([0, 255, rng.integers(256), bad[place] ^ (1 << rng.integers(8))])
        damage(path, lambda _, bad=bad: bad)
        try:
            records = Records(path)
            for _, value in itertools.islice(records.items(0), min(len(records), 500)):
                assert isinstance(value, bytes | RecordError)
        except NetError as error:
            assert path in str(error)
            stopped += 1
    assert stopped > 5


def test_a_missing_file_and_one_without_records(make, tmp_path):
    with pytest.raises(NetError, match=r"no LMDB database: there is no .*data\.mdb"):
        Records(tmp_path)
    with pytest.raises(NetError, match="holds no records"):
        Records(make([]))


def test_values_of_several_for_one_key_are_refused(tmp_path):
    with lmdb.open(str(tmp_path), map_size=2**20, max_dbs=0) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(b"a", b"1")
        environment.sync(True)
    damage(str(tmp_path), lambda data: b"".join((data[:92], b"\4", data[93:4188], b"\4", data[4189:])))
    with pytest.raises(NetError, match="DUPSORT"):
        Records(tmp_path)


def test_a_named_database_is_no_record(tmp_path):
    with lmdb.open(str(tmp_path), map_size=2**20, max_dbs=1) as environment:
        environment.open_db(b"name")
    with pytest.raises(NetError, match="record b'name' .* no plain record"):
        list(Records(tmp_path).read(0, 1))


def test_the_kind_of_a_database_shows_in_its_files(ten, tmp_path):
    assert kind_of(ten) == "LMDB"
    assert kind_of(tmp_path) is None
    assert kind_of(tmp_path / "absent") is None
    (tmp_path / "CURRENT").write_text("MANIFEST-000001\n")
    assert kind_of(tmp_path) == "LEVELDB"
    assert isinstance(open_records(ten), Records)
