"""Summaries: layer by layer what a net gives, learns and computes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobmem.footprint import stated_shapes
from blobmem.memory import SyncedMemory
from blobmem.net.build import Graph, Node
from blobmem.net.builder import Spec
from blobmem.net.outline import outline, shape_text, upper_bounds
from blobmem.proto import caffe_pb2


@dataclass(frozen=True, slots=True)
class Row:
    """One layer.

    Attributes:
        name, type: the layer's.
        tops: name -> shape, as text, of each top; "<=" goes before one that depends on values.
        parameters: values that it learns; those that it takes from a layer before it count there.
        statistics: values in its parameters that it gathers instead (BatchNorm's).
        multiply_adds: of one forward pass; see `RULES`.
        bytes: of its tops' data. What is the memory of a blob before it (in place, or in another shape) is 0.
    """

    name: str
    type: str
    tops: dict[str, str]
    parameters: int
    statistics: int
    multiply_adds: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A net's layers in the order they run; `batch` is the first axis of the first top."""

    name: str
    phase: int
    batch: int
    rows: list[Row]

    def total(self, column: str) -> int:
        """The sum over the layers of a column that holds numbers."""
        return sum(getattr(row, column) for row in self.rows)


def summary(
    spec: Spec,
    *,
    batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Summary:
    """The summary of a net. Allocates nothing.

    Args:
        spec: one of what `specs_of` finds in a file.
        batch: items in a batch, instead of the file's.
        input_shapes: top name -> shape of one item, for data layers whose database is absent and that state none.

    Raises NetError for anything wrong in the file, or a shape that is not known.
    """
    shapes = {**stated_shapes((spec, [])), **(input_shapes or {})}
    graph = outline(spec, batch=batch, input_shapes=shapes)
    first = next(iter(graph.blobs.values()), None)
    size = first.shape[0] if first is not None and first.shape else 1
    return Summary(spec.model.name, spec.phase, size, _rows(graph))


def _rows(graph: Graph) -> list[Row]:
    bounds = upper_bounds(graph.nodes)
    seen: dict[SyncedMemory, int] = {}
    rows = []
    for node in graph.nodes:
        layer = node.layer
        own = sum(blob.count for index, blob in enumerate(layer.blobs) if index not in layer.shared_params)
        gathers = layer.type == "BatchNorm"
        tops = zip(node.top_names, node.top, strict=True)
        rows.append(
            Row(
                name=layer.name,
                type=layer.param.type,
                tops={name: shape_text(blob, name in bounds) for name, blob in tops},
                parameters=0 if gathers else own,
                statistics=own if gathers else 0,
                multiply_adds=multiply_adds(node),
                bytes=_new_bytes(node, seen),
            )
        )
    return rows


def _new_bytes(node: Node, seen: dict[SyncedMemory, int]) -> int:
    """Bytes of a layer's tops beyond those that blobs before them have in the same memories."""
    total = 0
    for blob in node.top:
        view = blob.data_view
        known, end = seen.get(view.memory, 0), view.offset + blob.nbytes
        total += max(0, end - known)
        seen[view.memory] = max(known, end)
    return total


# ---------------------------------------------------------------- multiply-adds


def multiply_adds(node: Node) -> int:
    """Multiply-adds of one forward pass of a layer, for all items of the batch, by the rule of its type."""
    rule = RULES.get(node.layer.param.type)
    return 0 if rule is None else rule(node)


def _of_outputs(node: Node) -> int:
    """Each weight once for each place of each output: weights (outputs, channels / group, window)."""
    weights = node.layer.blobs[0]
    return sum(top.count // weights.shape[0] * weights.count for top in node.top)


def _of_inputs(node: Node) -> int:
    """Each weight once for each place of each input: weights (channels, outputs / group, window)."""
    weights = node.layer.blobs[0]
    return sum(bottom.count // weights.shape[0] * weights.count for bottom in node.bottom)


def _of_rows(node: Node) -> int:
    """Each weight once for each row."""
    layer: Any = node.layer
    return node.top[0].count // layer.outputs * layer.blobs[0].count


def _of_steps(node: Node) -> int:
    """Each weight once for each step of each stream, those of a static input once for each stream; gates as below."""
    layer: Any = node.layer
    steps, streams = node.top[0].shape[:2]
    total = _of_gates(node) if layer.type == "LSTM" else 0
    for name, blob in zip(layer.param_names, layer.blobs, strict=True):
        if blob.num_axes > 1:
            total += blob.count * streams * (1 if name == "w_static" else steps)
    return total


def _of_gates(node: Node) -> int:
    """An LSTM multiplies three times for each unit and step: forget by cell, input by candidate, output by cell."""
    return 3 * node.top[0].count


def _of_elements(node: Node) -> int:
    """One for each value."""
    return node.top[0].count


def _of_eltwise(node: Node) -> int:
    """A product of k bottoms is k - 1 for each value, a sum with coefficients k; a plain sum or a maximum is none."""
    options, count = node.layer.param.eltwise_param, len(node.bottom)
    if options.operation == caffe_pb2.EltwiseParameter.PROD:
        return (count - 1) * node.top[0].count
    weighted = options.operation == caffe_pb2.EltwiseParameter.SUM and any(value != 1 for value in options.coeff)
    return count * node.top[0].count if weighted else 0


def _of_corners(node: Node) -> int:
    """Four neighbours, each with its weight, for each value."""
    return 4 * node.top[0].count


RULES: dict[str, Callable[[Node], int]] = {
    "Axpy": _of_elements,
    "BatchNorm": _of_elements,
    "Convolution": _of_outputs,
    "ConvolutionDepthwise": _of_outputs,
    "Deconvolution": _of_inputs,
    "DepthwiseConvolution": _of_outputs,
    "Eltwise": _of_eltwise,
    "InnerProduct": _of_rows,
    "Interp": _of_corners,
    "LSTM": _of_steps,
    "LSTMUnit": _of_gates,
    "PReLU": _of_elements,
    "RNN": _of_steps,
    "Scale": _of_elements,
}
"""Layer type -> its multiply-adds.

A type that is not here counts 0: it moves, compares or adds values (pooling, biases, losses), or applies a function to
them (activations, softmax, normalisation over neighbours). Padding counts as input.
"""
