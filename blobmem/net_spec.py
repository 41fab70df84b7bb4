"""Nets written in Python: every layer is a call, its blobs are values, and `to_proto` makes the NetParameter.

    from blobmem import NetSpec, layers as L, params as P

    n = NetSpec()
    n.data, n.label = L.Data(source="train_lmdb", batch_size=64, backend=P.Data.LMDB, ntop=2)
    n.conv1 = L.Convolution(n.data, num_output=20, kernel_size=5, weight_filler=dict(type="xavier"))
    n.relu1 = L.ReLU(n.conv1, in_place=True)
    n.loss = L.SoftmaxWithLoss(L.InnerProduct(n.relu1, num_output=10), n.label)
    print(n.to_proto())

Options are fields of the layer type's own message (`convolution_param`) or else of the layer itself; one may also give
a whole message as a dictionary (`transform_param=dict(scale=0.5)`). Layers and blobs have the names that a NetSpec
gives them; the others are numbered by type, `InnerProduct1`. This is pycaffe's `net_spec`, name for name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.assign import FieldError, assign_proto

_OTHER_MESSAGES = {
    "Deconvolution": "convolution_param",
    "DepthwiseConvolution": "convolution_param",
    "ConvolutionDepthwise": "convolution_param",
    "Im2col": "convolution_param",
    "RNN": "recurrent_param",
    "LSTM": "recurrent_param",
}
"""Layer types whose options are in another type's message."""


__all__ = [
    "FieldError",
    "Function",
    "Layers",
    "NetSpec",
    "Parameters",
    "Top",
    "assign_proto",
    "layers",
    "param_name_dict",
    "params",
    "to_proto",
]


class Top:
    """An output of a layer, to be given to other layers.

    Attributes:
        fn: the Function it comes from.
        n: which of its outputs it is, from 0.
    """

    def __init__(self, fn: Function, n: int) -> None:
        self.fn = fn
        self.n = n

    def to_proto(self) -> Any:
        """The NetParameter of all layers that this output depends on."""
        return to_proto(self)


class Function:
    """A layer: its type, the tops it takes, and its options.

    Args:
        type_name: the type in prototxt.
        inputs: its bottoms.
        params: options by name; of them `ntop`, the number of outputs (1), and `in_place`, whether the outputs are the
            inputs, are for us and not in the message.

    Raises TypeError if an input is not a Top, NetError if `ntop` is not a number of outputs.
    """

    def __init__(self, type_name: str, inputs: Iterable[Top], params: Mapping[str, Any]) -> None:
        self.type_name = type_name
        self.inputs = tuple(inputs)
        for index, top in enumerate(self.inputs):
            if not isinstance(top, Top):
                raise TypeError(f"{type_name} input {index} is not a Top (type is {type(top)})")
        self.params = dict(params)
        self.ntop = self.params.pop("ntop", 1)
        if not isinstance(self.ntop, int) or self.ntop < 0:
            raise NetError(f"{type_name}, ntop: expected a number of outputs from 0 on, got {self.ntop!r}")
        self.in_place = bool(self.params.pop("in_place", False))
        if self.in_place and self.ntop > len(self.inputs):
            raise NetError(f"{type_name}, in_place: expected an input for each of its {self.ntop} outputs")
        self.tops = tuple(Top(self, n) for n in range(self.ntop))


def make_layer(type_name: str, /, *inputs: Top, **params: Any) -> Any:
    """A layer of that type: its top, or a tuple of its tops, or with `ntop=0` the Function. Raises as `Function`."""
    fn = Function(type_name, inputs, params)
    if fn.ntop == 0:
        return fn
    return fn.tops[0] if fn.ntop == 1 else fn.tops


def layer_function(type_name: str) -> Callable[..., Any]:
    """`make_layer` of one type; it can be pickled."""
    return functools.partial(make_layer, type_name)


class Layers:
    """`layers.Convolution` is a function that makes a layer of that type; so for every type."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return layer_function(name)


class Parameters:
    """`params.Pooling` is the message with Pooling's options, whose enum values are `params.Pooling.MAX` and so on."""

    def __getattr__(self, name: str) -> Any:
        message = getattr(caffe_pb2, f"{name}Parameter", None)
        if message is None:
            raise AttributeError(f"there is no {name}Parameter in caffe.proto")
        return message


layers = Layers()
params = Parameters()


class NetSpec:
    """Tops by name, as attributes or as items; `to_proto` makes the net that computes them all.

    A layer without outputs (`ntop=0`) may be given a name in the same way.

    Attributes:
        tops: all of them by name, in the order they were given.
    """

    tops: dict[str, Top | Function]

    def __init__(self) -> None:
        super().__setattr__("tops", {})

    def __setattr__(self, name: str, value: Top | Function) -> None:
        if not isinstance(value, Top | Function):
            raise TypeError(f"'{name}' of a NetSpec is a Top, got {type(value)}")
        self.tops[name] = value

    def __getattr__(self, name: str) -> Top | Function:
        # when a copy is made, attributes are looked up before there are tops
        tops = self.__dict__.get("tops", {})
        if name not in tops:
            raise AttributeError(f"there is no top '{name}'; tops: {', '.join(tops) or 'none yet'}")
        top: Top | Function = tops[name]
        return top

    __setitem__ = __setattr__

    def __getitem__(self, name: str) -> Top | Function:
        return self.tops[name]

    def __delitem__(self, name: str) -> None:
        del self.tops[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tops

    def __iter__(self) -> Iterator[str]:
        return iter(self.tops)

    def keys(self) -> list[str]:
        """The names."""
        return list(self.tops)

    def vals(self) -> list[Top | Function]:
        """The tops."""
        return list(self.tops.values())

    def update(self, name: str, params: Mapping[str, Any]) -> None:
        """Set further options of the layer that a top comes from."""
        _function(self.tops[name]).params.update(params)

    def to_proto(self) -> Any:
        """The NetParameter of all layers that the tops depend on. NetError for options that the layers do not have."""
        return _net(self.tops.values(), {top: name for name, top in self.tops.items()})


def to_proto(*tops: Top | Function) -> Any:
    """The NetParameter of all layers that `tops` depend on. NetError for options that the layers do not have."""
    return _net(tops, {})


def _net(tops: Iterable[Top | Function], names: dict[Top | Function, str]) -> Any:
    writer = _Writer(names)
    for top in tops:
        writer.add(_function(top))
    return caffe_pb2.NetParameter(layer=writer.layers.values())


def _function(top: Top | Function) -> Function:
    return top.fn if isinstance(top, Top) else top


class _Writer:
    """Writes layers, each after those it takes from, and names what has no name.

    Attributes:
        layers: the messages by function, in their order.
    """

    def __init__(self, names: dict[Top | Function, str]) -> None:
        self.layers: dict[Function, Any] = {}
        self._names = names
        self._taken = set(names.values())
        self._counts: Counter[str] = Counter()

    def add(self, fn: Function) -> None:
        """Write a layer and all that it needs."""
        waiting = [fn]
        # no recursion: nets may be thousands of layers deep
        while waiting:
            fn = waiting[-1]
            missing = [top.fn for top in fn.inputs if top.fn not in self.layers]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if fn not in self.layers:
                self.layers[fn] = self._layer(fn)

    def _layer(self, fn: Function) -> Any:
        bottoms = [self.layers[top.fn].top[top.n] for top in fn.inputs]
        tops = bottoms if fn.in_place else [self._name(top, fn) for top in fn.tops]
        name = self._name(fn, fn) if fn in self._names or not fn.tops else self._name(fn.tops[0], fn)
        layer = caffe_pb2.LayerParameter(name=name, type=fn.type_name, bottom=bottoms, top=tops)
        for option, value in fn.params.items():
            try:
                assign_proto(self._holder(layer, option), option, value)
            except NetError as error:
                raise type(error)(f"layer '{name}' ({fn.type_name}): {error}") from None
        return layer

    @staticmethod
    def _holder(layer: Any, option: str) -> Any:
        """The message that has an option: that of the layer's type, or the layer itself."""
        own = _own_messages().get(layer.type)
        if own is None or option.endswith("param"):
            return layer
        message = getattr(layer, own)
        return layer if option in _fields(layer) and option not in _fields(message) else message

    def _name(self, what: Top | Function, fn: Function) -> str:
        """The name of a top or a function; where it has none, the next free one of its type."""
        while what not in self._names:
            self._counts[fn.type_name] += 1
            name = f"{fn.type_name}{self._counts[fn.type_name]}"
            if name not in self._taken:
                self._names[what] = name
        return self._names[what]


def _fields(message: Any) -> Any:
    return message.DESCRIPTOR.fields_by_name


@functools.cache
def _own_messages() -> dict[str, str]:
    """Layer type to the field of LayerParameter that has its options."""
    return {name: f"{field}_param" for name, field in param_name_dict().items()} | _OTHER_MESSAGES


def param_name_dict() -> dict[str, str]:
    """Layer type ("InnerProduct") to the name of its options ("inner_product"), for all that have a message."""
    return {
        field.message_type.name.removesuffix("Parameter"): field.name.removesuffix("_param")
        for field in caffe_pb2.LayerParameter.DESCRIPTOR.fields
        if field.name.endswith("_param")
    }
