"""Softmax and its loss, and what all losses share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from blobmem.layers.base import EXACT, NET, Layer, register_layer
from blobmem.layers.checks import refuse_gradient, refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2


def around(blob: Blob, axis: int) -> tuple[int, int, int]:
    """The shape as (outer, axis, inner)."""
    return (blob.count_of(0, axis), blob.shape[axis], blob.count_of(axis + 1))


class Loss(Layer):
    """A number, of weight 1 unless the prototxt gives another. Bottoms without a gradient are labels."""

    bottoms = (2, 2)
    is_loss = True
    propagates: ClassVar[tuple[bool, ...]] = (True, False)
    bottom_kinds: ClassVar[tuple[str, ...]] = (NET, EXACT)
    top_kinds: ClassVar[tuple[str, ...]] = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        for index in range(len(bottom)):
            if not self.can_propagate(index):
                refuse_gradient(self, index, "labels")

    def normalization(self, default: str) -> dict[str, Any]:
        """What loss_param says, as attributes of ops: `ignore_label` (None: none) and the mode, or else `default`.

        `normalize`, which `normalization` replaced, is VALID when true and BATCH_SIZE when false.
        """
        options = self.param.loss_param
        mode = default
        if options.HasField("normalization"):
            mode = caffe_pb2.LossParameter.NormalizationMode.Name(options.normalization)
        elif options.HasField("normalize"):
            mode = "VALID" if options.normalize else "BATCH_SIZE"
        ignore = options.ignore_label if options.HasField("ignore_label") else None
        return {"ignore_label": ignore, "normalization": mode}

    def label_shape(self, bottom: Sequence[Blob], outer: int, inner: int = 1) -> tuple[int, int]:
        """The labels' shape, (outer, inner). Raises NetError unless there are as many."""
        if bottom[1].count != outer * inner:
            wanted = f"{outer * inner} labels, one for each prediction of {bottom[0].describe()}"
            raise self.error("bottom", wanted, bottom[1].describe())
        return (outer, inner)


def rows(blob: Blob) -> tuple[int, int]:
    """The shape as (batch, values of an item)."""
    return (blob.shape[0], blob.count_of(1)) if blob.shape else (1, 1)


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
class SoftmaxWithLoss(Loss):
    """Mean of -log softmax(x)[label], over what `normalization` counts. A second top takes the probabilities."""

    type = "SoftmaxWithLoss"
    tops = (1, 2)
    keeps_bottom = False

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        self.attributes = self.normalization("VALID") | {"layer": self.name}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        axis = self.axis_of(bottom[0], self.param.softmax_param.axis, "axis")
        outer, _, inner = self.folded = around(bottom[0], axis)
        self.labels, self.pairs = self.label_shape(bottom, outer, inner), (outer, 2, inner)
        top[0].reshape()
        # of the scores of a prediction the largest, and the sum that makes probabilities of exponentials
        self.internal_blob("sums", (*bottom[0].shape[:axis], 2, *bottom[0].shape[axis + 1 :]), self.context.exact)
        if self.keeps_bottom:
            self.internal_blob("bottom", bottom[0].shape)
        if len(top) > 1:
            top[1].reshape_like(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "softmax_loss_forward", read(bottom[0], self.folded), read(bottom[1], self.labels),
            overwrite(self.internal["sums"], self.pairs), overwrite(top[0]), **self.attributes,
        )  # fmt: skip
        if len(top) > 1:
            yield call("softmax_forward", read(bottom[0], self.folded), overwrite(top[1], self.folded))
        if self.keeps_bottom and self.keeps_state:
            yield call("copy", read(bottom[0]), overwrite(self.internal["bottom"]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            scores = self.internal.get("bottom", bottom[0])
            yield call(
                "softmax_loss_backward", read(scores, self.folded), read(bottom[1], self.labels),
                read(self.internal["sums"], self.pairs), read_diff(top[0]), overwrite_diff(bottom[0], self.folded),
                **self.attributes,
            )  # fmt: skip
