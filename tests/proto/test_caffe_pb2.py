"""Message classes made from the descriptor, under whatever protobuf runtime the tests run with."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool, text_format

from blobmem.proto import caffe_pb2
from blobmem.proto.compat import is_repeated, is_required

ROOT = Path(__file__).resolve().parents[2]

NET = """
name: "x"  # a comment
layer { name: "a" type: "Pooling" pooling_param { pool: AVE kernel_size: 3 } loss_weight: [1, 2.5f]
        include { phase: TRAIN } }
layers < type: CONVOLUTION blobs_lr: 1; blobs_lr: 2, convolution_param { pad: 1 pad: 2 } >
"""


@pytest.fixture
def net():
    return text_format.Parse(NET, caffe_pb2.NetParameter())


def test_text_binary_and_back(net) -> None:
    again = caffe_pb2.NetParameter.FromString(net.SerializeToString())
    assert again == net
    again.MergeFrom(net)
    assert [layer.name for layer in again.layer] == ["a", "a"]


def test_presence_and_defaults(net) -> None:
    pooling = net.layer[0].pooling_param
    assert pooling.HasField("kernel_size") and not pooling.HasField("stride")
    assert pooling.stride == 1
    assert list(net.layer[0].loss_weight) == [1, 2.5]
    assert type(net.layer[0]) is caffe_pb2.LayerParameter


def test_enums_at_the_top_and_nested(net) -> None:
    assert (caffe_pb2.TRAIN, caffe_pb2.TEST) == (0, 1)
    assert caffe_pb2.Phase.Name(caffe_pb2.TEST) == "TEST"
    assert net.layer[0].pooling_param.pool == caffe_pb2.PoolingParameter.AVE
    assert caffe_pb2.PoolingParameter.PoolMethod.Value("STOCHASTIC") == 2
    assert net.layers[0].type == caffe_pb2.V1LayerParameter.CONVOLUTION


def test_every_message_is_exported() -> None:
    for name, descriptor in caffe_pb2.DESCRIPTOR.message_types_by_name.items():
        assert descriptor == getattr(caffe_pb2, name).DESCRIPTOR


def test_messages_copy_and_pickle(net) -> None:
    again = pickle.loads(pickle.dumps(net))
    assert again == net and type(again) is caffe_pb2.NetParameter
    assert copy.deepcopy(net) == net


def test_field_labels() -> None:
    fields = caffe_pb2.NetParameter.DESCRIPTOR.fields_by_name
    assert is_repeated(fields["layer"]) and not is_repeated(fields["name"])
    bounds = caffe_pb2.ClipParameter.DESCRIPTOR.fields_by_name
    assert is_required(bounds["min"]) and not is_required(fields["name"])


def test_the_default_pool_is_left_alone() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("caffe.NetParameter")


def test_another_caffe_proto_in_the_process_is_no_conflict() -> None:
    """A different message of the same full name in the default pool, loaded before and after ours."""
    code = """
from google.protobuf import descriptor_pb2, descriptor_pool
file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
file.message_type.add(name="NetParameter").field.add(name="other", number=1, type=5, label=1)
def add(): descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
{}
assert "layer" in caffe_pb2.NetParameter.DESCRIPTOR.fields_by_name
assert "other" in descriptor_pool.Default().FindMessageTypeByName("caffe.NetParameter").fields_by_name
"""
    load = "from blobmem.proto import caffe_pb2"
    for order in (f"add()\n{load}", f"{load}\nadd()"):
        subprocess.run([sys.executable, "-c", code.format(order)], check=True, cwd=ROOT)
