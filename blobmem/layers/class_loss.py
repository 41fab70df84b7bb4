"""Losses against class labels, softmax's own apart: HingeLoss, InfogainLoss, MultinomialLogisticLoss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.layers.base import register_layer
from blobmem.layers.loss import Loss, around, rows
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array
from blobmem.proto.text import read_binary


class _OfRows(Loss):
    """Losses of items with a label each: ops {op}_forward(x, label, loss) and {op}_backward(x, label, dloss, dx)."""

    op = ""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        self.attributes: dict[str, Any] = {"layer": self.name}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.folded = rows(bottom[0])
        self.labels = self.label_shape(bottom, self.folded[0])
        top[0].reshape()

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, label = read(bottom[0], self.folded), read(bottom[1], self.labels)
        yield call(f"{self.op}_forward", x, label, overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x, label = read(bottom[0], self.folded), read(bottom[1], self.labels)
            dx = overwrite_diff(bottom[0], self.folded)
            yield call(f"{self.op}_backward", x, label, read_diff(top[0]), dx, **self.attributes)


@register_layer
class HingeLoss(_OfRows):
    """Sum of max(0, 1 + x), 1 - x for the label's, over the batch; with norm L2 of their squares."""

    type = "HingeLoss"
    op = "hinge_loss"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        self.attributes["norm"] = caffe_pb2.HingeLossParameter.Norm.Name(self.param.hinge_loss_param.norm)


@register_layer
class MultinomialLogisticLoss(_OfRows):
    """Mean over the batch of -log x[label], x being probabilities."""

    type = "MultinomialLogisticLoss"
    op = "multinomial_loss"


def _fill(infogain: np.ndarray, *, matrix: np.ndarray) -> None:
    """infogain = matrix, on the host."""
    np.copyto(infogain, matrix.reshape(infogain.shape), casting="same_kind")


@register_layer
class InfogainLoss(Loss):
    """Mean of -H[label] . log softmax(x), over what `normalization` counts. A second top takes the probabilities.

    H (classes, classes) says what each class is worth for each label; it is a third bottom, or in the file `source`.
    """

    type = "InfogainLoss"
    bottoms = (2, 3)
    tops = (1, 2)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        self.attributes = self.normalization("VALID") | {"layer": self.name}
        self.matrix = None if len(bottom) > 2 else self._read_matrix()

    def _read_matrix(self) -> np.ndarray:
        source = self.param.infogain_loss_param.source
        if not source:
            raise self.error("source", "a binaryproto file with the matrix H, or H as a third bottom")
        try:
            matrix = blob_array(read_binary(source, caffe_pb2.BlobProto))
        except NetError as error:
            raise self.error("source", f"a binaryproto file with the matrix H ({error})", f"'{source}'") from error
        if matrix is None:
            raise self.error("source", "a binaryproto file with the matrix H", f"'{source}', which has no values")
        return matrix

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        axis = self.axis_of(bottom[0], self.param.infogain_loss_param.axis, "axis")
        outer, classes, inner = self.folded = around(bottom[0], axis)
        self.labels = self.label_shape(bottom, outer, inner)
        self.square = (classes, classes)
        wanted = f"{classes} x {classes} values of H, for the classes of {bottom[0].describe()}"
        if self.matrix is None:
            if bottom[2].count != classes * classes:
                raise self.error("bottom", wanted, bottom[2].describe())
        else:
            if self.matrix.size != classes * classes:
                raise self.error("source", wanted, f"{self.matrix.size}, of shape {self.matrix.shape}")
            self.internal_blob("infogain", self.square, self.context.exact)
        top[0].reshape()
        prob = self.internal_blob("prob", bottom[0].shape, self.context.exact)
        if len(top) > 1:
            top[1].reshape_like(bottom[0])
            top[1].share_data(prob)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if self.matrix is not None:
            yield call(_fill, overwrite(self.internal["infogain"]), once=True, matrix=self.matrix)
        yield call(
            "infogain_loss_forward", read(bottom[0], self.folded), read(bottom[1], self.labels),
            read(self._gain(bottom), self.square), overwrite(self.internal["prob"], self.folded), overwrite(top[0]),
            **self.attributes,
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            yield call(
                "infogain_loss_backward", read(self.internal["prob"], self.folded), read(bottom[1], self.labels),
                read(self._gain(bottom), self.square), read_diff(top[0]), overwrite_diff(bottom[0], self.folded),
                **self.attributes,
            )  # fmt: skip

    def _gain(self, bottom: Sequence[Blob]) -> Blob:
        return bottom[2] if self.matrix is None else self.internal["infogain"]
