"""From a NetParameter to the layers that one phase runs: rules, batch overrides, splits. Functions on messages only."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

PHASES = ("TRAIN", "TEST")

log = logging.getLogger("blobmem")


def net_state(phase: int, level: int = 0, stages: Iterable[str] = ()) -> Any:
    """The NetState message of a phase, a level and stages."""
    return caffe_pb2.NetState(phase=phase, level=level, stage=list(stages))


def meets(rule: Any, state: Any) -> bool:
    """Whether a net state meets a NetStateRule: its phase, levels, all its stages and none of its not_stages."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)


def included(layer: Any, state: Any, source: str = "") -> bool:
    """Whether a layer takes part in a state. Raises NetError if it has both include and exclude rules."""
    if layer.include and layer.exclude:
        where = f"{source}: " if source else ""
        raise NetError(f"{where}layer '{layer.name}' ({layer.type}): give either include or exclude rules, not both")
    if layer.include:
        return any(meets(rule, state) for rule in layer.include)
    return not any(meets(rule, state) for rule in layer.exclude)


def filter_net(param: Any, state: Any, source: str = "") -> Any:
    """A copy of the net with the layers that the state includes, each with its phase set and a name of its own."""
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    del result.layer[:]
    result.state.CopyFrom(state)
    for layer in param.layer:
        if included(layer, state, source):
            kept = result.layer.add()
            kept.CopyFrom(layer)
            if not kept.HasField("phase"):
                kept.phase = state.phase
    _tell_apart(result, source)
    return result


def _tell_apart(param: Any, source: str) -> None:
    """Add a number to the names of layers that an earlier layer has: Caffe takes them, and so nets have them."""
    names = {layer.name for layer in param.layer}
    seen: set[str] = set()
    for layer in param.layer:
        if layer.name in seen:
            name = next(f"{layer.name}_{i}" for i in itertools.count(2) if f"{layer.name}_{i}" not in names)
            where = f"{source}: " if source else ""
            log.warning("%sthe second layer named '%s' (%s) is called '%s' here", where, layer.name, layer.type, name)
            names.add(name)
            layer.name = name
        seen.add(layer.name)


def split_name(layer: str, blob: str, index: int) -> str:
    """Caffe's name of the split layer of a layer's top."""
    return f"{blob}_{layer}_{index}_split"


def insert_splits(param: Any, source: str = "") -> Any:
    """A copy of the net with a Split layer after every top that is used more than once.

    Use as a loss counts as one. Names are Caffe's, so that files and scripts find the blobs they know.
    Raises NetError for a bottom that no layer before it produces.
    """
    where = f"{source}: " if source else ""
    producer: dict[str, tuple[int, int]] = {}
    uses: Counter[tuple[int, int]] = Counter()
    bottoms: dict[tuple[int, int], tuple[int, int]] = {}
    weights: dict[tuple[int, int], float] = {}
    for i, layer in enumerate(param.layer):
        for j, name in enumerate(layer.bottom):
            if name not in producer:
                known = ", ".join(list(producer)[-8:]) or "none"
                later = [other.name for other in param.layer[i + 1 :] if name in other.top]
                order = f"; layer '{later[0]}' does, and comes later: a net has no cycles" if later else ""
                raise NetError(
                    f"{where}layer '{layer.name}' ({layer.type}), bottom {j}: no layer before it produces blob "
                    f"'{name}' (the last ones are: {known}){order}"
                )
            bottoms[i, j] = producer[name]
            uses[producer[name]] += 1
        for j, name in enumerate(layer.top):
            producer[name] = (i, j)
            if j < len(layer.loss_weight) and layer.loss_weight[j]:
                weights[i, j] = layer.loss_weight[j]
                uses[i, j] += 1
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    del result.layer[:]
    taken: Counter[tuple[int, int]] = Counter()
    for i, layer in enumerate(param.layer):
        kept = result.layer.add()
        kept.CopyFrom(layer)
        for j, name in enumerate(layer.bottom):
            top = bottoms[i, j]
            if uses[top] > 1:
                kept.bottom[j] = f"{split_name(param.layer[top[0]].name, name, top[1])}_{taken[top]}"
                taken[top] += 1
        for j in range(len(layer.top)):
            if uses[i, j] > 1:
                _add_split(result, kept, j, uses[i, j], weights.get((i, j), 0.0))
                taken[i, j] += (i, j) in weights
    return result


def _add_split(result: Any, layer: Any, index: int, count: int, weight: float) -> None:
    blob = layer.top[index]
    split = result.layer.add(name=split_name(layer.name, blob, index), type="Split", phase=layer.phase)
    split.bottom.append(blob)
    split.top.extend(f"{split.name}_{k}" for k in range(count))
    if weight:
        # the loss is then the split's first top, so that the layer's own top takes the sum of all gradients
        split.loss_weight.extend([weight] + [0.0] * (count - 1))
        layer.loss_weight[index] = 0.0


_BATCHED = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "WindowData": "window_data_param",
    "HDF5Data": "hdf5_data_param",
    "MemoryData": "memory_data_param",
}


def set_batch(param: Any, batch: int) -> int:
    """Give every data and input layer of a (filtered) net that batch size; returns how many were changed."""
    changed = 0
    for layer in param.layer:
        if layer.type in _BATCHED:
            getattr(layer, _BATCHED[layer.type]).batch_size = batch
        elif layer.type in ("Input", "DummyData"):
            options = layer.input_param if layer.type == "Input" else layer.dummy_data_param
            for shape in options.shape:
                if shape.dim:
                    shape.dim[0] = batch
            if layer.type == "DummyData":
                options.num[:] = [batch] * len(options.num)
        else:
            continue
        changed += 1
    return changed
