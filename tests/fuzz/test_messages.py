"""Damaged prototxt and binary messages: caffemodels, mean files."""

from pathlib import Path

import numpy as np
import pytest
from mutations import damage_bytes, damage_message, damage_text
from strangers import fuzz, success_or_error

from blobmem import TRAIN, Net, NetError
from blobmem.layers.base import layer_types
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array
from blobmem.proto.text import parse_text, read_binary, read_net, read_solver

DATA = Path(__file__).parents[1] / "data"
TEXTS = [path.read_text() for path in sorted((DATA / "nets").glob("*.prototxt"))]
TEXTS += [(DATA / "lenet" / name).read_text() for name in ("net.prototxt", "solver.txt")]
WORDS = [f'"{name}"' for name, cls in layer_types().items() if cls.__module__.startswith("blobmem.")] + [
    field.name for field in caffe_pb2.LayerParameter.DESCRIPTOR.fields
]

NET = """name: "n"
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 4 } }
layer { name: "b" type: "InnerProduct" bottom: "y" top: "z" inner_product_param { num_output: 2 } }
"""


@fuzz(150)
def test_text(chance, tmp_path):
    path = tmp_path / "damaged.prototxt"
    text = chance.choice(TEXTS)
    if chance.random() < 0.8:
        path.write_text(damage_text(text, chance, WORDS), encoding="utf-8")
    else:
        path.write_bytes(damage_bytes(text.encode(), chance))
    for read in (read_net, read_solver):
        with success_or_error():
            read(path)


@pytest.mark.parametrize(
    "piece", ["layer { ", "layers { layer { ", "net_param { ", "force_backward: [", "<", "[", "{ }"]
)
@pytest.mark.parametrize("count", [90, 110, 1200, 50_000])
def test_deep_text(piece, count):
    with pytest.raises(NetError, match="^deep:"):
        parse_text(piece * count, caffe_pb2.SolverParameter, "deep")


def test_a_text_of_100_megabytes_is_not_read(tmp_path):
    path = tmp_path / "long.prototxt"
    with open(path, "wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(NetError, match="larger than 64 MiB"):
        read_net(path)


@pytest.fixture(scope="module")
def models():
    net = Net(NET, TRAIN, seed=2)
    old = caffe_pb2.NetParameter(name="n")
    for layer in net.to_proto().layer:
        if layer.blobs:
            message = old.layers.add(name=layer.name, type="INNER_PRODUCT", bottom=layer.bottom, top=layer.top)
            message.blobs.extend(layer.blobs)
    return [message.SerializeToString() for message in (net.to_proto(), net.to_proto(write_diff=True), old)]


@fuzz(150)
def test_models_are_taken_whole_or_not_at_all(chance, models, tmp_path):
    net, path = Net(NET, TRAIN, seed=1), tmp_path / "damaged.caffemodel"
    damage = damage_message if chance.random() < 0.7 else damage_bytes
    path.write_bytes(damage(chance.choice(models), chance))
    before = values(net)
    taken = False
    with success_or_error():
        net.copy_from(path)
        taken = True
    assert taken or all(map(np.array_equal, before, values(net)))


def values(net):
    return [blob.cpu_data().copy() for blobs in net.params.values() for blob in blobs]


def test_names_that_are_no_text(tmp_path):
    path = tmp_path / "m.caffemodel"
    data = caffe_pb2.NetParameter(layer=[caffe_pb2.LayerParameter(name="ab", type="Split")]).SerializeToString()
    path.write_bytes(data.replace(b"ab", b"a\xff"))
    with pytest.raises(NetError, match=r"m\.caffemodel has a text that is not UTF-8"):
        Net(NET, TRAIN).copy_from(path)
    bottoms = caffe_pb2.NetParameter(layer=[caffe_pb2.LayerParameter(bottom=["ok", "ab"])]).SerializeToString()
    path.write_bytes(bottoms.replace(b"ab", b"a\xff"))
    with pytest.raises(NetError, match="not UTF-8"):
        Net(NET, TRAIN).copy_from(path)


ARRAYS = [
    caffe_pb2.BlobProto(num=1, channels=3, height=4, width=5, data=range(60)),
    caffe_pb2.BlobProto(shape=caffe_pb2.BlobShape(dim=[3, 4, 5]), double_data=range(60), double_diff=range(60)),
]


@fuzz(200)
def test_arrays(chance, tmp_path):
    path = tmp_path / "damaged.binaryproto"
    damage = damage_message if chance.random() < 0.7 else damage_bytes
    path.write_bytes(damage(chance.choice(ARRAYS).SerializeToString(), chance))
    with success_or_error():
        message = read_binary(path, caffe_pb2.BlobProto)
        for diff in (False, True):
            with success_or_error():
                values = blob_array(message, diff=diff)
                assert values is None or values.nbytes <= 2 * path.stat().st_size


def test_an_array_of_thousands_of_axes_has_a_short_message():
    with pytest.raises(NetError, match="an array of 5000 axes: expected at most 32 axes"):
        blob_array(caffe_pb2.BlobProto(shape=caffe_pb2.BlobShape(dim=[1] * 5000), data=[1]))
