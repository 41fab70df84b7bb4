"""The layer: what it takes, what it gives, and the calls that compute it.

Set-up, reshape, forward, backward always come in this order. A layer is written once for all devices: it states
shapes and emits calls, and the ops of the device at hand run them.
"""

from __future__ import annotations

import difflib
import random
import secrets
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from blobmem import dtypes
from blobmem.devices import Device, default
from blobmem.errors import NetError
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite
from blobmem.ops.host.fillers import Filler
from blobmem.ops.host.random import Draws, draws_at

TRAIN, TEST = 0, 1

# What a bottom or a top is of, in a net in half precision.
NET = "net"
"""The net's dtype."""
EXACT = "exact"
"""float32: labels, indices, boxes, losses."""
ANY = "any"
"""Bottoms: as it comes."""
SAME = "same"
"""Bottoms: all alike, float32 if all are; tops: what the bottom at that place is, or the last one."""
WANTED = "wanted"
"""Tops: float32 where a layer takes it so, else the net's."""

_seeds: random.Random | None = None


def set_random_seed(seed: int | None) -> None:
    """Make nets built from now on without a seed of their own repeatable; None draws their seeds from the system.

    Each takes the next number of the seed's sequence: the same nets in the same order are the same, no two are alike.
    """
    global _seeds
    _seeds = None if seed is None else random.Random(int(seed))


def default_seed() -> int:
    """The next seed of `set_random_seed`'s sequence, or one from the system."""
    return secrets.randbits(31) if _seeds is None else _seeds.getrandbits(31)


@dataclass(slots=True)
class PassState:
    """What random draws are a function of, besides the layer: the seed and the number of forward passes so far."""

    seed: int = 0
    iteration: int = 0


@dataclass(slots=True)
class Context:
    """What a layer knows of its net."""

    device: Device
    phase: int = TEST
    state: PassState = field(default_factory=PassState)
    source: str = ""
    dtype: Any = np.float32
    input_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    skip_damaged: bool = False  # data sources leave out records that cannot be read, instead of stopping

    @property
    def exact(self) -> np.dtype:
        """What the net keeps in float32 even if its dtype is a half: statistics, labels, indices, boxes, losses."""
        return dtypes.exact(np.dtype(self.dtype))


class Params(list[Blob]):
    """A layer's parameters."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = weakref.proxy(layer)  # a cycle would keep a dropped net's memory until the next collection

    def add_blob(self, *shape: int) -> None:
        """Add a parameter of zeros, to be filled in setup; what layers written in Python for pycaffe call."""
        self._layer.add_param(shape)
        del self._layer.fillers[len(self) - 1]


class Layer:
    """Base of all layers, of those of the package and of a user's own.

    Those that `register_layer` makes usable under their `type` emit calls. A class without a type is for prototxt's
    `type: "Python"`: its `forward(bottom, top)` and `backward(top, propagate_down, bottom)` compute at once, and it
    finds `param_str` and `phase` as attributes, and its parameters in `blobs`.

    Class attributes:
        type: the name in prototxt.
        bottoms, tops: least and greatest number; None for no limit.
        is_loss: its first top carries loss weight 1 unless the prototxt says otherwise.
        propagates: whether each bottom can take a gradient (the last entry stands for all further ones).
        bottom_kinds, top_kinds: what each is of in a net in half precision, where float32 differs from the net's dtype
            (the last entry stands for all further ones): NET, EXACT, ANY, SAME or WANTED of `blobmem.layers.base`.
        dynamic: the tops' shapes depend on what is in the bottoms; see `resize`.
        rewinds: a forward pass that fails takes the layer back to the `state_dict` that it began with.
        input_buffers: those of its internal arrays, by purpose, through which data comes to a device.

    Attributes:
        param: its LayerParameter.
        name: its name in the net.
        context: what it knows of its net.
        phase: the layer's own if the prototxt states one, else the net's.
        blobs: its parameters, in the order of caffemodel files.
        internal: its internal arrays by purpose.
        keeps_bottom: a later layer works in place on the first bottom, which backward reads: a copy is kept; None for
            layers that do not ask to know.
        keeps_state: backward will run, and forward keeps what it needs.
        param_grads, top_grads: whether each parameter takes, and each top brings, a gradient.
    """

    type: ClassVar[str] = ""
    bottoms: ClassVar[tuple[int, int | None]] = (1, 1)
    tops: ClassVar[tuple[int, int | None]] = (1, 1)
    is_loss: ClassVar[bool] = False
    propagates: ClassVar[tuple[bool, ...]] = (True,)
    bottom_kinds: ClassVar[tuple[str, ...]] = (NET,)
    top_kinds: ClassVar[tuple[str, ...]] = (NET,)
    dynamic: ClassVar[bool] = False
    rewinds: ClassVar[bool] = False
    input_buffers: ClassVar[tuple[str, ...]] = ()
    keeps_bottom: bool | None = None

    def __init__(self, param: Any, context: Context | None = None) -> None:
        self.param = param
        self.name: str = param.name
        # pycaffe makes its layers from the message alone
        self.context = Context(default()) if context is None else context
        # a layer may state another one than its net's
        self.phase = param.phase if param.HasField("phase") else self.context.phase
        self.blobs = Params(self)
        self.internal: dict[str, Blob] = {}
        self.fillers: dict[int, Filler] = {}
        # what the net decides, after set-up
        self.param_grads: list[bool] = []
        self.top_grads: list[bool] = []
        self.shared_params: set[int] = set()
        self.keeps_state = False  # backward will run: forward keeps what it needs (masks, scales)

    # ---------------------------------------------------------------- for subclasses to write

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Read the options and create the parameters; runs once."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Give tops and internal arrays their shapes, from the bottoms'; runs whenever these change."""
        raise NotImplementedError(f"layer type {self.type} does not say its shapes")

    def find(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        """For dynamic layers: calls that find out what the tops' shapes depend on, into internal arrays.

        They run in every forward pass, when the bottoms have their values, before `resize`.
        """
        return ()

    def resize(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """For dynamic layers, whose `reshape` gives the largest shapes there can be: give the tops their true ones.

        Runs in every forward pass, when the bottoms have their values and before the layer's calls.
        """

    def prepare(self, top: Sequence[Blob]) -> None:
        """A data source's chance to give its tops the shapes of the next batch, without taking it."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        """The calls of the forward pass."""
        return ()

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        """The calls of the backward pass: gradients of the bottoms asked for, and of the parameters."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What the layer carries from pass to pass besides parameters (a position in its data), as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""

    # ---------------------------------------------------------------- for subclasses to use

    def add_param(self, shape: Sequence[int], filler: Any = None, dtype: Any = None) -> Blob:
        """A new parameter, of the net's dtype if None is given; a message `filler` (constant 0 when None) says how it
        starts."""
        index = len(self.blobs)
        kind = self.context.dtype if dtype is None else dtype
        blob = Blob(tuple(shape), dtype=kind, device=self.context.device, name=f"{self.name}/{index}")
        self.blobs.append(blob)
        # applied by the net, once it knows that no other layer's parameter and no file takes its place
        self.fillers[index] = self.filler(filler)
        return blob

    def filler(self, message: Any) -> Filler:
        """The filler of a message (constant 0 when None). Raises NetError naming the layer."""
        if isinstance(message, Filler):
            return message
        try:
            return Filler.from_message(message)
        except NetError as error:
            where = f"{self.context.source}: " if self.context.source else ""
            raise NetError(f"{where}layer '{self.name}' ({self.param.type}), {error}") from None

    def initial_call(self, index: int) -> Call:
        """The call that gives parameter `index` its first values, a function of the seed, the layer and the index."""
        blob = self.blobs[index]
        draws = draws_at(self.context.state.seed, f"{self.name}/{index}", 0)
        result = call("fill_random", overwrite(blob), filler=self.fillers[index], draws=draws)
        result.layer_name = self.name
        return result

    def internal_blob(self, purpose: str, shape: Sequence[int], dtype: Any = None) -> Blob:
        """The layer's array of that purpose (mask, scale, ...), created or reshaped; named LAYER/purpose."""
        blob = self.internal.get(purpose)
        if blob is None:
            kind = self.context.dtype if dtype is None else dtype
            blob = Blob(tuple(shape), dtype=kind, device=self.context.device, name=f"{self.name}/{purpose}")
            self.internal[purpose] = blob
        blob.reshape(tuple(shape))
        return blob

    def draws(self, purpose: str = "") -> Draws:
        """Random numbers that depend on the net's seed, this layer and the iteration alone."""
        return Draws(self.context.state.seed, f"{self.name}/{purpose}", self.context.state)

    def error(self, field_name: str, expected: str, got: Any = None) -> NetError:
        """An error about one of the layer's options, for people."""
        where = f"{self.context.source}: " if self.context.source else ""
        found = "" if got is None else f", got {got}"
        return NetError(f"{where}layer '{self.name}' ({self.param.type}), {field_name}: expected {expected}{found}")

    def axis_of(self, blob: Blob, axis: int, field_name: str) -> int:
        """A blob's axis from the front. Raises NetError naming the field when it is out of range."""
        try:
            return blob.canonical_axis(axis)
        except IndexError:
            raise self.error(field_name, f"an axis of {blob.describe()}", axis) from None

    def check_blob_counts(self) -> None:
        """Raise NetError unless the prototxt gives as many bottoms and tops as the type takes."""
        for kind, names, (least, most) in (
            ("bottom", self.param.bottom, self.bottoms),
            ("top", self.param.top, self.tops),
        ):
            count = len(names)
            if count < least or (most is not None and count > most):
                if most is None:
                    expected = f"{least} or more"
                elif least == most:
                    expected = f"{least}"
                else:
                    expected = f"{least} to {most}"
                raise self.error(kind, expected, f"{count} ({', '.join(names) or 'none'})")

    def loss_weight(self, index: int) -> float:
        """The weight of top `index` in the net's loss; 0 if it has none."""
        if len(self.param.loss_weight) > index:
            return float(self.param.loss_weight[index])
        return 1.0 if self.is_loss and index == 0 and not self.param.loss_weight else 0.0

    def can_propagate(self, index: int) -> bool:
        """Whether bottom `index` can take a gradient at all."""
        return self.propagates[min(index, len(self.propagates) - 1)]


_types: dict[str, type[Layer]] = {}
_L = TypeVar("_L", bound=type[Layer])


def register_layer(cls: _L) -> _L:
    """Class decorator: make a Layer subclass usable in prototxt under its `type`.

    Raises ValueError if it has none or if another class has taken it.
    """
    if not cls.type:
        raise ValueError(f"{cls.__name__} needs a class attribute `type`, its name in prototxt")
    taken = _types.get(cls.type)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"layer type {cls.type} is already registered by {taken.__module__}.{taken.__qualname__}")
    _types[cls.type] = cls
    return cls


def layer_types() -> dict[str, type[Layer]]:
    """All registered layer classes by type."""
    return dict(sorted(_types.items()))


def create_layer(param: Any, context: Context) -> Layer:
    """The layer of a LayerParameter. Raises NetError for an unknown type, with near matches."""
    cls = _types.get(param.type)
    if cls is None:
        near = difflib.get_close_matches(param.type, _types, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known types: {', '.join(sorted(_types))}."
        where = f"{context.source}: " if context.source else ""
        raise NetError(
            f"{where}layer '{param.name}': unknown type '{param.type}'; {hint} A type of your own is registered with "
            '@blobmem.register_layer on a subclass of blobmem.Layer, or is a class in Python under `type: "Python"`.'
        )
    layer = cls(param, context)
    layer.check_blob_counts()
    return layer
