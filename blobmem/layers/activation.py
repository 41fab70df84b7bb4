"""More layers that work element by element: AbsVal, BNLL, Clip, ELU, Exp, Log, ReLU6, Swish, Threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.layers.neuron import Neuron, OfInput, OfOutput
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class AbsVal(OfInput):
    """y = |x|."""

    type = "AbsVal"
    op = "absval"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        refuse_in_place(self)


@register_layer
class BNLL(OfOutput):
    """y = log(1 + exp(x))."""

    type = "BNLL"
    op = "bnll"


@register_layer
class Clip(OfInput):
    """y = x, but never below min or above max."""

    type = "Clip"
    op = "clip"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.clip_param
        for field in ("min", "max"):
            if not options.HasField(field):
                raise self.error(field, "a number, as it has no default")
        if not options.min <= options.max:
            raise self.error("min", f"at most max, {options.max:g}", f"{options.min:g}")
        self.attributes = {"low": options.min, "high": options.max}


@register_layer
class ELU(Neuron):
    """y = x where positive, alpha * (exp(x) - 1) elsewhere; Clevert et al. 2016."""

    type = "ELU"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.alpha = self.param.elu_param.alpha

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        if top[0] is bottom[0] and self.alpha < 0:
            # both sides of 0 give positive outputs
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield from self.keep_bottom(bottom)
        yield call("elu_forward", read(bottom[0]), overwrite(top[0]), alpha=self.alpha)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            y, dy, dx = read(top[0]), read_diff(top[0]), overwrite_diff(bottom[0])
            x = y if self.alpha >= 0 else read(self.internal.get("bottom", bottom[0]))
            yield call("elu_backward", x, y, dy, dx, alpha=self.alpha)


@register_layer
class Exp(OfOutput):
    """y = base ** (shift + scale * x); base -1 stands for e."""

    type = "Exp"
    op = "exp"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.exp_param
        log = _log_of_base(self, options.base)
        self.attributes = {"rate": log * options.scale, "offset": log * options.shift}


@register_layer
class Log(OfInput):
    """y = log(shift + scale * x) to the base; base -1 stands for e."""

    type = "Log"
    op = "log"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.log_param
        log = _log_of_base(self, options.base)
        if log == 0:
            raise self.error("base", "another number than 1, to which nothing has a logarithm", f"{options.base:g}")
        self.attributes = {"scale": options.scale, "shift": options.shift, "factor": 1 / log}


def _log_of_base(layer: Neuron, base: float) -> float:
    """The natural logarithm of the option `base`. Raises NetError unless it is positive and finite, or -1."""
    if base == -1:
        return 1.0
    if not 0 < base < math.inf:
        raise layer.error("base", "a number above 0, or -1 for e", f"{base:g}")
    return math.log(base)


@register_layer
class ReLU6(OfInput):
    """y = min(max(x, 0), 6), which fits few bits; relu_param's negative_slope leaks as in ReLU. Of MobileNets."""

    type = "ReLU6"
    op = "relu6"
    output_will_do = True

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        slope = self.param.relu_param.negative_slope
        if not slope >= 0:
            raise self.error("negative_slope", "0 or more", f"{slope:g}")
        self.attributes = {"slope": slope}


@register_layer
class Swish(OfInput):
    """y = x / (1 + exp(-beta * x)); Ramachandran et al. 2017."""

    type = "Swish"
    op = "swish"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.attributes = {"beta": self.param.swish_param.beta}


@register_layer
class Threshold(Neuron):
    """y = 1 where x is above the threshold, else 0. Its slope is 0, so nothing below gets a gradient through it."""

    type = "Threshold"
    propagates = (False,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.threshold = self.param.threshold_param.threshold

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call("threshold_forward", read(bottom[0]), overwrite(top[0]), threshold=self.threshold)
