"""Tile: a blob repeated along an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class Tile(Layer):
    """The bottom `tiles` times, one after another along `axis`."""

    type = "Tile"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        self.tiles = self.param.tile_param.tiles
        if self.tiles < 1:
            raise self.error("tiles", "1 or more", self.tiles)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        axis = self.axis_of(bottom[0], self.param.tile_param.axis, "axis")
        dims = list(bottom[0].shape)
        dims[axis] *= self.tiles
        top[0].reshape(dims)
        self.once = (bottom[0].count_of(0, axis), bottom[0].count_of(axis))
        self.tiled = (self.once[0], self.tiles, self.once[1])
        if self.tiles == 1:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if self.tiles > 1:
            yield call("tile_forward", read(bottom[0], self.once), overwrite(top[0], self.tiled))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0] and self.tiles > 1:
            yield call("tile_backward", read_diff(top[0], self.tiled), overwrite_diff(bottom[0], self.once))
