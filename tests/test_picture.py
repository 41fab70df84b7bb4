"""Pictures with sizes: every edge has its blob's shape and bytes, shared parameters join their layers."""

from collections import Counter

import pytest

pytest.importorskip("pydot")

from blobmem.errors import NetError
from blobmem.net.builder import specs_of
from blobmem.picture import sized_graph

SHARED = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 512 dim: 6 } } }
layer {
  name: "one" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" } param { name: "own" }
  inner_product_param { num_output: 6 }
}
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer {
  name: "two" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" }
  inner_product_param { num_output: 6 bias_term: false }
}
layer { name: "loss" type: "EuclideanLoss" bottom: "b" bottom: "x" }
"""


def edges(graph):
    """(source, target) -> label, without quotes."""
    return {
        (edge.get_source().strip('"'), edge.get_destination().strip('"')): edge.get_label().strip('"')
        for edge in graph.get_edges()
    }


def graph_of(text, phase=0, **options):
    train, tests = specs_of(text)
    return sized_graph(tests[0] if phase else train, **options)


def test_every_edge_has_shape_and_bytes():
    found = edges(graph_of(SHARED))
    size = r"512x6\n12288 bytes"
    assert found["in_Input", "x_blob"] == found["x_blob", "one_InnerProduct"] == size
    assert found["x_blob", "loss_EuclideanLoss"] == size  # the second reader: no split stands between
    assert found["loss_EuclideanLoss", "loss_blob"] == r"1\n4 bytes"
    assert edges(graph_of(SHARED, batch=2**17))["b_blob", "loss_EuclideanLoss"] == r"131072x6\n3.0 MiB"
    assert not any("split" in name for pair in found for name in pair)


def test_a_layer_in_place_goes_to_its_blob_and_back():
    found = edges(graph_of(SHARED))
    assert found["a_blob", "relu_ReLU"] == found["relu_ReLU", "a_blob"] == r"512x6\n12288 bytes"
    assert Counter(target for _, target in found)["a_blob"] == 2


def test_shared_parameters_join_layers():
    graph = graph_of(SHARED)
    dashed = [edge for edge in graph.get_edges() if edge.get_style() == "dashed"]
    assert [(edge.get_source(), edge.get_destination()) for edge in dashed] == [
        ('"one_InnerProduct"', '"two_InnerProduct"')
    ]
    assert dashed[0].get_label() == r'"w\n6x6\n144 bytes"'


def test_one_phase_is_drawn():
    text = SHARED.replace('name: "relu"', 'name: "relu" include { phase: TEST }')
    assert not any("relu_ReLU" in pair for pair in edges(graph_of(text)))
    assert any("relu_ReLU" in pair for pair in edges(graph_of(text, phase=1)))


def test_shapes_that_depend_on_values_are_bounds():
    text = """
layer { name: "in" type: "Input" top: "x" top: "keep" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 } } }
layer { name: "filter" type: "Filter" bottom: "x" bottom: "keep" top: "kept" }
"""
    assert edges(graph_of(text))["filter_Filter", "kept_blob"] == r"<=4x6\n96 bytes"


def test_names_with_quotes_stay_inside_their_label():
    text = 'layer { name: "in" type: "Input" top: "a\\"b" input_param { shape { dim: 1 } } }'
    assert r'"in_Input" -> "a\"b_blob"' in graph_of("\n" + text).to_string()


def test_a_rankdir_that_is_none():
    with pytest.raises(NetError, match="rankdir: expected one of LR"):
        graph_of(SHARED, rankdir="UP")
