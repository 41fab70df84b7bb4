"""Pictures of nets: what the graph says, and what is said without pydot or Graphviz."""

import sys
from pathlib import Path

import pytest

from blobmem import TEST, TRAIN, caffe_pb2, draw
from blobmem.errors import NetError
from blobmem.proto.text import read_net

pydot = pytest.importorskip("pydot")

MODELS = Path(__file__).parents[1] / "models"
# pydot takes seconds to read the text of a large net
NAMES = ("lenet/deploy", "lenet/train_val", "caffenet/train_val", "squeezenet/deploy")
PATHS = [MODELS / f"{name}.prototxt" for name in NAMES]
NET = """
name: "a \\"net\\""
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN } data_param { batch_size: 64 } }
layer { name: "input" type: "Input" top: "data" include { phase: TEST } }
layer { name: "a/conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 } param { lr_mult: 2 }
  convolution_param { num_output: 20 kernel_h: 3 kernel_w: 5 stride: 2 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" exclude { phase: TEST } }
"""


@pytest.fixture
def net():
    return read_net(NET)


def layer(text):
    return read_net(f'layer {{ name: "x" {text} }}\n').layer[0]


def boxes(graph):
    return {node.get_name().strip('"'): node for node in graph.get_nodes()}


def test_the_graph_of_a_net(net):
    graph = draw.get_pydot_graph(net, "LR")
    assert graph.get_name() == '"a \\"net\\""' and graph.get_rankdir() == "LR"
    nodes = boxes(graph)
    blobs = {name for name in nodes if name.endswith("_blob")}
    assert blobs == {f"{name}_blob" for name in ("data", "label", "conv", "pool", "ip", "loss")}
    assert set(nodes) - blobs == {"data_Data", "input_Input", "a/conv_Convolution", "relu_ReLU", "pool_Pooling",
                                  "ip_InnerProduct", "loss_SoftmaxWithLoss"}  # fmt: skip
    edges = {(e.get_source().strip('"'), e.get_destination().strip('"')): e.get_label() for e in graph.get_edges()}
    assert edges["data_blob", "a/conv_Convolution"] == '""'
    assert edges["data_Data", "label_blob"].strip('"') == "Batch 64"
    assert edges["a/conv_Convolution", "conv_blob"].strip('"') == "20"
    assert ("relu_ReLU", "conv_blob") in edges and ("conv_blob", "relu_ReLU") in edges
    assert {e.get_label() for e in draw.get_pydot_graph(net, "LR", label_edges=False).get_edges()} == {'""'}


def test_colours(net):
    nodes = boxes(draw.get_pydot_graph(net, "LR"))
    colours = {name: node.get_fillcolor().strip('"') for name, node in nodes.items()}
    assert colours["a/conv_Convolution"] == draw.choose_color_by_layertype("Deconvolution") == "#FF5050"
    assert colours["pool_Pooling"] == "#FF9900" and colours["ip_InnerProduct"] == "#CC33FF"
    assert colours["relu_ReLU"] == draw.NEURON_LAYER_STYLE["fillcolor"]
    assert colours["data_Data"] == draw.choose_color_by_layertype("Data") == "#6495ED"


@pytest.mark.parametrize(("phase", "gone"), [(TRAIN, "input_Input"), (TEST, "data_Data")])
def test_one_phase(net, phase, gone):
    nodes = boxes(draw.get_pydot_graph(net, "LR", phase=phase))
    assert gone not in nodes and ("loss_SoftmaxWithLoss" in nodes) == (phase == TRAIN)


def test_labels_of_boxes(net):
    labels = {one.name: draw.get_layer_label(one, "TB", display_lrm=True) for one in net.layer}
    assert labels["a/conv"] == '"a/conv (Convolution) kernel size: 3x5 stride: 2 pad: 0 lr mult: 1.0, 2.0"'
    assert labels["pool"] == '"pool (Pooling AVE) kernel size: 3 stride: 2 pad: 1"'
    assert labels["ip"] == '"ip (InnerProduct) lr mult: 1.0, 1.0"'
    assert draw.get_layer_label(net.layer[-1], "LR") == r'"loss\n(SoftmaxWithLoss)"'
    every = layer('type: "Pooling" pooling_param { global_pooling: true }')
    assert draw.get_layer_label(every, "BT") == '"x (Pooling MAX) global"'
    several = layer('type: "Convolution" convolution_param { kernel_size: 3 kernel_size: 3 pad: 1 pad: 2 }')
    assert draw.get_layer_label(several, "BT") == '"x (Convolution) kernel size: 3 stride: 1 pad: 1x2"'
    assert draw.get_layer_label(caffe_pb2.LayerParameter(name="a|{b}", type="ReLU"), "BT") == r'"a\|\{b\} (ReLU)"'


def test_learning_rates():
    assert draw.get_layer_lr_mult(layer('type: "InnerProduct" param { lr_mult: 3 }')) == (3, 1)
    frozen = layer('type: "InnerProduct" param { lr_mult: 0 } param { lr_mult: 0 }')
    assert draw.get_layer_label(frozen, "TB", display_lrm=True) == '"x (InnerProduct)"'
    with pytest.raises(ValueError, match="ReLU layers have no weights"):
        draw.get_layer_lr_mult(layer('type: "ReLU"'))
    with pytest.raises(ValueError, match="got more"):
        draw.get_layer_lr_mult(layer('type: "InnerProduct" param {} param {} param {}'))


def test_pooling_types():
    assert draw.get_pooling_types_dict() == {0: "MAX", 1: "AVE", 2: "STOCHASTIC"}


def test_old_formats_are_drawn_too():
    net = caffe_pb2.NetParameter(input=["data"], input_dim=[1, 1, 2, 2])
    net.layers.add(name="relu", type=caffe_pb2.V1LayerParameter.RELU, bottom=["data"], top=["out"])
    assert "relu_ReLU" in boxes(draw.get_pydot_graph(net, "LR"))
    assert draw.get_pydot_graph(net, "LR").get_name() == '"Net"'


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydot's, of pyparsing
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_model_becomes_text_that_pydot_reads(path):
    net = read_net(path)
    (graph,) = pydot.graph_from_dot_data(draw.draw_net(net, "LR", "dot").decode())
    assert len(graph.get_edges()) == sum(len(one.bottom) + len(one.top) for one in net.layer)


def test_text_files_need_no_graphviz(net, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    for name in ("net.dot", "net.GV", "net.raw"):
        draw.draw_net_to_file(net, tmp_path / name, "TB")
        assert (tmp_path / name).read_text().startswith('digraph "a \\"net\\"" {\nrankdir=TB;')
    with pytest.raises(ImportError, match=r"pygraphviz, which makes pictures.*pip install 'blobmem\[draw\]'"):
        draw.draw_net_to_file(net, tmp_path / "net.png")
    assert not (tmp_path / "net.png").exists()


def test_pictures(net, tmp_path):
    pytest.importorskip("pygraphviz")
    draw.draw_net_to_file(net, str(tmp_path / "net.PDF"))
    assert (tmp_path / "net.PDF").read_bytes().startswith(b"%PDF")
    assert draw.draw_net(net, "LR", phase=TEST).startswith(b"\x89PNG")
    edges = sum(len(one.bottom) + len(one.top) for one in net.layer)
    assert draw.draw_net(net, "LR", "svg").count(b'class="edge"') == edges


def test_a_format_that_graphviz_does_not_know(net):
    pytest.importorskip("pygraphviz")
    with pytest.raises(NetError, match="Graphviz knows no format 'bmpp'"):
        draw.draw_net(net, "LR", "bmpp")


def test_wrong_arguments(net, tmp_path):
    with pytest.raises(NetError, match="rankdir: expected one of LR, RL, TB, BT, got 'XY'"):
        draw.draw_net(net, "XY")
    with pytest.raises(NetError, match=r"expected a name that ends with a format"):
        draw.draw_net_to_file(net, tmp_path / "picture")
    net.layer[0].exclude.add(phase=TEST)
    with pytest.raises(NetError, match="layer 'data': expected rules to include or to exclude it, got both"):
        draw.draw_net(net, "LR", phase=TRAIN)


def test_without_pydot(net, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(ImportError, match=r"pip install 'blobmem\[draw\]'"):
        draw.draw_net(net, "LR", "dot")
