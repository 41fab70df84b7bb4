"""Softmax, and the losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2


def around(blob: Blob, axis: int) -> tuple[int, int, int]:
    """The shape as (outer, axis, inner)."""
    return (blob.count_of(0, axis), blob.shape[axis], blob.count_of(axis + 1))


@register_layer
class Softmax(Layer):
    """exp(x) over its sum along an axis."""

    type = "Softmax"

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape_like(bottom[0])
        self.folded = around(bottom[0], self.axis_of(bottom[0], self.param.softmax_param.axis, "axis"))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call("softmax_forward", read(bottom[0], self.folded), overwrite(top[0], self.folded))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            y, dy = read(top[0], self.folded), read_diff(top[0], self.folded)
            yield call("softmax_backward", y, dy, overwrite_diff(bottom[0], self.folded))


@register_layer
class SoftmaxWithLoss(Layer):
    """Mean of -log softmax(x)[label], over what `normalization` counts. A second top takes the probabilities."""

    type = "SoftmaxWithLoss"
    bottoms = (2, 2)
    tops = (1, 2)
    is_loss = True
    propagates = (True, False)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.loss_param
        names = caffe_pb2.LossParameter.NormalizationMode
        normalization = names.Name(options.normalization)
        if not options.HasField("normalization") and options.HasField("normalize"):
            normalization = "VALID" if options.normalize else "BATCH_SIZE"
        ignore = options.ignore_label if options.HasField("ignore_label") else None
        self.attributes = {"ignore_label": ignore, "normalization": normalization}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        axis = self.axis_of(bottom[0], self.param.softmax_param.axis, "axis")
        outer, _, inner = self.folded = around(bottom[0], axis)
        if bottom[1].count != outer * inner:
            raise self.error(
                "bottom",
                f"{outer * inner} labels, one for each prediction of {bottom[0].describe()}",
                bottom[1].describe(),
            )
        self.labels = (outer, inner)
        top[0].reshape()
        if len(top) > 1:
            top[1].reshape_like(bottom[0])
        self.internal_blob("prob", bottom[0].shape)
        if len(top) > 1:
            top[1].share_data(self.internal["prob"])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "softmax_loss_forward", read(bottom[0], self.folded), read(bottom[1], self.labels),
            overwrite(self.internal["prob"], self.folded), overwrite(top[0]), **self.attributes,
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if len(propagate_down) > 1 and self.param.propagate_down and self.param.propagate_down[1]:
            raise self.error("propagate_down", "false for the labels, which have no gradient", "true")
        if propagate_down[0]:
            yield call(
                "softmax_loss_backward", read(self.internal["prob"], self.folded), read(bottom[1], self.labels),
                read_diff(top[0]), overwrite_diff(bottom[0], self.folded), **self.attributes,
            )  # fmt: skip


@register_layer
class EuclideanLoss(Layer):
    """Sum of squared differences over twice the batch."""

    type = "EuclideanLoss"
    bottoms = (2, 2)
    is_loss = True

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].count_of(1) != bottom[1].count_of(1) or bottom[0].shape[:1] != bottom[1].shape[:1]:
            raise self.error("bottom", f"as many values as {bottom[0].describe()}", bottom[1].describe())
        top[0].reshape()
        self.folded = (bottom[0].shape[0] if bottom[0].shape else 1, math.prod(bottom[0].shape[1:]))
        self.internal_blob("difference", self.folded)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "euclidean_loss_forward", read(bottom[0], self.folded), read(bottom[1], self.folded),
            overwrite(self.internal["difference"]), overwrite(top[0]),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        for blob, sign, wanted in zip(bottom, (1.0, -1.0), propagate_down, strict=True):
            if wanted:
                yield call(
                    "euclidean_loss_backward", read(self.internal["difference"]), read_diff(top[0]),
                    overwrite_diff(blob, self.folded), sign=sign,
                )  # fmt: skip
