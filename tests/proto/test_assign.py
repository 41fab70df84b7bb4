"""Python values into messages."""

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.assign import FieldError, assign_proto


def assigned(message, **fields):
    result = getattr(caffe_pb2, message)()
    for name, value in fields.items():
        assign_proto(result, name, value)
    return result


def test_dictionaries_fill_messages():
    layer = assigned("LayerParameter", convolution_param={"num_output": 3, "weight_filler": {"type": "xavier"}})
    assert layer.convolution_param.weight_filler.type == "xavier"
    assign_proto(layer, "convolution_param", {"group": 2})
    assert (layer.convolution_param.num_output, layer.convolution_param.group) == (3, 2)


def test_sequences_are_added_to_repeated_fields():
    for dims in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), iter([1, 2]), caffe_pb2.BlobShape(dim=[1, 2]).dim):
        assert list(assigned("BlobShape", dim=dims).dim) == [1, 2]
    assert not assigned("BlobShape", dim=[]).dim


def test_one_value_is_a_sequence_of_one():
    assert list(assigned("BlobShape", dim=3).dim) == list(assigned("BlobShape", dim=np.int32(3)).dim) == [3]
    assert list(assigned("LayerParameter", bottom="data").bottom) == ["data"]
    assert assigned("InputParameter", shape={"dim": [2]}).shape[0].dim == [2]


def test_messages_are_copied():
    shape = caffe_pb2.BlobShape(dim=[2, 3])
    assert assigned("InputParameter", shape=[shape, {"dim": 4}]).shape[0] == shape
    assert assigned("BlobProto", shape=shape).shape == shape


def test_enums_by_number_and_by_name():
    assert assigned("PoolingParameter", pool=1).pool == assigned("PoolingParameter", pool="AVE").pool == 1
    assert list(assigned("Datum", float_data=[np.float32(0.5), 1]).float_data) == [0.5, 1]


@pytest.mark.parametrize(
    ("message", "field", "value", "said"),
    [
        ("PoolingParameter", "pool", "MEDIAN", "pool: expected one of MAX, AVE, STOCHASTIC, got 'MEDIAN'"),
        ("PoolingParameter", "pad", -1, "pad: expected a whole number from 0 to 4294967295, got -1"),
        ("PoolingParameter", "pad", [1], "pad: expected a whole number from 0 to 4294967295, got [1]"),
        ("PoolingParameter", "pad", None, "pad: expected a whole number from 0 to 4294967295, got None"),
        ("BlobShape", "dim", ["a"], "dim: expected a whole number"),
        ("LayerParameter", "name", 3, "name: expected a str, got 3"),
        ("LayerParameter", "relu_param", 3, "relu_param: expected a dictionary of ReLUParameter's fields, got 3"),
        ("LayerParameter", "param", [3], "param: expected a dictionary of ParamSpec's fields, got 3"),
        ("BlobProto", "shape", caffe_pb2.Datum(), "shape: expected a dictionary of BlobShape's fields"),
    ],
    ids=["enum", "negative", "list", "none", "repeated", "text", "message", "messages", "other-message"],
)
def test_values_that_do_not_fit(message, field, value, said):
    with pytest.raises(NetError) as caught:
        assigned(message, **{field: value})
    assert str(caught.value).startswith(said)


def test_an_unknown_field_is_an_attribute_error_too():
    with pytest.raises(FieldError, match="unknown field 'padd' in PoolingParameter; did you mean 'pad'"):
        assigned("PoolingParameter", padd=1)
    with pytest.raises(AttributeError):
        assigned("PoolingParameter", padd=1)
