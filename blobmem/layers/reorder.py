"""Layers that put values in another order: Permute, ShuffleChannel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import ANY, SAME, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


class _Transposed(Layer):
    """The bottom, seen in a shape `folded`, with its axes in another order; in its own order it is the top itself."""

    bottom_kinds = (ANY,)
    top_kinds = (SAME,)
    folded: tuple[int, ...]
    order: tuple[int, ...]

    def moves(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    def place(self, bottom: Blob, top: Blob, shape: Sequence[int]) -> None:
        """Give the top its shape."""
        top.reshape(tuple(shape))
        if not self.moves():
            top.share_data(bottom)
            top.share_diff(bottom)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if self.moves():
            turned = tuple(self.folded[axis] for axis in self.order)
            yield call("transpose", read(bottom[0], self.folded), overwrite(top[0], turned), order=self.order)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0] and self.moves():
            turned = tuple(self.folded[axis] for axis in self.order)
            back = tuple(self.order.index(axis) for axis in range(len(self.order)))
            yield call("transpose", read_diff(top[0], turned), overwrite_diff(bottom[0], self.folded), order=back)


@register_layer
class Permute(_Transposed):
    """The axes in the order given, each number an axis of the bottom; those left out follow in their own order.

    Of SSD, Liu et al. 2016.
    """

    type = "Permute"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        given = list(self.param.permute_param.order)
        axes = bottom[0].num_axes
        if len(set(given)) != len(given) or any(axis >= axes for axis in given):
            raise self.error("order", f"different axes of {bottom[0].describe()}", given)
        self.order = (*given, *(axis for axis in range(axes) if axis not in given))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes != len(self.order):
            raise self.error("bottom", f"{len(self.order)} axes, as at first", bottom[0].describe())
        self.folded = bottom[0].shape
        self.place(bottom[0], top[0], [self.folded[axis] for axis in self.order])


@register_layer
class ShuffleChannel(_Transposed):
    """The channels of `group` groups in turn: the first of each, then the second of each. Of ShuffleNet, Zhang et al.
    2018."""

    type = "ShuffleChannel"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        self.group = self.param.shuffle_channel_param.group
        if bottom[0].num_axes < 2:
            raise self.error("bottom", "2 axes or more, the second of channels", bottom[0].describe())
        if self.group < 1:
            raise self.error("group", "1 or more", self.group)
        self.order = (0, 1, 2, 3) if self.group == 1 else (0, 2, 1, 3)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        outer, channels, *others = bottom[0].shape
        if channels % self.group:
            raise self.error("group", f"a divisor of the channels, {channels}", self.group)
        self.folded = (outer, self.group, channels // self.group, math.prod(others))
        self.place(bottom[0], top[0], bottom[0].shape)
