"""Layers that work element by element, in place if the prototxt says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import TRAIN, Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff
from blobmem.ops.host.fillers import Filler


class Neuron(Layer):
    """One bottom, one top of the same shape."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape_like(bottom[0])

    def keep_bottom(self, bottom: Sequence[Blob]) -> Iterable[Call]:
        """Before the bottom is overwritten in place: keep it, if backward needs it (there is an array for it)."""
        kept = self.internal.get("bottom")
        if kept is not None and self.keeps_state:
            yield call("copy", read(bottom[0]), overwrite(kept))


class OfInput(Neuron):
    """Neurons whose gradient is a function of their input, which is kept if it is overwritten in place.

    Attributes:
        op: their ops are {op}_forward(x, y) and {op}_backward(x, dy, dx).
        attributes: of both ops.
        output_will_do: the backward op works as well with y for x, so that nothing has to be kept.
    """

    op = ""
    output_will_do = False

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.attributes: dict[str, Any] = {}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        if top[0] is bottom[0] and not self.output_will_do:
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield from self.keep_bottom(bottom)
        yield call(f"{self.op}_forward", read(bottom[0]), overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x = read(self.internal.get("bottom", bottom[0]))
            yield call(f"{self.op}_backward", x, read_diff(top[0]), overwrite_diff(bottom[0]), **self.attributes)


class OfOutput(Neuron):
    """Neurons whose gradient is a function of their output: ops {op}_forward(x, y) and {op}_backward(y, dy, dx)."""

    op = ""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.attributes: dict[str, Any] = {}

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(f"{self.op}_forward", read(bottom[0]), overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            y, dy = read(top[0]), read_diff(top[0])
            yield call(f"{self.op}_backward", y, dy, overwrite_diff(bottom[0]), **self.attributes)


@register_layer
class ReLU(OfInput):
    """y = x where positive, negative_slope * x elsewhere."""

    type = "ReLU"
    op = "relu"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        slope = self.param.relu_param.negative_slope
        self.attributes = {"slope": slope}
        self.output_will_do = slope >= 0


@register_layer
class Sigmoid(OfOutput):
    """y = 1 / (1 + exp(-x))."""

    type = "Sigmoid"
    op = "sigmoid"


@register_layer
class TanH(OfOutput):
    """y = tanh(x)."""

    type = "TanH"
    op = "tanh"


@register_layer
class Power(Neuron):
    """y = (shift + scale * x) ** power."""

    type = "Power"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.power_param
        self.attributes: dict[str, Any] = {
            "power": options.power, "scale": options.scale, "shift": options.shift,
        }  # fmt: skip

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        if top[0] is bottom[0] and self.attributes["power"] != 1:
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield from self.keep_bottom(bottom)
        yield call("power_forward", read(bottom[0]), overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x = self.internal.get("bottom", bottom[0])
            yield call(
                "power_backward", read(x), read(top[0]), read_diff(top[0]), overwrite_diff(bottom[0]),
                **self.attributes,
            )  # fmt: skip


@register_layer
class Dropout(Neuron):
    """In training, zero with probability dropout_ratio, and the rest scaled up so that the mean stays; else a copy."""

    type = "Dropout"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.ratio = self.param.dropout_param.dropout_ratio
        if not 0 <= self.ratio < 1:
            raise self.error("dropout_ratio", "a number from 0 to below 1", self.ratio)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self.internal_blob("mask", bottom[0].shape, "uint8")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if self.phase == TRAIN:
            yield call(
                "dropout_forward", read(bottom[0]), overwrite(top[0]), overwrite(self.internal["mask"]),
                ratio=self.ratio, draws=self.draws(),
            )  # fmt: skip
        elif top[0] is not bottom[0]:
            yield call("copy", read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        if self.phase == TRAIN:
            mask = read(self.internal["mask"])
            yield call("dropout_backward", read_diff(top[0]), mask, overwrite_diff(bottom[0]), ratio=self.ratio)
        elif top[0] is not bottom[0]:
            yield call("copy", read_diff(top[0]), overwrite_diff(bottom[0]))


@register_layer
class PReLU(Neuron):
    """y = x where positive, a[c] * x elsewhere, with a learned; He et al. 2015."""

    type = "PReLU"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.prelu_param
        if bottom[0].num_axes < 2:
            raise self.error("bottom", "2 axes or more, the second of channels", bottom[0].describe())
        self.channels = bottom[0].shape[1]
        filler = options.filler if options.HasField("filler") else Filler("constant", 0.25)
        self.add_param(() if options.channel_shared else (self.channels,), filler)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        if bottom[0].shape[1:2] != (self.channels,):
            raise self.error("bottom", f"{self.channels} channels on axis 1", bottom[0].describe())
        self.folded = (bottom[0].shape[0], self.channels, math.prod(bottom[0].shape[2:]))
        self.slopes = (self.blobs[0].count,)
        if top[0] is bottom[0]:
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield from self.keep_bottom(bottom)
        yield call(
            "prelu_forward", read(bottom[0], self.folded), read(self.blobs[0], self.slopes),
            overwrite(top[0], self.folded),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        x = read(self.internal.get("bottom", bottom[0]), self.folded)
        dy = read_diff(top[0], self.folded)
        if self.param_grads[0]:
            yield call("prelu_backward_slope", x, dy, accumulate_diff(self.blobs[0], self.slopes))
        if propagate_down[0]:
            dx = overwrite_diff(bottom[0], self.folded)
            yield call("prelu_backward_data", x, read(self.blobs[0], self.slopes), dy, dx)
