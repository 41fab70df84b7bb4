"""Nets in outline: the file's own layers, shapes, no memory."""

import pytest

import blobmem
from blobmem.errors import NetError
from blobmem.net.builder import specs_of
from blobmem.net.outline import outline, shape_text, upper_bounds

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 } }
layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }
layer { name: "a" type: "Sigmoid" bottom: "y" top: "a" include { stage: "s" } }
layer { name: "b" type: "TanH" bottom: "y" top: "b" }
"""


def test_layers_are_those_of_the_file_and_have_no_memory():
    train, _ = specs_of(NET)
    train.stages = ("s",)
    graph = outline(train, batch=9)
    assert [node.layer.name for node in graph.nodes] == ["in", "ip", "relu", "a", "b"]
    assert {name: blob.shape for name, blob in graph.blobs.items()} == {
        "x": (9, 6),
        "y": (9, 3),
        "a": (9, 3),
        "b": (9, 3),
    }
    blobs = [*graph.blobs.values(), *(entry.blob for entry in graph.learnable)]
    assert sum(blob.data_view.memory.cpu_capacity for blob in blobs) == 0


def test_shapes_are_those_of_the_net_that_runs():
    spec, _ = specs_of(NET)
    net = blobmem.Net(spec.model, blobmem.TRAIN)
    assert all(net.blobs[name].shape == blob.shape for name, blob in outline(spec).blobs.items())


def test_a_wrong_file_is_an_error_that_names_the_layer():
    spec, _ = specs_of(NET.replace("num_output: 3", ""))
    with pytest.raises(NetError, match=r"layer 'ip' .*num_output"):
        outline(spec)


def test_upper_bounds_are_what_depends_on_values():
    spec, _ = specs_of("""
layer { name: "in" type: "Input" top: "x" top: "keep" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 } } }
layer { name: "filter" type: "Filter" bottom: "x" bottom: "keep" top: "kept" }
layer { name: "relu" type: "ReLU" bottom: "kept" top: "kept" }
layer { name: "exp" type: "Exp" bottom: "kept" top: "e" }
layer { name: "other" type: "Exp" bottom: "x" top: "f" }
""")
    graph = outline(spec)
    assert upper_bounds(graph.nodes) == {"kept", "e"}
    assert shape_text(graph.blobs["e"], at_most=True) == "<=4x6" and shape_text(graph.blobs["x"]) == "4x6"


def test_a_single_value_has_a_shape():
    assert shape_text(blobmem.Blob(())) == "1"
