"""From a filtered net with splits to layers wired to blobs, with who needs a gradient worked out."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blobmem import dtypes
from blobmem.devices import Device
from blobmem.errors import DeviceError, NetError
from blobmem.layers.base import Context, Layer, create_layer
from blobmem.memory.blob import Blob
from blobmem.proto import caffe_pb2


@dataclass(slots=True)
class Node:
    """A layer in its net: its blobs by position, its tops that are losses with their weights, and which gradients its
    backward gives."""

    layer: Layer
    bottom_names: list[str]
    top_names: list[str]
    bottom: list[Blob]
    top: list[Blob]
    losses: list[tuple[Blob, float]]
    bottom_need: list[bool] = field(default_factory=list)
    need_backward: bool = False


@dataclass(slots=True)
class LearnableParam:
    """A parameter that the solver updates, once however many layers share it."""

    blob: Blob
    lr_mult: float
    decay_mult: float
    layer: str
    index: int
    name: str = ""


@dataclass(slots=True)
class Graph:
    """A wired net: nodes in the order they run, blobs by name, parameters."""

    nodes: list[Node]
    blobs: dict[str, Blob]
    learnable: list[LearnableParam]
    outputs: list[str]
    inputs: list[str]


def wire(param: Any, context: Context, forward_only: bool = False, exact: Container[str] = ()) -> Graph:
    """Create the layers, set them up, shape their blobs and decide which gradients are needed.

    The blobs named in `exact` are of float32 though the net is of another dtype.

    Raises NetError naming file, layer and field for anything wrong in the prototxt.
    """
    blobs: dict[str, Blob] = {}
    unused: dict[str, None] = {}
    needs: dict[str, bool] = {}
    nodes: list[Node] = []
    seen: set[str] = set()
    taken = {name for layer in param.layer for name in layer.top}
    for message in param.layer:
        if message.name in seen:
            raise NetError(f"{context.source}: two layers of this phase are named '{message.name}'; names are unique")
        seen.add(message.name)
        node = _append(_with_automatic_top(message, taken), context, blobs, unused, exact)
        _set_up(node)
        _mark_needs(node, needs, param.force_backward)
        nodes.append(node)
    learnable = share_parameters(nodes, context)
    _prune(nodes)
    if param.force_backward:
        _force(nodes)
    for node in nodes:
        node.need_backward &= not forward_only
        node.layer.keeps_state = node.need_backward
    _keep_bottoms(nodes)
    _mark_used_gradients(nodes, set(unused))
    inputs = [name for node in nodes if node.layer.type == "Input" for name in node.top_names]
    # Caffe keeps them in a sorted set: scripts take outputs[0]
    return Graph(nodes, blobs, learnable, sorted(unused), inputs)


def _append(
    message: Any, context: Context, blobs: dict[str, Blob], unused: dict[str, None], exact: Container[str]
) -> Node:
    layer = create_layer(message, context)
    bottom_names, top_names = list(layer.param.bottom), list(layer.param.top)
    if message.propagate_down and len(message.propagate_down) != len(bottom_names):
        raise layer.error("propagate_down", f"none or {len(bottom_names)} values, one for each bottom")
    if message.loss_weight and len(message.loss_weight) != len(top_names):
        raise layer.error("loss_weight", f"none or {len(top_names)} values, one for each top", len(message.loss_weight))
    if "" in top_names:
        raise layer.error("top", "a name", "''")
    for name in bottom_names:
        if name not in blobs:
            raise layer.error("bottom", "a blob that an earlier layer produces", f"'{name}'")
        unused.pop(name, None)
    for index, name in enumerate(top_names):
        in_place = index < len(bottom_names) and bottom_names[index] == name
        if name in blobs and not in_place:
            raise layer.error("top", "a name that no earlier layer produces (in place: the same bottom)", f"'{name}'")
        if not in_place:
            dtype = context.exact if name in exact else context.dtype
            blobs[name] = Blob(dtype=dtype, device=context.device, name=name)
        unused[name] = None
    bottom, top = [blobs[name] for name in bottom_names], [blobs[name] for name in top_names]
    losses = [(blob, weight) for i, blob in enumerate(top) if (weight := layer.loss_weight(i))]
    return Node(layer, bottom_names, top_names, bottom, top, losses)


def _keep_bottoms(nodes: Sequence[Node]) -> None:
    """Tell layers that ask to know it that their bottom is overwritten before their gradient is made."""
    for index, node in enumerate(nodes):
        if node.layer.keeps_bottom is None:
            continue
        memory = node.bottom[0].data_view.memory
        tops = [top for later in nodes[index + 1 :] for top in later.top if any(top is each for each in later.bottom)]
        if any(top.data_view.memory is memory for top in tops):
            node.layer.keeps_bottom = True
            node.layer.reshape(node.bottom, node.top)


def _with_automatic_top(message: Any, taken: set[str]) -> Any:
    """Losses may leave out their top, as old files do; it is named after the layer, with a number if that is taken."""
    if message.top or not message.type.endswith("Loss"):
        return message
    names = itertools.chain([message.name], (f"{message.name}_{i}" for i in itertools.count(2)))
    result = caffe_pb2.LayerParameter()
    result.CopyFrom(message)
    result.top.append(next(name for name in names if name not in taken))
    taken.update(result.top)
    return result


@contextlib.contextmanager
def _saying_shapes(node: Node) -> Iterator[None]:
    """Name the layer and its bottoms in whatever does not fit."""
    try:
        yield
    except NetError:
        raise
    except (ValueError, IndexError) as error:
        if node.layer.type == "Python":  # the user's own error
            raise
        if not node.bottom:
            raise node.layer.error("shape", f"one that a blob can have ({error})") from error
        shapes = ", ".join(blob.describe() for blob in node.bottom)
        raise node.layer.error("shapes", f"bottoms that fit ({error}); bottoms are", shapes) from error


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage waits: a deep net is a million objects that stay, and to look for cycles among them as they come takes
    longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def reshape(node: Node) -> None:
    """Let the layer give its tops their shapes. Raises NetError naming it if its bottoms do not fit."""
    with _saying_shapes(node):
        node.layer.reshape(node.bottom, node.top)


def resize(node: Node) -> None:
    """Let a dynamic layer give its tops their true shapes. Raises NetError naming it if its bottoms do not fit."""
    with _saying_shapes(node):
        node.layer.resize(node.bottom, node.top)


def _set_up(node: Node) -> None:
    layer = node.layer
    with _saying_shapes(node):
        layer.setup(node.bottom, node.top)
    reshape(node)
    if len(layer.param.param) > len(layer.blobs):
        raise layer.error("param", f"at most {len(layer.blobs)} entries, as many as it has parameters")


def _param_spec(layer: Layer, index: int) -> Any:
    return layer.param.param[index] if index < len(layer.param.param) else caffe_pb2.ParamSpec()


def _mark_needs(node: Node, needs: dict[str, bool], force: bool) -> None:
    layer = node.layer
    given = list(layer.param.propagate_down)
    node.bottom_need = [
        (given[i] if given else needs[name]) and layer.can_propagate(i) for i, name in enumerate(node.bottom_names)
    ]
    layer.param_grads = [force or _param_spec(layer, i).lr_mult != 0 for i in range(len(layer.blobs))]
    node.need_backward = any(layer.param_grads) or any(
        given[i] if given else needs[name] for i, name in enumerate(node.bottom_names)
    )
    for name in node.top_names:
        needs[name] = node.need_backward


def share_parameters(nodes: Sequence[Node], context: Context) -> list[LearnableParam]:
    """Put parameters that share a name into one memory; the first layer's is the one that counts.

    Raises NetError if shapes (or, with PERMISSIVE, counts) differ, or multipliers contradict each other.
    """
    owners: dict[str, LearnableParam] = {}
    learnable: list[LearnableParam] = []
    for node in nodes:
        layer = node.layer
        for index, blob in enumerate(layer.blobs):
            spec = _param_spec(layer, index)
            owner = owners.get(spec.name) if spec.name else None
            if owner is None:
                entry = LearnableParam(blob, spec.lr_mult, spec.decay_mult, layer.name, index, spec.name)
                learnable.append(entry)
                if spec.name:
                    owners[spec.name] = entry
                continue
            permissive = spec.share_mode == caffe_pb2.ParamSpec.PERMISSIVE
            fits = blob.count == owner.blob.count if permissive else blob.shape == owner.blob.shape
            if not fits:
                raise layer.error(
                    f"param {index}",
                    f"the {'count' if permissive else 'shape'} of '{spec.name}' in layer "
                    f"'{owner.layer}', {owner.blob.describe()}",
                    blob.describe(),
                )
            _merge_multipliers(layer, index, spec, owner, nodes)
            blob.share_data(owner.blob)
            blob.share_diff(owner.blob)
            layer.shared_params.add(index)
    return learnable


def _merge_multipliers(layer: Layer, index: int, spec: Any, owner: LearnableParam, nodes: Sequence[Node]) -> None:
    first = next(node.layer for node in nodes if node.layer.name == owner.layer)
    owner_spec = _param_spec(first, owner.index)
    for name in ("lr_mult", "decay_mult"):
        if not spec.HasField(name):
            continue
        if owner_spec.HasField(name) and getattr(owner_spec, name) != getattr(spec, name):
            raise layer.error(
                f"param {index}, {name}",
                f"that of the shared '{spec.name}', {getattr(owner_spec, name)}",
                getattr(spec, name),
            )
        setattr(owner, name, getattr(spec, name))


def _prune(nodes: Sequence[Node]) -> None:
    """Drop backward where no loss depends on it, or where nothing above hands a gradient down."""
    under_loss: set[str] = set()
    stopped: set[str] = set()
    for node in reversed(nodes):
        layer = node.layer
        contributes = skip = False
        if node.top_names:
            contributes = any(layer.loss_weight(i) or name in under_loss for i, name in enumerate(node.top_names))
            skip = all(name in stopped for name in node.top_names)
        if not contributes or skip:
            node.need_backward = False
        if skip:
            node.bottom_need = [False] * len(node.bottom_need)
        for i, name in enumerate(node.bottom_names):
            if contributes:
                under_loss.add(name)
            else:
                node.bottom_need[i] = False
            if not node.bottom_need[i]:
                stopped.add(name)


def _force(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.need_backward = True
        node.bottom_need = [need or node.layer.can_propagate(i) for i, need in enumerate(node.bottom_need)]


def _mark_used_gradients(nodes: Sequence[Node], outputs: set[str]) -> None:
    """Tell each layer which of its tops' gradients anybody writes: a layer above, a loss weight, or the user."""
    written: set[str] = set(outputs)
    for node in reversed(nodes):
        layer = node.layer
        layer.top_grads = [name in written or bool(layer.loss_weight(i)) for i, name in enumerate(node.top_names)]
        if node.need_backward:
            written.update(name for name, need in zip(node.bottom_names, node.bottom_need, strict=True) if need)


def check_device(dtype: np.dtype, device: Device) -> None:
    """Raise DeviceError for a dtype in which the device does not compute."""
    if dtypes.is_half(dtype) and device.compute and device.family == "host":
        raise DeviceError(
            f"nets of {dtype} compute on a GPU, not on {device.name}: give device='cuda' (--device cuda), or take "
            "dtype float32"
        )
