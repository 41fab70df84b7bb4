"""Nets and solvers in Caffe's older formats, brought up to date.

The formats, oldest first: V0 (see `upgrade_v0`); V1, `layers { type: CONVOLUTION }` with data layers that transform
images by themselves; nets with `input` and `input_dim` or `input_shape` instead of an Input layer; BatchNorm layers
that state three `param`; solvers with `solver_type: ADAM`. The results are those of Caffe's upgrade_proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.upgrade_v0 import merge_padding, upgrade_v0_layer

V1_TYPES = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ACCURACY": "Accuracy",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "CONCAT": "Concat",
    "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "CONVOLUTION": "Convolution",
    "DATA": "Data",
    "DECONVOLUTION": "Deconvolution",
    "DROPOUT": "Dropout",
    "DUMMY_DATA": "DummyData",
    "ELTWISE": "Eltwise",
    "EUCLIDEAN_LOSS": "EuclideanLoss",
    "EXP": "Exp",
    "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "HINGE_LOSS": "HingeLoss",
    "IM2COL": "Im2col",
    "IMAGE_DATA": "ImageData",
    "INFOGAIN_LOSS": "InfogainLoss",
    "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN",
    "MEMORY_DATA": "MemoryData",
    "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "MVN": "MVN",
    "POOLING": "Pooling",
    "POWER": "Power",
    "RELU": "ReLU",
    "SIGMOID": "Sigmoid",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
    "SILENCE": "Silence",
    "SLICE": "Slice",
    "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "SPLIT": "Split",
    "TANH": "TanH",
    "THRESHOLD": "Threshold",
    "WINDOW_DATA": "WindowData",
}
"""V1's enum of layer types to today's strings."""

SOLVER_TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
"""The old enum of solvers to today's strings."""

_DATA_LAYERS = {"Data": "data_param", "ImageData": "image_data_param", "WindowData": "window_data_param"}
_TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")


@dataclass
class Upgrade:
    """What an upgrade did: false if nothing, and one line of text otherwise.

    Attributes:
        steps: what was brought up to date, in order, one phrase each.
        ignored: what the file says and has no effect, in old Caffe or in today's, one phrase each.
    """

    steps: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps or self.ignored)

    def __str__(self) -> str:
        parts = []
        if self.steps:
            parts.append("upgraded " + ", ".join(self.steps))
        if self.ignored:
            parts.append("ignored " + ", ".join(self.ignored))
        return "; ".join(parts) or "up to date"


def upgrade_net(net: Any) -> Upgrade:
    """Brings a NetParameter up to date, in place, and tells what that took.

    Parameter values, learning rates, names of shared parameters, loss weights and phase rules are kept. An up-to-date
    net is left as it is. NetError, which names the layer, for what no format allows.
    """
    done = Upgrade()
    _upgrade_v0(net, done)
    _note_transformations(net, done)
    _upgrade_v1(net, done)
    _upgrade_input(net, done)
    _upgrade_batch_norm(net, done)
    return done


def upgrade_solver(solver: Any) -> Upgrade:
    """Brings a SolverParameter, and the nets written inside it, up to date in place. NetError as in `upgrade_net`."""
    done = Upgrade()
    if solver.HasField("solver_type"):
        if solver.HasField("type"):
            raise NetError("both solver_type and type are given: remove solver_type, the older of the two")
        old = caffe_pb2.SolverParameter.SolverType.Name(solver.solver_type)
        solver.type = SOLVER_TYPES[old]
        solver.ClearField("solver_type")
        done.steps.append(f'solver_type {old} to type "{solver.type}"')
    nets = [getattr(solver, name) for name in ("net_param", "train_net_param") if solver.HasField(name)]
    for net in (*nets, *solver.test_net_param):
        inner = upgrade_net(net)
        done.steps += inner.steps
        done.ignored += inner.ignored
    return done


def _upgrade_v0(net: Any, done: Upgrade) -> None:
    count = sum(layer.HasField("layer") for layer in net.layers)
    if not count:
        return
    merged = merge_padding(net)
    for layer in net.layers:
        if layer.HasField("layer"):
            done.ignored += upgrade_v0_layer(layer)
    done.steps.append(f"{_count(count, 'V0 layer')}" + (f" ({merged} of them padding)" if merged else ""))


def _upgrade_v1(net: Any, done: Upgrade) -> None:
    if not net.layers:
        return
    if net.layer:
        raise NetError(
            f"holds {_count(len(net.layers), 'V1 layer')} (`layers`, first '{net.layers[0].name}') and "
            f"{len(net.layer)} of today's (`layer`, first '{net.layer[0].name}'), whose order to each other is not "
            f"known: write all of them as `layer`"
        )
    transformed = 0
    for old in net.layers:
        new = net.layer.add()
        _convert_v1_layer(old, new)
        transformed += _move_transformation(new)
    done.steps.append(_count(len(net.layers), "V1 layer"))
    if transformed:
        done.steps.append(f"{_count(transformed, 'data layer')} to transform_param")
    net.ClearField("layers")


def _convert_v1_layer(old: Any, new: Any) -> None:
    """Fills the empty LayerParameter `new` from the V1LayerParameter `old`."""
    for descriptor, value in old.ListFields():
        name = descriptor.name
        if name == "type":
            new.type = V1_TYPES[caffe_pb2.V1LayerParameter.LayerType.Name(value)]
        elif name == "name":
            new.name = value
        elif name == "param":
            _set_param_specs(new, "name", value)
        elif name == "blob_share_mode":
            _set_param_specs(new, "share_mode", value)
        elif name == "blobs_lr":
            _set_param_specs(new, "lr_mult", value)
        elif name == "weight_decay":
            _set_param_specs(new, "decay_mult", value)
        else:
            # What is left has the same name and type in both: blobs, rules, loss weights, sub-messages.
            getattr(new, name).MergeFrom(value)


def _set_param_specs(layer: Any, name: str, values: Any) -> None:
    for i, value in enumerate(values):
        if i == len(layer.param):
            layer.param.add()
        setattr(layer.param[i], name, value)


def _move_transformation(layer: Any) -> bool:
    """Moves what a V1 data layer did to its images into transform_param; returns whether there was anything."""
    name = _DATA_LAYERS.get(layer.type, "")
    if not name or not layer.HasField(name):
        return False
    settings = getattr(layer, name)
    given = [key for key in _TRANSFORM_FIELDS if settings.HasField(key)]
    for key in given:
        setattr(layer.transform_param, key, getattr(settings, key))
        settings.ClearField(key)
    return bool(given)


def _note_transformations(net: Any, done: Upgrade) -> None:
    """Today's data layers still have the old fields, which Caffe ignores: so do we, and say it."""
    for layer in net.layer:
        settings = getattr(layer, _DATA_LAYERS[layer.type]) if layer.type in _DATA_LAYERS else None
        for key in _TRANSFORM_FIELDS:
            if settings is not None and settings.HasField(key):
                done.ignored.append(f"{key} of data layer '{layer.name}' (move it to its transform_param)")


def _upgrade_input(net: Any, done: Upgrade) -> None:
    names = list(net.input)
    if not names:
        return
    shapes = _input_shapes(net, names, done)
    for name in ("input", "input_shape", "input_dim"):
        net.ClearField(name)
    if not shapes:
        # Weights files of old deploy nets name their inputs and nothing else about them.
        done.steps.append("input (names without shapes, in a file of weights)")
        return
    taken = {layer.name for layer in net.layer}
    label = next(label for label in ("input", *(f"input_{i}" for i in range(1, len(taken) + 2))) if label not in taken)
    layer = net.layer.add(name=label, type="Input", top=names)
    for shape in shapes:
        layer.input_param.shape.add(dim=shape)
    # Repeated messages have no portable insert; sort is stable and asks for one key per entry, in order.
    keys = iter([1] * (len(net.layer) - 1) + [0])
    net.layer.sort(key=lambda _: next(keys))
    done.steps.append(f"input to an Input layer '{label}'")


def _input_shapes(net: Any, names: list[str], done: Upgrade) -> list[list[int]]:
    """One shape for each of the net's inputs; none at all in a file of weights."""
    dims = list(net.input_dim)
    if net.input_shape:
        if len(net.input_shape) != len(names):
            raise NetError(
                f"{_count(len(names), 'input')} ({', '.join(names)}) but {len(net.input_shape)} input_shape: "
                f"give one input_shape for each"
            )
        if dims:
            done.ignored.append("input_dim beside input_shape")
        return [list(shape.dim) for shape in net.input_shape]
    if dims or not any(layer.blobs for layer in net.layer):
        if len(dims) != 4 * len(names):
            raise NetError(
                f"{_count(len(names), 'input')} ({', '.join(names)}) but {len(dims)} input_dim: give four for each "
                f"(batch, channels, height, width), or one input_shape"
            )
        return [dims[i : i + 4] for i in range(0, len(dims), 4)]
    return []


def _upgrade_batch_norm(net: Any, done: Upgrade) -> None:
    """Statistics are not learned: three `param` are how files said so before the layer saw to it."""
    count = 0
    for layer in net.layer:
        if layer.type != "BatchNorm" or len(layer.param) != 3:
            continue
        stale = [spec for spec in layer.param if (spec.lr_mult, spec.decay_mult) != (0, 0)]
        for spec in stale:
            spec.lr_mult = spec.decay_mult = 0
        count += bool(stale)
    if count:
        done.steps.append(f"{_count(count, 'BatchNorm layer')} to lr_mult and decay_mult 0")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
