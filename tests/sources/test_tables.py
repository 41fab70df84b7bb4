import h5py
import numpy as np
import pytest

from blobmem import NetError
from blobmem.data.database import open_records
from blobmem.data.tables import convert
from blobmem.proto import caffe_pb2


@pytest.fixture
def csv(tmp_path):
    def write(text, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def table(path):
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def records(path):
    reader = open_records(path)
    return [(key, caffe_pb2.Datum.FromString(value)) for key, value in reader.read(0, len(reader))]


PLAIN = "1,2.5,-3\n4,5e1,6\n"
NAMED = "x,kind, y\n1,7,2\n\n3,8,4\n"


def test_a_file_without_labels(csv, tmp_path):
    made = convert(csv(PLAIN), tmp_path / "a.h5")
    assert (made.path, made.records) == (tmp_path / "a.h5", 2)
    found = table(tmp_path / "a.h5")
    assert list(found) == ["data"] and found["data"].dtype == np.float32
    assert found["data"].tolist() == [[1, 2.5, -3], [4, 50, 6]]


@pytest.mark.parametrize("label", ["kind", "2", "-2"])
def test_labels_by_name_and_number(csv, tmp_path, label):
    convert(csv(NAMED), tmp_path / "a.hdf5", label=label)
    found = table(tmp_path / "a.hdf5")
    assert found["data"].tolist() == [[1, 2], [3, 4]] and found["label"].tolist() == [7, 8]
    convert(csv(NAMED), tmp_path / "db", label=label)
    (first, one), (second, two) = records(tmp_path / "db")
    assert (first, second) == (b"00000000", b"00000001")
    assert (one.label, list(one.float_data), two.label, list(two.float_data)) == (7, [1, 2], 8, [3, 4])
    assert (one.channels, one.height, one.width) == (2, 1, 1)


def test_a_name_comes_before_a_number(csv, tmp_path):
    convert(csv("2,1\n5,6\n"), tmp_path / "a.h5", label="1", header=True)
    assert table(tmp_path / "a.h5")["label"].tolist() == [6]


def test_headers(csv, tmp_path):
    for number, (header, text, rows) in enumerate(
        ((None, "1,2\n3,4\n", 2), (True, "1,2\n3,4\n", 1), (False, "1,2\n3,4\n", 2), (None, "a,2\n3,4\n", 1))
    ):
        assert convert(csv(text), tmp_path / f"{number}.h5", header=header).records == rows
    with pytest.raises(NetError, match=r"a\.csv:1: column 1: 'a' is no number"):
        convert(csv("a,2\n3,4\n"), tmp_path / "b.h5", header=False)


def test_separators_quotes_and_marks_of_other_systems(csv, tmp_path):
    convert(csv("1;2\r\n3;4\r\n"), tmp_path / "a.h5", separator=";")
    convert(csv('\ufeff"1"\t" 2 "\n3\t4'), tmp_path / "b.h5", separator="\t")
    assert table(tmp_path / "a.h5")["data"].tolist() == table(tmp_path / "b.h5")["data"].tolist() == [[1, 2], [3, 4]]


def test_more_rows_than_are_held_at_once(csv, tmp_path):
    rows = np.random.default_rng(0).integers(-99, 99, (10000, 3))
    source = csv("\n".join(",".join(map(str, row)) for row in rows))
    progress = []
    convert(source, tmp_path / "a.h5", label="1", progress=lambda *now: progress.append(now))
    found = table(tmp_path / "a.h5")
    assert np.array_equal(found["data"], rows[:, 1:]) and np.array_equal(found["label"], rows[:, 0])
    size = source.stat().st_size
    assert len(progress) == 3 and progress[-1] == (size, size) and progress == sorted(progress)
    convert(source, tmp_path / "db", label="1")
    assert [datum.label for _, datum in records(tmp_path / "db")] == rows[:, 0].tolist()


WRONG = {
    "word": ("1,2\n3,four\n", {}, r"a\.csv:2: column 2: 'four' is no number$"),
    "named": ("x,y\n1,2\n3,\n", {}, r"a\.csv:3: column 2 \(y\): '' is no number"),
    "class": ("x,y\n1,cat\n", {"label": "y"}, r"a\.csv:2: column 2 \(y\): 'cat' is no number; classes need numbers"),
    "nan": ("1,nan\n", {"header": False}, "'nan' is no number"),
    "inf": ("1,2\n1,1e39\n", {}, r"a\.csv:2: column 2: '1e39' is no number"),
    "short": ("1,2\n\n3\n", {}, r"a\.csv:3: expected 2 cells as above, got 1"),
    "long": ("1,2\n3,4,5\n", {}, r"a\.csv:2: expected 2 cells as above, got 3"),
    "column": ("x,y\n1,2\n", {"label": "z"}, "no label column 'z' beside others; it has 2: x, y"),
    "zero": ("1,2\n", {"label": "0"}, "no label column '0'"),
    "beyond": ("1,2\n", {"label": "-3"}, "no label column '-3'"),
    "alone": ("1\n2\n", {"label": "1"}, "no label column '1' beside others"),
    "empty": ("\n", {}, r"a\.csv has no rows$"),
    "header": ("x,y\n", {}, "has no rows below its header"),
    "nul": ("1,2\n3,\0\n", {}, r"a\.csv:2: "),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("target", ["a.h5", "db"])
def test_what_is_wrong_is_named_and_nothing_is_left(csv, tmp_path, case, target):
    text, options, message = WRONG[case]
    with pytest.raises(NetError, match=message):
        convert(csv(text), tmp_path / target, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_labels_of_a_database_are_whole(csv, tmp_path):
    source = csv("1,2\n\n1,2.5\n")
    with pytest.raises(NetError, match=r"a\.csv:3: a label in a database is a whole number, got 2\.5"):
        convert(source, tmp_path / "db", label="2")
    convert(source, tmp_path / "a.h5", label="2")
    assert table(tmp_path / "a.h5")["label"].tolist() == [2, 2.5]
    with pytest.raises(NetError, match=r"got 3e\+09"):
        convert(csv("1,3e9\n"), tmp_path / "db", label="2")


def test_what_is_there_is_kept_unless_told(csv, tmp_path):
    source = csv(PLAIN)
    for target in (tmp_path / "a.h5", tmp_path / "db"):
        convert(source, target)
        with pytest.raises(NetError, match="exists already"):
            convert(source, target)
        convert(source, target, overwrite=True)
    with pytest.raises(NetError, match="absent.csv cannot be read"):
        convert(tmp_path / "absent.csv", tmp_path / "c.h5")
