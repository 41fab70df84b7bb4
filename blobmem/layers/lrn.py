"""Local response normalisation, across channels or within each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2


@register_layer
class LRN(Layer):
    """y = x / (k + alpha / n * sum of squares over a window of n) ** beta, after Krizhevsky et al. 2012, section 3.3.

    Within channels the window is n x n in the plane and k is 1. In place the bottom is kept: its neighbours need it.
    """

    type = "LRN"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.lrn_param
        if options.local_size % 2 == 0:
            raise self.error("local_size", "an odd number", options.local_size)
        self.within = options.norm_region == caffe_pb2.LRNParameter.WITHIN_CHANNEL
        self.attributes: dict[str, Any] = {
            "local_size": options.local_size,
            "alpha": options.alpha,
            "beta": options.beta,
        }
        if not self.within:
            self.attributes["k"] = options.k

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes != 4:
            raise self.error("bottom", "4 axes (batch, channels, height, width)", bottom[0].describe())
        top[0].reshape_like(bottom[0])
        if top[0] is bottom[0]:
            self.internal_blob("bottom", bottom[0].shape)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        op = "lrn_within_forward" if self.within else "lrn_forward"
        if "bottom" in self.internal:
            yield call("copy", read(bottom[0]), overwrite(self.internal["bottom"]))
        x = self.internal.get("bottom", bottom[0])
        yield call(op, read(x), overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x = self.internal.get("bottom", bottom[0])
            gradients = read_diff(top[0]), overwrite_diff(bottom[0])
            if self.within:  # its powers take the host too long to make the top anew
                yield call("lrn_within_backward", read(x), read(top[0]), *gradients, **self.attributes)
            else:
                yield call("lrn_backward", read(x), *gradients, **self.attributes)
