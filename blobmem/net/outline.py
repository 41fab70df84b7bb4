"""Nets in outline: layers and the shapes of their blobs, without splits, schedules or a byte of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blobmem import dtypes
from blobmem.devices import HOST
from blobmem.layers.base import Context
from blobmem.memory.blob import Blob
from blobmem.net.build import Graph, Node, wire
from blobmem.net.builder import Spec
from blobmem.net.graph import filter_net, net_state, set_batch


def outline(
    spec: Spec,
    *,
    batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: Any = np.float32,
) -> Graph:
    """The layers of a net as its file has them, wired to blobs that have their shapes and no memory.

    Options are those of Net. Raises NetError for anything wrong in the file, or a shape that nobody states.
    """
    param = filter_net(spec.model, net_state(spec.phase, spec.level, spec.stages), spec.source)
    if batch is not None:
        set_batch(param, batch)
    shapes = {name: tuple(shape) for name, shape in (input_shapes or {}).items()}
    context = Context(HOST, spec.phase, source=spec.source, dtype=dtypes.of(dtype), input_shapes=shapes)
    return wire(param, context)


def upper_bounds(nodes: Sequence[Node]) -> set[str]:
    """The blobs whose shapes are the largest there can be: tops of dynamic layers, and what is made from them."""
    result: set[str] = set()
    for node in nodes:
        if node.layer.dynamic or not result.isdisjoint(node.bottom_names):
            result.update(node.top_names)
    return result


def shape_text(blob: Blob, at_most: bool = False) -> str:
    """A blob's shape for people: "64x3x227x227", "1" for a single value; "<=" goes before an upper bound."""
    return ("<=" if at_most else "") + ("x".join(map(str, blob.shape)) or "1")
