"""Pictures of nets: blobs as octagons, layers as boxes, under pycaffe's names.

The graph is pydot's, as scripts expect, and pygraphviz makes the pictures: it brings Graphviz with it (`pip install
'blobmem[draw]'`). Graphviz's own language, in files named .dot, .gv or .raw, is written without it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.files import write_atomic
from blobmem.proto.text import read_net

LAYER_STYLE_DEFAULT = {"shape": "record", "fillcolor": "#6495ED", "style": "filled"}
NEURON_LAYER_STYLE = {"shape": "record", "fillcolor": "#90EE90", "style": "filled"}
BLOB_STYLE = {"shape": "octagon", "fillcolor": "#E0E0E0", "style": "filled"}

_CONVOLUTIONS = ("Convolution", "Deconvolution", "ConvolutionDepthwise", "DepthwiseConvolution")
_LEARNING = (*_CONVOLUTIONS, "InnerProduct")
_COLORS = {**dict.fromkeys(_CONVOLUTIONS, "#FF5050"), "Pooling": "#FF9900", "InnerProduct": "#CC33FF"}
_TEXTS = ("dot", "gv", "raw")
_RANKDIRS = ("LR", "RL", "TB", "BT")


def get_pooling_types_dict() -> dict[int, str]:
    """The names of the kinds of pooling by number."""
    return {value.number: value.name for value in caffe_pb2.PoolingParameter.PoolMethod.DESCRIPTOR.values}


def get_edge_label(layer: Any) -> str:
    """What to write at a layer's outputs: items in a batch, or number of outputs; `""` for most types."""
    if layer.type == "Data":
        return f"Batch {layer.data_param.batch_size}"
    if layer.type in _CONVOLUTIONS:
        return str(layer.convolution_param.num_output)
    if layer.type == "InnerProduct":
        return str(layer.inner_product_param.num_output)
    return '""'


def get_layer_lr_mult(layer: Any) -> tuple[float, float]:
    """The learning rates of a layer's weights and biases, as multiples of the solver's.

    Raises NetError, a ValueError, for a type without weights and biases, or more than two multiples.
    """
    if layer.type not in _LEARNING:
        raise NetError(f"layer '{layer.name}': {layer.type} layers have no weights and biases with learning rates")
    if len(layer.param) > 2:
        raise NetError(f"layer '{layer.name}', param: expected one for weights and one for biases, got more")
    weights, biases = [*(param.lr_mult for param in layer.param), 1.0, 1.0][:2]
    return weights, biases


def get_layer_label(layer: Any, rankdir: str, display_lrm: bool = False) -> str:
    """What to write in a layer's box, in quotes: its name, type, window, and with `display_lrm` its learning rates.

    The parts stand beside each other where the graph runs up or down (`rankdir` TB or BT), or else below each other.
    """
    kind = f"{layer.type} {get_pooling_types_dict()[layer.pooling_param.pool]}"
    parts = [layer.name, f"({kind if layer.type == 'Pooling' else layer.type})"]
    if layer.type == "Pooling" or layer.type in _CONVOLUTIONS:
        parts += _window(layer.pooling_param if layer.type == "Pooling" else layer.convolution_param)
    if display_lrm and layer.type in _LEARNING:
        weights, biases = get_layer_lr_mult(layer)
        if weights or biases:
            parts.append(f"lr mult: {weights:.1f}, {biases:.1f}")
    return '"' + (" " if rankdir in ("TB", "BT") else r"\n").join(map(_escaped, parts)) + '"'


def _window(param: Any) -> Iterator[str]:
    """Kernel size, stride and pad."""
    if getattr(param, "global_pooling", False):
        yield "global"
        return
    for name, what, default in (("kernel_size", "kernel size", 1), ("stride", "stride", 1), ("pad", "pad", 0)):
        sides = [f"{name.removesuffix('_size')}_{side}" for side in "hw"]
        value = getattr(param, name)
        if any(map(param.HasField, sides)):
            lengths = [getattr(param, side) for side in sides]
        elif isinstance(value, int):
            lengths = [value]
        else:
            lengths = list(value) or [default]
        yield f"{what}: {'x'.join(map(str, lengths if len(set(lengths)) > 1 else lengths[:1]))}"


def choose_color_by_layertype(layertype: str) -> str:
    """The colour of a type's boxes."""
    return _COLORS.get(layertype, LAYER_STYLE_DEFAULT["fillcolor"])


def get_pydot_graph(
    caffe_net: Any,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
    blob_labels: Mapping[str, str] | None = None,
) -> Any:
    """The pydot graph of a net.

    Args:
        caffe_net: a NetParameter; old formats are drawn as what they mean today.
        rankdir: which way it runs: LR, RL, TB or BT, from left to right and so on.
        label_edges: whether to write `get_edge_label`'s at outputs.
        phase: whether to leave out layers that are for the other phase only; all are in when None.
        display_lrm: whether to write learning rates in the boxes.
        blob_labels: blob -> what to write at all its edges, whatever `label_edges` says.

    Raises NetError for another `rankdir`, or a layer with rules both to include and to exclude it; ImportError without
    pydot.
    """
    if rankdir not in _RANKDIRS:
        raise NetError(f"rankdir: expected one of {', '.join(_RANKDIRS)}, got {rankdir!r}")
    pydot = _library("pydot", "which makes graphs of nets")
    net = read_net(caffe_net)
    graph = pydot.Dot(quoted(net.name or "Net"), graph_type="digraph", rankdir=rankdir)
    given = {name: quoted(text) for name, text in (blob_labels or {}).items()}
    nodes: dict[str, Any] = {}
    edges = []
    for layer in net.layer:
        if phase is not None and not _is_included(layer, phase):
            continue
        box = node_name(layer)
        in_place = len(layer.bottom) == 1 and list(layer.bottom) == list(layer.top)
        style = {**LAYER_STYLE_DEFAULT, "fillcolor": choose_color_by_layertype(layer.type)}
        nodes[box] = pydot.Node(
            box, label=get_layer_label(layer, rankdir, display_lrm), **(NEURON_LAYER_STYLE if in_place else style)
        )
        for name in (*layer.bottom, *layer.top):
            nodes[_blob(name)] = pydot.Node(_blob(name), label=quoted(name), **BLOB_STYLE)
        edges += [pydot.Edge(_blob(name), box, label=given.get(name, '""')) for name in layer.bottom]
        label = get_edge_label(layer) if label_edges else '""'
        edges += [pydot.Edge(box, _blob(name), label=given.get(name, label)) for name in layer.top]
    for node in nodes.values():
        graph.add_node(node)
    for edge in edges:
        graph.add_edge(edge)
    return graph


def _is_included(layer: Any, phase: int) -> bool:
    if layer.include and layer.exclude:
        raise NetError(f"layer '{layer.name}': expected rules to include or to exclude it, got both")
    if layer.include:
        return any(not rule.HasField("phase") or rule.phase == phase for rule in layer.include)
    return not any(rule.HasField("phase") and rule.phase == phase for rule in layer.exclude)


def draw_net(
    caffe_net: Any, rankdir: str, ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """A picture of a net in a format of Graphviz's (png, svg, pdf, ...), or its text (dot, gv, raw).

    The other arguments and errors are those of `get_pydot_graph`. Raises ImportError if pygraphviz is needed and not
    installed, NetError if Graphviz does not know the format.
    """
    return render(get_pydot_graph(caffe_net, rankdir, phase=phase, display_lrm=display_lrm), ext)


def render(graph: Any, ext: str) -> bytes:
    """A pydot graph as a picture or a text; formats and errors of `draw_net`."""
    text: str = graph.to_string()
    if ext in _TEXTS:
        return text.encode()
    graphviz = _library("pygraphviz", "which makes pictures (a .dot file needs none)")
    try:
        picture: bytes = graphviz.AGraph(string=text).draw(format=ext, prog="dot")
    except TypeError:  # its way to say that Graphviz gave nothing
        raise NetError(f"Graphviz knows no format {ext!r}: svg, png, pdf and dot are among those it does") from None
    return picture


def draw_net_to_file(
    caffe_net: Any,
    filename: str | os.PathLike[str],
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Write a picture of a net to a file, in the format that its name ends with; arguments and errors of `draw_net`."""
    extension = os.path.splitext(filename)[1].removeprefix(".").lower()
    if not extension:
        raise NetError(f"{os.fspath(filename)}: expected a name that ends with a format, such as .png or .dot")
    write_atomic(filename, draw_net(caffe_net, rankdir, extension, phase, display_lrm))


def _library(name: str, what_for: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{name}, {what_for}, is not installed: pip install 'blobmem[draw]'", name=name) from None


def node_name(layer: Any) -> str:
    """What a layer's box is called in the graph, in quotes."""
    return quoted(f"{layer.name}_{layer.type}")


def _blob(name: str) -> str:
    return quoted(f"{name}_blob")


def quoted(text: str) -> str:
    """A name or a label, of several lines too, in Graphviz's language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _escaped(text: str) -> str:
    """A text within the label of a record, where some marks have a meaning."""
    return "".join(f"\\{mark}" if mark in '\\"{}|<>' else mark for mark in text)
