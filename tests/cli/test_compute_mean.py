import numpy as np
import pytest

from blobmem.data.writer import new_database
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array
from blobmem.proto.text import read_binary


@pytest.fixture
def database(tmp_path):
    with new_database(tmp_path / "db") as writer:
        for number in range(4):
            data = bytes([number] * 6 + [10 * number] * 6)
            datum = caffe_pb2.Datum(channels=2, height=2, width=3, data=data)
            writer.put(b"%08d" % number, datum.SerializeToString())
    return tmp_path / "db"


def test_the_mean_is_written_and_printed(blobmem, database, tmp_path):
    target = tmp_path / "mean.binaryproto"
    result = blobmem("compute-mean", database, target)
    assert result.code == 0, result.err
    assert result.events("mean") == [
        {"event": "mean", "records": "4", "shape": "2x2x3", "channel0": "1.5", "channel1": "15", "path": str(target)}
    ]
    mean = blob_array(read_binary(target, caffe_pb2.BlobProto))
    assert np.array_equal(mean, np.repeat([1.5, 15], 6).reshape(1, 2, 2, 3))


def test_without_a_file_it_is_only_printed(blobmem, database, tmp_path):
    result = blobmem("compute-mean", database)
    assert result.code == 0 and "path" not in result.events("mean")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


def test_what_is_no_database(blobmem, tmp_path):
    result = blobmem("compute-mean", tmp_path / "absent", tmp_path / "mean.binaryproto")
    assert result.code == 1 and "absent" in result.err and not (tmp_path / "mean.binaryproto").exists()
