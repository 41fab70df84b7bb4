"""Nets written in Python, beside what the same prototxt says."""

import copy
import pickle

import numpy as np
import pytest

from blobmem import TEST, Net, NetSpec, to_proto
from blobmem import layers as L
from blobmem import params as P
from blobmem.errors import NetError
from blobmem.net_spec import FieldError, Function, Top, param_name_dict
from blobmem.net_spec import layers as spec_layers
from blobmem.proto.text import read_net


def small():
    n = NetSpec()
    n.data, n.label = L.DummyData(shape=[{"dim": [2, 1, 6, 6]}, {"dim": [2]}], ntop=2)
    n.conv = L.Convolution(n.data, num_output=3, kernel_size=3, weight_filler={"type": "xavier"})
    n.relu = L.ReLU(n.conv, in_place=True)
    n.pool = L.Pooling(n.relu, pool=P.Pooling.AVE, kernel_size=2)
    n.loss = L.SoftmaxWithLoss(L.InnerProduct(n.pool, num_output=4), n.label, loss_weight=2)
    return n


SMALL = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 2 dim: 1 dim: 6 dim: 6 } shape { dim: 2 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 2 } }
layer { name: "InnerProduct1" type: "InnerProduct" bottom: "pool" top: "InnerProduct1"
  inner_product_param { num_output: 4 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "InnerProduct1" bottom: "label" top: "loss" loss_weight: 2 }
"""


def test_a_net_is_what_its_prototxt_says():
    assert small().to_proto() == read_net(SMALL)
    assert list(Net(small().to_proto(), TEST).blobs) == ["data", "label", "conv", "pool", "InnerProduct1", "loss"]


def test_layers_that_nothing_asks_for_are_left_out():
    n = small()
    assert [layer.name for layer in to_proto(n.pool).layer] == ["DummyData1", "Convolution1", "ReLU1", "Pooling1"]
    assert to_proto(n.pool) == n.pool.to_proto()
    assert len(to_proto(n.pool, n.loss).layer) == 6


def test_names_are_numbered_by_type_and_pass_over_those_that_are_taken():
    n = NetSpec()
    n.ReLU2 = L.Input(shape={"dim": [1]})
    n.out = L.ReLU(L.ReLU(L.ReLU(n.ReLU2)))
    assert [layer.name for layer in n.to_proto().layer] == ["ReLU2", "ReLU1", "ReLU3", "out"]


def test_a_layer_of_several_tops_is_called_as_its_first():
    n = NetSpec()
    n.a, n.b = L.Slice(L.Input(shape={"dim": [4, 2]}), ntop=2)
    slice_ = n.to_proto().layer[1]
    assert (slice_.name, list(slice_.top)) == ("a", ["a", "b"])


def test_a_layer_without_tops():
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1]})
    n.hush = L.Silence(n.data, ntop=0)
    assert isinstance(n.hush, Function)
    assert [(layer.name, list(layer.top)) for layer in n.to_proto().layer] == [("data", ["data"]), ("hush", [])]
    assert to_proto(L.Silence(L.Input(), ntop=0)).layer[1].name == "Silence1"


@pytest.mark.parametrize("type_", ["Deconvolution", "DepthwiseConvolution", "Im2col"])
def test_types_whose_options_are_another_types(type_):
    (layer,) = getattr(L, type_)(kernel_size=4).to_proto().layer
    assert list(layer.convolution_param.kernel_size) == [4]


def test_options_of_the_layer_itself():
    (layer,) = L.Convolution(
        name="c", param=[{"lr_mult": 1}, {"lr_mult": 2}], include={"phase": TEST}, convolution_param={"group": 2}
    ).to_proto().layer  # fmt: skip
    assert layer.name == "c" and [param.lr_mult for param in layer.param] == [1, 2]
    assert layer.include[0].phase == TEST and layer.convolution_param.group == 2


def test_a_net_thousands_of_layers_deep():
    top = L.Input(shape={"dim": [1]})
    for _ in range(5000):
        top = L.ReLU(top)
    assert to_proto(top).layer[-1].name == "ReLU5000"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_outputs": 3}, FieldError, "layer 'Convolution1' (Convolution): unknown field 'num_outputs'"),
        ({"num_output": 3.5}, NetError, "(Convolution): num_output: expected a whole number"),
        ({"weight_filler": {"typ": "a"}}, FieldError, "unknown field 'typ' in FillerParameter; did you mean 'type'"),
        ({"weight_filler": "xavier"}, NetError, "weight_filler: expected a dictionary of FillerParameter's fields"),
    ],
    ids=["unknown", "value", "inner", "no-message"],
)
def test_wrong_options_name_layer_and_field(options, error, message):
    with pytest.raises(error) as caught:
        L.Convolution(**options).to_proto()
    assert message in str(caught.value)


def test_wrong_inputs_and_tops():
    pair = L.DummyData(ntop=2)
    with pytest.raises(TypeError, match="Silence input 0 is not a Top .type is <class 'tuple'>."):
        L.Silence(pair, ntop=0)
    with pytest.raises(TypeError, match="'data' of a NetSpec is a Top, got <class 'tuple'>"):
        NetSpec().data = pair
    with pytest.raises(NetError, match="ntop: expected a number of outputs from 0 on, got -1"):
        L.Data(ntop=-1)
    with pytest.raises(NetError, match="in_place: expected an input for each of its 2 outputs"):
        L.ReLU(pair[0], in_place=True, ntop=2)


def test_a_spec_is_a_mapping():
    n = small()
    assert n["conv"] is n.conv and "conv" in n and list(n) == n.keys() == list(n.tops)
    assert n.vals()[2] is n.conv and isinstance(n.conv, Top)
    n["extra"] = L.ReLU(n.pool)
    del n["extra"]
    assert "extra" not in n and not hasattr(n, "extra")
    with pytest.raises(KeyError):
        n["extra"]
    with pytest.raises(AttributeError, match="no top 'extra'; tops: data, label"):
        n.extra.to_proto()


def test_options_may_change_until_the_net_is_made():
    n = small()
    n.update("conv", {"num_output": 7})
    assert n.to_proto().layer[1].convolution_param.num_output == 7


def test_specs_are_copied_and_pickled():
    n = small()
    for other in (copy.deepcopy(n), pickle.loads(pickle.dumps(n))):
        assert other.to_proto() == n.to_proto() and other.conv is not n.conv


def test_the_package_of_layers_gives_capitals_to_the_spec():
    assert pickle.loads(pickle.dumps(L.Convolution))(num_output=2).fn.type_name == "Convolution"
    assert spec_layers.LRN().fn.type_name == L.LRN().fn.type_name == "LRN"
    assert L.convolution.Convolution.type == "Convolution" and isinstance(L.Layer, type)
    for name in ("misspelt", "__wrapped__", "_Private", ""):
        assert not hasattr(L, name)
    with pytest.raises(ImportError):
        from blobmem.layers import misspelt  # noqa: F401
    assert not hasattr(spec_layers, "__wrapped__")


def test_constants():
    assert (P.Pooling.MAX, P.Eltwise.SUM, P.Data.LMDB) == (0, 1, 1)
    with pytest.raises(AttributeError, match="no PoolParameter"):
        P.Pool.MAX  # noqa: B018
    with pytest.raises(AttributeError):
        P.Pooling.MEDIAN  # noqa: B018


def test_param_names():
    names = param_name_dict()
    assert (names["InnerProduct"], names["LRN"], names["HDF5Data"]) == ("inner_product", "lrn", "hdf5_data")


def test_numpy_values():
    (layer,) = L.Convolution(num_output=np.int64(3), kernel_size=np.array([3, 5]), pad=(1, 2)).to_proto().layer
    assert layer.convolution_param.num_output == 3
    assert list(layer.convolution_param.kernel_size) == [3, 5] and list(layer.convolution_param.pad) == [1, 2]
