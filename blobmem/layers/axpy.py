"""Axpy: a blob scaled by channel, and another added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class Axpy(Layer):
    """scale * x + y of bottoms scale (N, C; axes of 1 may follow), x and y (N, C, ...). Of SENet, Hu et al. 2018."""

    type = "Axpy"
    bottoms = (3, 3)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        scale, x, y = bottom
        if x.num_axes < 2:
            raise self.error("bottom", "x of 2 axes or more, the second of channels", x.describe())
        if y.shape != x.shape:
            raise self.error("bottom", f"y of the shape of x, {x.describe()}", y.describe())
        if scale.shape[:2] != x.shape[:2] or math.prod(scale.shape[2:]) != 1:
            raise self.error("bottom", f"a scale for each channel of x, {x.describe()}", scale.describe())
        top[0].reshape_like(x)
        planes = math.prod(x.shape[:2])
        self.factors, self.planes = (planes,), (planes, math.prod(x.shape[2:]))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        scale, x, y = bottom
        yield call(
            "axpy_forward", read(scale, self.factors), read(x, self.planes), read(y, self.planes),
            overwrite(top[0], self.planes),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        scale, x, y = bottom
        planes = (1, *self.planes)
        dtop = read_diff(top[0], planes)
        if propagate_down[0]:
            dscale = overwrite_diff(scale, self.factors)
            yield call("scale_backward_gamma", read(x, planes), dtop, dscale, accumulate=False)
        if propagate_down[1]:
            yield call("scale_backward_data", dtop, read(scale, self.factors), overwrite_diff(x, planes))
        if propagate_down[2]:
            yield call("copy", read_diff(top[0]), overwrite_diff(y))
