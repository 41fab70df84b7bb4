"""The PyTorch twin of a net of ours: the same layers with the same shapes, straight from the prototxt.

The twin is an `nn.Module` whose `forward` is generated code (torch.fx), one line per layer as one would write it by
hand, each array dropped after its last use. In phase TRAIN it takes the net's inputs and returns the weighted sum of
the losses, in phase TEST it takes images and returns the last top. Where PyTorch has a better form of the same
mathematics it is used: batch norm and the scale behind it are one module, a sum adds in place, a tiled axis is
expanded. An LSTM begins a text with each batch, whatever `cont` says.

Of each node of the graph `meta["nbytes"]` has the bytes of what it makes (in float32), and `meta["changes"]` the node
whose array it changes, if it works in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from blobmem.proto import caffe_pb2

_MAX = caffe_pb2.PoolingParameter.MAX


def twin(net: Any) -> fx.GraphModule:
    """The twin of a blobmem Net, with random values. Raises ValueError for a layer that has none, or if the two have
    different numbers of parameters."""
    module = _Twin(net).build()
    ours = parameter_count(net)
    theirs = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if ours != theirs:
        raise ValueError(f"{net.identity} has {ours} parameters, its twin {theirs}")
    return module


def parameter_count(net: Any) -> int:
    """Learned values of a Net, so without batch norm's statistics."""
    return sum(blob.count for node in net.nodes if node.layer.type != "BatchNorm" for blob in node.layer.blobs)


def load(module: fx.GraphModule, net: Any) -> None:
    """Give a twin the parameters and statistics of its net."""
    norms = _norms(net)
    for node in net.nodes:
        blobs = [torch.from_numpy(blob.cpu_data().copy()) for blob in node.layer.blobs]
        if node.layer.type == "BatchNorm":
            norm: Any = module.get_submodule(_identifier(node.layer.name))
            scale = float(blobs[2][0])
            norm.running_mean.copy_(blobs[0] / scale if scale else blobs[0])
            norm.running_var.copy_(blobs[1] / scale if scale else blobs[1])
        elif blobs:
            owner: Any = module.get_submodule(_identifier(norms.get(node.layer.name, node.layer.name)))
            if node.layer.type == "LSTM":
                blobs = [_gates(blob) for blob in blobs]
            places = ("weight_ih_l0", "bias_ih_l0", "weight_hh_l0") if node.layer.type == "LSTM" else ("weight", "bias")
            with torch.no_grad():
                for name, values in zip(places, blobs, strict=False):
                    parameter = getattr(owner, name)
                    parameter.copy_(values.reshape(parameter.shape))


class _Twin:
    """A module under construction: the graph, the modules that it calls, and what holds each blob by now."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.norms = _norms(net)
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.shared: set[str] = set()  # blobs that a Split made: others read the same array
        self.losses: list[fx.Node] = []

    def build(self) -> fx.GraphModule:
        for name in self.net.inputs:
            self.values[name] = self.graph.placeholder(name)
        nodes = [node for node in self.net.nodes if node.layer.type != "Input"]
        for node in nodes:
            add: Callable[[Any], fx.Node] | None = getattr(self, f"_{node.layer.type}", None)
            if add is None:
                raise ValueError(f"layer '{node.layer.name}': {node.layer.type} has no counterpart here")
            value = add(node)
            value.meta.setdefault("nbytes", sum(top.nbytes for top in node.top))
            self.values.update(dict.fromkeys(node.top_names, value))
        total = self.losses[0] if self.losses else self.values[nodes[-1].top_names[0]]
        for loss in self.losses[1:]:
            total = self.graph.call_function(operator.add, (total, loss))
        self.graph.output(total)
        return fx.GraphModule(self.root, self.graph)

    def _module(self, node: Any, module: nn.Module) -> fx.Node:
        name = _identifier(node.layer.name)
        self.root.add_module(name, module)
        return self.graph.call_module(name, (self._bottom(node),))

    def _changing(self, node: Any, module: nn.Module) -> fx.Node:
        result = self._module(node, module)
        if node.bottom_names == node.top_names:
            result.meta |= {"nbytes": 0, "changes": self._bottom(node)}
        return result

    def _bottom(self, node: Any, index: int = 0) -> fx.Node:
        return self.values[node.bottom_names[index]]

    # Layers, by type

    def _Split(self, node: Any) -> fx.Node:
        self.shared.update(node.top_names)
        return self._bottom(node)

    def _Convolution(self, node: Any) -> fx.Node:
        layer = node.layer
        window, group = layer.window, layer.attributes["group"]
        kind: Any = nn.Conv3d if len(window.kernel) == 3 else nn.Conv2d
        return self._module(
            node,
            kind(layer.channels, layer.outputs, window.kernel, window.stride, window.pad, window.dilation, group,
                 bias=layer.bias),
        )  # fmt: skip

    def _Deconvolution(self, node: Any) -> fx.Node:
        layer = node.layer
        window, group = layer.window, layer.attributes["group"]
        kind: Any = nn.ConvTranspose3d if len(window.kernel) == 3 else nn.ConvTranspose2d
        return self._module(
            node,
            kind(layer.channels, layer.outputs, window.kernel, window.stride, window.pad, 0, group, layer.bias,
                 window.dilation),
        )  # fmt: skip

    def _Embed(self, node: Any) -> fx.Node:
        rows = self.graph.call_method("long", (self._bottom(node),))
        rows.meta["nbytes"] = 2 * node.bottom[0].nbytes
        name = _identifier(node.layer.name)
        self.root.add_module(name, nn.Embedding(*node.layer.blobs[0].shape))
        return self.graph.call_module(name, (rows,))

    def _LSTM(self, node: Any) -> fx.Node:
        lstm = nn.LSTM(node.layer.inputs, node.layer.units)
        nn.init.zeros_(lstm.bias_hh_l0).requires_grad_(False)  # the net has one bias
        both = self._module(node, lstm)
        both.meta["nbytes"] = sum(blob.nbytes for blob in node.layer.internal.values())
        return self.graph.call_function(operator.getitem, (both, 0))

    def _Tile(self, node: Any) -> fx.Node:
        options, shape = node.layer.param.tile_param, [-1] * node.bottom[0].num_axes
        shape[options.axis] = options.tiles
        if node.bottom[0].shape[options.axis] != 1:
            raise ValueError(f"layer '{node.layer.name}': only an axis of one is tiled here")
        tiled = self.graph.call_method("expand", (self._bottom(node), *shape))
        tiled.meta["nbytes"] = 0
        return tiled

    def _PReLU(self, node: Any) -> fx.Node:
        return self._module(node, nn.PReLU(node.layer.blobs[0].count))

    def _InnerProduct(self, node: Any) -> fx.Node:
        bottom, axis = node.bottom[0], node.layer.axis
        flat = self._bottom(node)
        if bottom.num_axes > axis + 1:
            flat = self.graph.call_function(torch.flatten, (flat, axis))
            flat.meta["nbytes"] = 0
        outputs, inputs = node.layer.blobs[0].shape
        name = _identifier(node.layer.name)
        self.root.add_module(name, nn.Linear(inputs, outputs, bias=len(node.layer.blobs) > 1))
        return self.graph.call_module(name, (flat,))

    def _Pooling(self, node: Any) -> fx.Node:
        layer = node.layer
        if layer.is_global:
            return self._module(node, nn.AdaptiveMaxPool2d(1) if layer.method == _MAX else nn.AdaptiveAvgPool2d(1))
        kind: Any = nn.MaxPool2d if layer.method == _MAX else nn.AvgPool2d
        return self._module(node, kind(layer.kernel, layer.stride, layer.pad, ceil_mode=layer.ceil))

    def _LRN(self, node: Any) -> fx.Node:
        options = node.layer.param.lrn_param
        if options.norm_region:
            raise ValueError(f"layer '{node.layer.name}': LRN within channels has no counterpart in PyTorch")
        return self._module(node, nn.LocalResponseNorm(options.local_size, options.alpha, options.beta, options.k))

    def _ReLU(self, node: Any) -> fx.Node:
        return self._changing(node, nn.ReLU(inplace=node.bottom_names == node.top_names))

    def _Dropout(self, node: Any) -> fx.Node:
        # not in place: the rectifier before it keeps what it gave
        return self._module(node, nn.Dropout(node.layer.param.dropout_param.dropout_ratio))

    def _BatchNorm(self, node: Any) -> fx.Node:
        options = node.layer.param.batch_norm_param
        channels, scaled = node.bottom[0].shape[1], node.layer.name in self.norms.values()
        momentum = 1 - options.moving_average_fraction
        return self._module(node, nn.BatchNorm2d(channels, options.eps, momentum, affine=scaled))

    def _Scale(self, node: Any) -> fx.Node:
        if node.layer.name not in self.norms:
            raise ValueError(f"layer '{node.layer.name}': a Scale that follows no BatchNorm has no twin here")
        return self._bottom(node)  # the batch norm's module scales

    def _Eltwise(self, node: Any) -> fx.Node:
        options = node.layer.param.eltwise_param
        if options.operation != caffe_pb2.EltwiseParameter.SUM or options.coeff or len(node.bottom) != 2:
            raise ValueError(f"layer '{node.layer.name}': only sums of two are made here")
        other, own = node.bottom_names
        if own in self.shared:
            other, own = own, other
        add = operator.add if own in self.shared else operator.iadd
        total = self.graph.call_function(add, (self.values[own], self.values[other]))
        if add is operator.iadd:
            total.meta |= {"nbytes": 0, "changes": self.values[own]}
        return total

    def _Concat(self, node: Any) -> fx.Node:
        parts = [self.values[name] for name in node.bottom_names]
        return self.graph.call_function(torch.cat, (parts, node.layer.param.concat_param.axis))

    def _Softmax(self, node: Any) -> fx.Node:
        return self._module(node, nn.Softmax(node.layer.param.softmax_param.axis))

    def _SoftmaxWithLoss(self, node: Any) -> fx.Node:
        scores, labels = self._bottom(node), self.graph.call_method("long", (self._bottom(node, 1),))
        labels.meta["nbytes"] = 2 * node.bottom[1].nbytes
        axis = node.layer.param.softmax_param.axis
        if axis > 1:  # PyTorch wants the classes on axis 1
            scores, labels = (self.graph.call_function(torch.flatten, (each, 0, axis - 1)) for each in (scores, labels))
            scores.meta["nbytes"] = labels.meta["nbytes"] = 0
        loss = self.graph.call_function(functional.cross_entropy, (scores, labels))
        loss.meta["nbytes"] = node.bottom[0].nbytes  # which its gradient keeps
        ((_, weight),) = node.losses
        self.losses.append(loss if weight == 1 else self.graph.call_function(operator.mul, (loss, weight)))
        return loss


def _identifier(name: str) -> str:
    """A layer's name as an attribute of a module."""
    return "".join(letter if letter.isalnum() else "_" for letter in f"_{name}")


def _gates(values: torch.Tensor) -> torch.Tensor:
    """An LSTM's rows in PyTorch's order: input, forget, new, output."""
    one, two, three, four = values.chunk(4)
    return torch.cat((one, two, four, three))


def _norms(net: Any) -> dict[str, str]:
    """Of each Scale with bias right behind a BatchNorm, whose module holds its parameters, that batch norm's name."""
    return {
        after.layer.name: before.layer.name
        for before, after in itertools.pairwise(net.nodes)
        if (before.layer.type, after.layer.type) == ("BatchNorm", "Scale")
        and after.bottom_names == before.top_names
        and len(after.layer.blobs) == 2
    }
