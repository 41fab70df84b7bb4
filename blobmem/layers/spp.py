"""SPP: spatial pyramid pooling, which makes vectors of one length from planes of any size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import TRAIN, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2

Pair = tuple[int, int]


@register_layer
class SPP(Layer):
    """Poolings over 1, 2 x 2, 4 x 4, ... bins that together see the whole plane; He et al. 2014, section 2.2.

    The top is (batch, bins of all levels), each level (channels, bins, bins); of a pyramid of height 1 it is, as in
    Caffe, (batch, channels, 1, 1).
    """

    type = "SPP"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.spp_param
        self.height = int(options.pyramid_height)
        if self.height < 1:
            raise self.error("pyramid_height", "1 or more", self.height)
        self.pool = caffe_pb2.SPPParameter.PoolMethod.Name(options.pool)

    def _level(self, plane: Pair, number: int) -> tuple[Pair, Pair, int]:
        """Window, padding and bins per axis. Raises NetError if a bin would see padding only."""
        bins = 2**number
        kernel = (-(-plane[0] // bins), -(-plane[1] // bins))
        pad = ((kernel[0] * bins - plane[0] + 1) // 2, (kernel[1] * bins - plane[1] + 1) // 2)
        dims = f"{plane[0]} x {plane[1]}"
        if pad[0] >= kernel[0] or pad[1] >= kernel[1]:
            fewer = f"{number} or less, since {dims} cannot be divided into {bins} x {bins} bins"
            raise self.error("pyramid_height", fewer, self.height)
        if pad != (0, 0) and self.pool == "STOCHASTIC":
            raise self.error("pool", f"MAX or AVE, since {bins} x {bins} bins over {dims} need padding", self.pool)
        return kernel, pad, bins

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes != 4:
            raise self.error("bottom", "4 axes (batch, channels, height, width)", bottom[0].describe())
        batch, channels, height, width = bottom[0].shape
        if not height or not width:
            raise self.error("bottom", "a height and a width of 1 or more", bottom[0].describe())
        self.levels = tuple(self._level((height, width), number) for number in range(self.height))
        self.vectors = (batch, channels * sum(bins * bins for _, _, bins in self.levels))
        top[0].reshape(self.vectors if self.height > 1 else (*self.vectors, 1, 1))
        if self.pool != "AVE":
            self.internal_blob("mask", self.vectors, "int32")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, y = read(bottom[0]), overwrite(top[0], self.vectors)
        mask = overwrite(self.internal["mask"]) if self.pool != "AVE" and self.keeps_state else None
        if self.pool == "AVE":
            yield call("spp_ave_forward", x, y, levels=self.levels)
        elif self.pool == "MAX":
            yield call("spp_max_forward", x, y, mask, levels=self.levels)
        elif self.phase == TRAIN:
            yield call("spp_stochastic_forward", x, y, mask, draws=self.draws("stochastic"), levels=self.levels)
        else:
            yield call("spp_stochastic_forward", x, y, None, draws=None, levels=self.levels)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        dy, dx = read_diff(top[0], self.vectors), overwrite_diff(bottom[0])
        if self.pool == "AVE":
            yield call("spp_ave_backward", dy, dx, levels=self.levels)
        elif self.pool == "STOCHASTIC" and self.phase != TRAIN:
            raise self.error("pool", "phase TRAIN, since stochastic pooling has no gradient in phase TEST")
        else:
            yield call("spp_max_backward", dy, read(self.internal["mask"]), dx, levels=self.levels)
