import io

import numpy as np
import pytest
from PIL import Image

from blobmem import TEST, Net, NetError
from blobmem.data.mean import compute, save
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array
from blobmem.proto.text import read_binary, read_net


def test_the_mean_of_bytes_and_of_floats(make):
    items = make.pictures(300, (3, 4, 5))
    progress = []
    mean = compute(make(items), lambda *now: progress.append(now))
    assert mean.records == 300 and mean.image.shape == (3, 4, 5)
    assert np.array_equal(mean.image, items.mean(axis=0))
    assert mean.channels == pytest.approx(items.mean(axis=(0, 2, 3)))
    assert progress == [(100, 300), (200, 300), (300, 300)]
    floats = np.random.default_rng(0).standard_normal((7, 1, 2, 3)).astype(np.float32)
    assert np.allclose(compute(make(floats, "floats")).image, floats.mean(axis=0), rtol=1e-7)


def test_compressed_records_are_decoded(make):
    items = make.pictures(4, (3, 6, 7))
    records = []
    for item in items:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(item[::-1].transpose(1, 2, 0))).save(file, "PNG")
        records.append(caffe_pb2.Datum(encoded=True, data=file.getvalue()))
    assert np.array_equal(compute(make(records)).image, items.mean(axis=0))


def test_the_file_is_as_caffe_writes_it_and_a_mean_file(make, tmp_path):
    items = make.pictures(5, (3, 4, 6))
    path = make(items)
    mean = compute(path)
    save(mean, tmp_path / "mean.binaryproto")
    proto = read_binary(tmp_path / "mean.binaryproto", caffe_pb2.BlobProto)
    assert (proto.num, proto.channels, proto.height, proto.width) == (1, 3, 4, 6) and not proto.HasField("shape")
    assert np.array_equal(blob_array(proto)[0], mean.image.astype(np.float32))
    net = Net(read_net(
        f'layer {{ name: "d" type: "Data" top: "data" transform_param {{ mean_file: "{tmp_path}/mean.binaryproto" }} '
        f'data_param {{ source: "{path}" backend: LMDB batch_size: 5 }} }}'), TEST)  # fmt: skip
    assert np.abs(net.forward()["data"].mean(axis=0)).max() < 1e-4


def test_records_that_have_no_mean(make, tmp_path):
    items = list(make.pictures(3))
    with pytest.raises(NetError, match=r"record b'00000003' of .*mixed is 1 x 4 x 6, and the first one 1 x 4 x 5"):
        compute(make([*items, np.zeros((1, 4, 6), np.uint8)], "mixed"))
    with pytest.raises(NetError, match=r"record b'00000003' of .*torn cannot be used"):
        compute(make([*items, b"\xff\xff"], "torn"))
    with pytest.raises(NetError, match="absent"):
        compute(tmp_path / "absent")
    with pytest.raises(NetError, match=r"no/mean\.binaryproto cannot be written"):
        save(compute(make(items)), tmp_path / "no" / "mean.binaryproto")


def test_leveldb(tmp_path):
    plyvel = pytest.importorskip("plyvel", reason="the leveldb extra is not installed")
    items = np.random.default_rng(0).integers(0, 256, (6, 2, 3, 4), dtype=np.uint8)
    with plyvel.DB(str(tmp_path / "level"), create_if_missing=True) as database:
        for number, item in enumerate(items):
            datum = caffe_pb2.Datum(channels=2, height=3, width=4, data=item.tobytes())
            database.put(b"%08d" % number, datum.SerializeToString())
    assert np.array_equal(compute(tmp_path / "level").image, items.mean(axis=0))
