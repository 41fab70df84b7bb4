import h5py
import numpy as np
import pytest

from blobmem import TEST, Net, NetError
from blobmem.data.database import open_records
from blobmem.data.features import extract
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net


@pytest.fixture
def net(make):
    items = make.pictures(6, (2, 3, 4))
    made = Net(read_net(
        'layer { name: "d" type: "Data" top: "data" top: "label" '
        f'data_param {{ source: "{make(items)}" backend: LMDB batch_size: 4 }} }}'
        'layer { name: "r" type: "ReLU" bottom: "data" top: "a/relu" }'
        'layer { name: "f" type: "Flatten" bottom: "a/relu" top: "flat" }'
        'layer { name: "s" type: "Softmax" bottom: "flat" top: "a_relu" }'
    ), TEST)  # fmt: skip
    made.items = items[np.arange(12) % 6]
    return made


def records(path):
    reader = open_records(path)
    return [(key, caffe_pb2.Datum.FromString(value)) for key, value in reader.read(0, len(reader))]


def test_databases_as_caffe_makes_them(net, tmp_path):
    progress = []
    made = extract(net, ["a/relu", "flat", "label"], 3, tmp_path / "out", progress=lambda *now: progress.append(now))
    assert [(m.path.name, m.records) for m in made] == [
        ("out_a_relu_lmdb", 12),
        ("out_flat_lmdb", 12),
        ("out_label_lmdb", 12),
    ]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    for name, shape in (("a_relu", (2, 3, 4)), ("flat", (24, 1, 1))):
        found = records(tmp_path / f"out_{name}_lmdb")
        assert [key for key, _ in found] == [b"%010d" % n for n in range(12)]
        for (_, datum), item in zip(found, net.items, strict=True):
            assert (datum.channels, datum.height, datum.width) == shape
            assert list(datum.float_data) == item.ravel().tolist()
    assert [list(datum.float_data) for _, datum in records(tmp_path / "out_label_lmdb")] == [[n % 6] for n in range(12)]


def test_one_hdf5_file(net, tmp_path):
    (made, _) = extract(net, ["a/relu", "label"], 3, tmp_path / "out.h5")
    assert made.path == tmp_path / "out.h5" and made.records == 12
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.array_equal(file["a/relu"], net.items) and file["label"][...].tolist() == [n % 6 for n in range(12)]


def test_single_values_and_many_axes(tmp_path):
    net = Net(read_net(
        'layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 2 dim: 1 dim: 3 dim: 2 } } }'
        'layer { name: "l" type: "Reduction" bottom: "x" top: "sum" }'), TEST)  # fmt: skip
    extract(net, ["x", "sum"], 2, tmp_path / "out")
    datum = records(tmp_path / "out_x_lmdb")[3][1]
    assert (datum.channels, datum.height, datum.width, len(datum.float_data)) == (2, 1, 6, 12)
    assert len(records(tmp_path / "out_sum_lmdb")) == 2
    extract(net, ["sum"], 2, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["sum"].shape == (2,)


def test_what_cannot_be(net, tmp_path):
    with pytest.raises(NetError, match="has no blob 'fc7'; it has data, label, "):
        extract(net, ["flat", "fc7"], 1, tmp_path / "out")
    with pytest.raises(NetError, match="two of a/relu, a_relu would be the same folder"):
        extract(net, ["a/relu", "a_relu"], 1, tmp_path / "out")
    for prefix in ("out", "out.h5"):
        extract(net, ["flat"], 1, tmp_path / prefix)
        before = net.layers[0].position
        with pytest.raises(NetError, match="exists already"):
            extract(net, ["flat"], 1, tmp_path / prefix)
        assert net.layers[0].position == before
        extract(net, ["flat"], 1, tmp_path / prefix, overwrite=True)


def test_a_failed_pass_leaves_nothing(make, tmp_path):
    items = [*make.pictures(3), b"\xff"]
    net = Net(read_net(
        'layer { name: "d" type: "Data" top: "data" '
        f'data_param {{ source: "{make(items)}" backend: LMDB batch_size: 2 }} }}'), TEST)  # fmt: skip
    for prefix in ("out", "out.h5"):
        with pytest.raises(NetError, match="00000003"):
            extract(net, ["data"], 2, tmp_path / prefix)
        assert [path.name for path in tmp_path.iterdir()] == ["db"]
        net.layers[0].load_state_dict({"position": 0})
