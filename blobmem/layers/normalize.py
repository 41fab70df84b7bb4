"""Normalize: L2 norms of 1, times a learned scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff
from blobmem.ops.host.fillers import Filler


@register_layer
class Normalize(Layer):
    """y = scale * x / sqrt(sum of x ** 2 + eps), over each item, or with across_spatial false over its channels (SSD).

    The scale is one number, or with channel_shared false one for each channel (axis 1). Its gradient and the bottom's
    are exact; SSD's own takes the bottom's as if all channels had one scale.
    """

    type = "Normalize"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.norm_param
        self._check_axes(bottom[0])
        self.each, self.eps = not options.across_spatial, options.eps
        if not self.eps >= 0:
            raise self.error("eps", "0 or more", self.eps)
        self.channels = bottom[0].shape[1]
        filler = options.scale_filler if options.HasField("scale_filler") else Filler("constant", 1.0)
        self.add_param(() if options.channel_shared else (self.channels,), filler)

    def _check_axes(self, bottom: Blob) -> None:
        if bottom.num_axes < 2:
            raise self.error("bottom", "2 axes or more (batch, channels, ...)", bottom.describe())

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._check_axes(bottom[0])
        images, channels = bottom[0].shape[:2]
        if self.blobs[0].num_axes and channels != self.channels:
            raise self.error("bottom", f"{self.channels} channels on axis 1", bottom[0].describe())
        top[0].reshape_like(bottom[0])
        self.folded = (images, channels, bottom[0].count_of(2))
        self.internal_blob("norm", (images, self.folded[2]) if self.each else (images,), self.context.exact)
        if top[0] is bottom[0]:
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if "bottom" in self.internal and self.keeps_state:
            yield call("copy", read(bottom[0]), overwrite(self.internal["bottom"]))
        norms = overwrite(self.internal["norm"]) if self.keeps_state else None
        yield call(
            "l2_normalize_forward", read(bottom[0], self.folded), read(self.blobs[0]), overwrite(top[0], self.folded),
            norms, each=self.each, eps=self.eps,
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        x, norms = read(self.internal.get("bottom", bottom[0]), self.folded), read(self.internal["norm"])
        dy = read_diff(top[0], self.folded)
        if self.param_grads[0]:
            yield call("l2_normalize_backward_scale", x, norms, dy, accumulate_diff(self.blobs[0]))
        if propagate_down[0]:
            dx = overwrite_diff(bottom[0], self.folded)
            yield call("l2_normalize_backward", x, read(self.blobs[0]), norms, dy, dx)
