import gzip
import os
import struct

import numpy as np
import pytest

from blobmem.data import mnist
from blobmem.data.database import Records
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2


def idx(values):
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def data(count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)


TRAIN, TEST = data(1200, 0), data(30, 1)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for prefix, (pictures, labels) in (("train", TRAIN), ("t10k", TEST)):
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pictures), 1))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def test_both_databases_as_caffe_has_them(source, tmp_path):
    reports = []
    made = mnist.convert(source, tmp_path / "out", lambda *report: reports.append(report))
    assert [(d.path.name, d.records) for d in made] == [("mnist_train_lmdb", 1200), ("mnist_test_lmdb", 30)]
    assert reports == [(1000, 1230), (1230, 1230)]
    for database, (pictures, labels) in zip(made, (TRAIN, TEST), strict=True):
        assert os.listdir(database.path) == ["data.mdb"]
        assert database.nbytes == (database.path / "data.mdb").stat().st_size < 1.3 * pictures.nbytes + 40000
        for number, (key, value) in enumerate(Records(database.path).read(0, len(labels))):
            assert key == b"%08d" % number
            expected = caffe_pb2.Datum(
                channels=1, height=28, width=28, data=pictures[number].tobytes(), label=int(labels[number])
            )
            assert value == expected.SerializeToString()
    assert sorted(os.listdir(tmp_path / "out")) == ["mnist_test_lmdb", "mnist_train_lmdb"]


def test_existing_databases_stay_unless_told(source, tmp_path):
    mnist.convert(source, tmp_path)
    with pytest.raises(NetError, match=r"mnist_train_lmdb exists already.*overwrite"):
        mnist.convert(source, tmp_path)
    (source / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(30, 3, np.uint8)))
    mnist.convert(source, tmp_path, overwrite=True)
    _, value = next(Records(tmp_path / "mnist_test_lmdb").read(0, 1))
    assert caffe_pb2.Datum.FromString(value).label == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_nothing(source, tmp_path, error):
    def stop(done, total):
        raise error

    with pytest.raises(error):
        mnist.convert(source, tmp_path / "out", stop)
    assert os.listdir(tmp_path / "out") == []


GOOD = idx(TEST[0])


@pytest.mark.parametrize(
    "content, said",
    [
        (gzip.compress(GOOD)[:-900], "damaged or cut short"),
        (gzip.compress(GOOD)[:5000] + b"\0" * 500 + gzip.compress(GOOD)[5500:], "damaged or cut short"),
        (GOOD[:-900], r"should hold 30 x 28 x 28 values, 23520, but has only 22620"),
        (GOOD + b"\0", "but has more"),
        (GOOD[:10], "ends within its header"),
        (b"", "no idx file of unsigned bytes"),
        (b"\x1f\x8b", "damaged or cut short"),
        (b"<html>404</html>", "no idx file of unsigned bytes"),
        (idx(TEST[1]), r"holds labels \(1 axes\), expected images \(3 axes\)"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(50), "but has only 50"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28), "holds nothing"),
        (struct.pack(">4B3I", 0, 0, 0xD, 3, 1, 1, 1) + bytes(4), "no idx file of unsigned bytes"),
        (idx(TEST[0][:20]), "20 images and .* 30 labels"),
    ],
    ids=["cut", "hole", "short", "long", "header", "empty", "magic", "html", "labels", "huge", "none", "floats", "few"],
)
def test_damaged_files_are_named_and_nothing_is_made(source, tmp_path, content, said):
    file = source / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(content)
    with pytest.raises(NetError, match=said) as raised:
        mnist.convert(source, tmp_path / "out")
    assert str(file) in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_missing_files_and_folders(source, tmp_path):
    (source / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(NetError, match=r"there is no train-labels-idx1-ubyte\.gz in .*give the folder"):
        mnist.convert(source, tmp_path / "out")
    with pytest.raises(NetError, match="there is no folder .*nowhere"):
        mnist.convert(tmp_path / "nowhere", tmp_path / "out")


def test_names_with_a_dot_are_found_too(source, tmp_path):
    (source / "train-labels-idx1-ubyte").rename(source / "train-labels.idx1-ubyte")
    assert len(mnist.convert(source, tmp_path / "out")) == 2
