"""Layers that pick items by number: BatchReindex, Embed, Filter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from blobmem.layers.base import ANY, EXACT, SAME, Layer, register_layer
from blobmem.layers.checks import refuse_gradient, refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff


def items_of(layer: Layer, blob: Blob) -> tuple[int, int]:
    """The shape as (items, values of each). Raises NetError for a scalar."""
    if not blob.num_axes:
        raise layer.error("bottom", "1 axis or more, the first of items", blob.describe())
    return blob.shape[0], blob.count_of(1)


@register_layer
class BatchReindex(Layer):
    """Item n of the top is item i[n] of the first bottom; i, the second, may repeat items and leave some out."""

    type = "BatchReindex"
    bottoms = (2, 2)
    propagates = (True, False)
    bottom_kinds = (ANY, EXACT)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        refuse_gradient(self, 1, "indices")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.items = items_of(self, bottom[0])
        if bottom[1].num_axes != 1:
            raise self.error("bottom", "indices of 1 axis", bottom[1].describe())
        top[0].reshape(bottom[1].shape[0], *bottom[0].shape[1:])
        self.picked = (bottom[1].shape[0], self.items[1])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, index, y = read(bottom[0], self.items), read(bottom[1]), overwrite(top[0], self.picked)
        yield call("gather_forward", x, index, None, y, layer=self.name)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            dy, index, dx = read_diff(top[0], self.picked), read(bottom[1]), overwrite_diff(bottom[0], self.items)
            yield call("gather_backward", dy, index, dx, accumulate=False, layer=self.name)


@register_layer
class Embed(Layer):
    """The row of a table, (input_dim, num_output), for each index in the bottom, plus a bias."""

    type = "Embed"
    propagates = (False,)
    bottom_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        refuse_gradient(self, 0, "indices")
        options = self.param.embed_param
        self.rows, self.outputs, self.bias = int(options.input_dim), int(options.num_output), options.bias_term
        for name, value in (("num_output", self.outputs), ("input_dim", self.rows)):
            if value < 1:
                raise self.error(name, "1 or more", value)
        self.add_param((self.rows, self.outputs), options.weight_filler)
        if self.bias:
            self.add_param((self.outputs,), options.bias_filler)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape(*bottom[0].shape, self.outputs)
        self.count = (bottom[0].count,)
        self.picked = (bottom[0].count, self.outputs)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "gather_forward", read(self.blobs[0]), read(bottom[0], self.count),
            read(self.blobs[1]) if self.bias else None, overwrite(top[0], self.picked), layer=self.name,
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        dy = read_diff(top[0], self.picked)
        if self.param_grads[0]:
            table = accumulate_diff(self.blobs[0])
            yield call("gather_backward", dy, read(bottom[0], self.count), table, layer=self.name)
        if self.bias and self.param_grads[1]:
            yield call("inner_product_backward_bias", dy, accumulate_diff(self.blobs[1]))


@register_layer
class Filter(Layer):
    """The items of each bottom for which the last bottom, the selector, is not 0; a top for every other bottom.

    With nothing selected the tops have no items.
    """

    type = "Filter"
    bottoms = (2, None)
    tops = (1, None)
    dynamic = True
    bottom_kinds = (ANY,)
    top_kinds = (SAME,)

    def check_blob_counts(self) -> None:
        super().check_blob_counts()
        if len(self.param.top) != len(self.param.bottom) - 1:
            raise self.error("top", f"{len(self.param.bottom) - 1}, one fewer than bottoms", len(self.param.top))

    def can_propagate(self, index: int) -> bool:
        return index < len(self.param.bottom) - 1

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        refuse_gradient(self, len(bottom) - 1, "selector's values")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        *filtered, selector = bottom
        items, values = items_of(self, selector)
        if values != 1:
            raise self.error("bottom", "one value for each item as the selector", selector.describe())
        for blob in filtered:
            if items_of(self, blob)[0] != items:
                raise self.error("bottom", f"{items} items, as many as the selector's", blob.describe())
        self._give(top, bottom, items)

    def resize(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._give(top, bottom, int(np.count_nonzero(bottom[-1].cpu_data())))

    def _give(self, top: Sequence[Blob], bottom: Sequence[Blob], count: int) -> None:
        for blob, source in zip(top, bottom, strict=False):
            blob.reshape(count, *source.shape[1:])
        # kept for backward, when the selector may already be another one
        self.internal_blob("indices", (count,), "int32")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        indices = self.internal["indices"]
        yield call("nonzero_indices", read(bottom[-1], (bottom[-1].count,)), overwrite(indices))
        for x, y in zip(bottom, top, strict=False):
            operands = read(x, items_of(self, x)), read(indices), None, overwrite(y, items_of(self, y))
            yield call("gather_forward", *operands, layer=self.name)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        for x, y, wanted in zip(bottom, top, propagate_down, strict=False):
            if wanted:
                dy, dx = read_diff(y, items_of(self, y)), overwrite_diff(x, items_of(self, x))
                yield call("gather_backward", dy, read(self.internal["indices"]), dx, accumulate=False, layer=self.name)
