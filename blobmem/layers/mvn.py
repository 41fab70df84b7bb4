"""MVN: mean and variance normalisation of each channel of each item, or of each item."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class MVN(Layer):
    """y = (x - mean) / (deviation + eps), with the statistics of a channel or, across_channels, of an item.

    Without normalize_variance, y = x - mean. As in Caffe the top has 4 axes or more.
    """

    type = "MVN"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.mvn_param
        self.attributes = {"normalize_variance": options.normalize_variance, "eps": options.eps}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        dims = (*bottom[0].shape, *[1] * (4 - bottom[0].num_axes))
        top[0].reshape(dims)
        split = 1 if self.param.mvn_param.across_channels else 2
        self.rows = (math.prod(dims[:split]), math.prod(dims[split:]))
        if top[0] is bottom[0] and self.attributes["normalize_variance"]:
            self.internal_blob("bottom", dims)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x = read(bottom[0], self.rows)
        if self.keeps_state and "bottom" in self.internal:
            yield call("copy", x, overwrite(self.internal["bottom"], self.rows))
        yield call("mvn_forward", x, overwrite(top[0], self.rows), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            scaled = self.attributes["normalize_variance"]
            x = read(self.internal.get("bottom", bottom[0]), self.rows) if scaled else None
            dy, dx = read_diff(top[0], self.rows), overwrite_diff(bottom[0], self.rows)
            yield call("mvn_backward", x, dy, dx, **self.attributes)
