"""Crop: a part of a blob, as large as another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import ANY, SAME, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class Crop(Layer):
    """The first bottom from `offset` on, as large as the second on the axes from `axis` on.

    One offset serves all these axes, or each has its own; without any it is 0.
    """

    type = "Crop"
    bottoms = (2, 2)
    propagates = (True, False)
    bottom_kinds = (ANY,)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        source, like = bottom
        start = self.axis_of(source, self.param.crop_param.axis, "axis")
        offsets = [int(offset) for offset in self.param.crop_param.offset] or [0]
        cropped = source.num_axes - start
        if len(offsets) not in (1, cropped):
            raise self.error("offset", f"none, 1 or {cropped}, one for each axis from {start} on", len(offsets))
        if like.num_axes < source.num_axes:
            raise self.error("bottom", f"a size for each of {source.num_axes} axes", like.describe())
        offsets = offsets * cropped if len(offsets) == 1 else offsets
        sizes = like.shape[start : source.num_axes]
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True), start):
            if offset + size > source.shape[axis]:
                raise self.error(
                    "offset", f"a part within {source.describe()}", f"{size} values from {offset} on, on axis {axis}"
                )
        top[0].reshape(*source.shape[:start], *sizes)
        self.offsets = (0,) * start + tuple(offsets)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call("crop_forward", read(bottom[0]), overwrite(top[0]), offsets=self.offsets)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            yield call("crop_backward", read_diff(top[0]), overwrite_diff(bottom[0]), offsets=self.offsets)
