"""Layers that judge, and have no gradient: Accuracy, ArgMax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import EXACT, NET, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.layers.loss import around
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, read


@register_layer
class Accuracy(Layer):
    """Share of predictions whose label is among the top_k; a second top takes it per class."""

    type = "Accuracy"
    bottoms = (2, 2)
    tops = (1, 2)
    propagates = (False,)
    bottom_kinds = (NET, EXACT)
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.accuracy_param
        self.attributes: dict[str, Any] = {
            "top_k": options.top_k,
            "ignore_label": options.ignore_label if options.HasField("ignore_label") else None,
            "layer": self.name,
        }

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        axis = self.axis_of(bottom[0], self.param.accuracy_param.axis, "axis")
        outer, classes, inner = self.folded = around(bottom[0], axis)
        if not 1 <= self.attributes["top_k"] <= classes:
            raise self.error("top_k", f"1 to the number of classes, {classes}", self.attributes["top_k"])
        if bottom[1].count != outer * inner:
            raise self.error("bottom", f"{outer * inner} labels for {bottom[0].describe()}", bottom[1].describe())
        self.labels = (outer, inner)
        top[0].reshape()
        if len(top) > 1:
            top[1].reshape(classes)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "accuracy_forward", read(bottom[0], self.folded), read(bottom[1], self.labels), overwrite(top[0]),
            overwrite(top[1]) if len(top) > 1 else None, **self.attributes,
        )  # fmt: skip


@register_layer
class ArgMax(Layer):
    """Index of the top_k largest values (of each item, or along `axis`), their values with out_max_val."""

    type = "ArgMax"
    propagates = (False,)
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.argmax_param
        self.axis = self.axis_of(bottom[0], options.axis, "axis") if options.HasField("axis") else None
        self.top_k, self.values = options.top_k, options.out_max_val

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        size = bottom[0].count_of(1) if self.axis is None else bottom[0].shape[self.axis]
        if not 1 <= self.top_k <= size:
            raise self.error("top_k", f"1 to {size}", self.top_k)
        if self.axis is None:
            # Caffe keeps at least three axes here
            dims = [1] * max(bottom[0].num_axes, 3)
            dims[0], dims[2] = bottom[0].shape[0], self.top_k
            if self.values:
                dims[1] = 2
        else:
            dims = list(bottom[0].shape)
            dims[self.axis] = self.top_k
        top[0].reshape(dims)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "argmax_forward", read(bottom[0]), overwrite(top[0]),
            top_k=self.top_k, out_max_val=self.values, axis=self.axis,
        )  # fmt: skip
