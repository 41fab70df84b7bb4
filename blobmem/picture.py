"""Pictures of nets in one phase, with the sizes that their blobs have there and the parameters that layers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blobmem.devices.base import readable_bytes
from blobmem.draw import get_pydot_graph, node_name, quoted
from blobmem.footprint import stated_shapes
from blobmem.memory.blob import Blob
from blobmem.net.build import Graph, LearnableParam
from blobmem.net.builder import Spec
from blobmem.net.outline import outline, shape_text, upper_bounds
from blobmem.proto import caffe_pb2

SHARED_STYLE: dict[str, Any] = {"style": "dashed", "dir": "none", "constraint": "false"}


def sized_graph(
    spec: Spec,
    rankdir: str = "LR",
    *,
    batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """The pydot graph of a net, its edges labelled by the shape and the bytes of their blob.

    A layer that computes in place has edges to and from one blob. Dashed lines join the layers that share a parameter,
    with its name, shape and bytes. Nothing is allocated; `blobmem.draw.render` makes a picture of it.

    Args:
        spec: one of what `specs_of` finds in a file.
        rankdir: which way the net runs: LR, RL, TB or BT.
        batch: items in a batch, instead of the file's.
        input_shapes: top name -> shape of one item, for data layers whose database is absent and that state none.

    Raises NetError for anything wrong in the file, a shape that is not known, or another `rankdir`; ImportError
    without pydot.
    """
    shapes = {**stated_shapes((spec, [])), **(input_shapes or {})}
    net = outline(spec, batch=batch, input_shapes=shapes)
    bounds = upper_bounds(net.nodes)
    labels = {name: _size(blob, name in bounds) for name, blob in net.blobs.items()}
    graph = get_pydot_graph(_message(spec, net), rankdir, blob_labels=labels)
    for edge in _shared(net):
        graph.add_edge(edge)
    return graph


def _size(blob: Blob, at_most: bool = False) -> str:
    return f"{shape_text(blob, at_most)}\n{readable_bytes(blob.nbytes)}"


def _message(spec: Spec, net: Graph) -> Any:
    """The layers of the phase, with the tops that a file may leave out."""
    result = caffe_pb2.NetParameter(name=spec.model.name)
    for node in net.nodes:
        layer = result.layer.add()
        layer.CopyFrom(node.layer.param)
        for name in ("blobs", "param"):  # values and multipliers are not drawn
            layer.ClearField(name)
    return result


def _shared(net: Graph) -> Iterator[Any]:
    """Edges between the layer that has a parameter and those that take it from there."""
    import pydot

    owners: dict[str, LearnableParam] = {entry.name: entry for entry in net.learnable if entry.name}
    layers = {node.layer.name: node.layer for node in net.nodes}
    for layer in layers.values():
        for index in sorted(layer.shared_params):
            owner = owners[layer.param.param[index].name]
            ends = (node_name(layers[owner.layer].param), node_name(layer.param))
            yield pydot.Edge(*ends, label=quoted(f"{owner.name}\n{_size(owner.blob)}"), **SHARED_STYLE)
