"""InnerProduct: the fully connected layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class InnerProduct(Layer):
    """y = x w^T + b, with the axes from `axis` on as one; w is (outputs, inputs), or its transpose."""

    type = "InnerProduct"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.inner_product_param
        self.axis = self.axis_of(bottom[0], options.axis, "axis")
        self.outputs, self.size = int(options.num_output), bottom[0].count_of(self.axis)
        if self.outputs < 1:
            raise self.error("num_output", "1 or more", self.outputs)
        self.transpose, self.bias = options.transpose, options.bias_term
        shape = (self.size, self.outputs) if self.transpose else (self.outputs, self.size)
        self.add_param(shape, options.weight_filler)
        if self.bias:
            self.add_param((self.outputs,), options.bias_filler)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes < self.axis or bottom[0].count_of(self.axis) != self.size:
            raise self.error("bottom", f"{self.size} values from axis {self.axis} on", bottom[0].describe())
        top[0].reshape(*bottom[0].shape[: self.axis], self.outputs)
        self.rows = bottom[0].count_of(0, self.axis)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(
            "inner_product_forward", read(bottom[0], (self.rows, self.size)), read(self.blobs[0]),
            read(self.blobs[1]) if self.bias else None, overwrite(top[0], (self.rows, self.outputs)),
            transpose=self.transpose,
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        dy = read_diff(top[0], (self.rows, self.outputs))
        if self.param_grads[0]:
            yield call(
                "inner_product_backward_weights", read(bottom[0], (self.rows, self.size)), dy,
                accumulate_diff(self.blobs[0]), transpose=self.transpose,
            )  # fmt: skip
        if self.bias and self.param_grads[1]:
            yield call("inner_product_backward_bias", dy, accumulate_diff(self.blobs[1]))
        if propagate_down[0]:
            yield call(
                "inner_product_backward_data", dy, read(self.blobs[0]),
                overwrite_diff(bottom[0], (self.rows, self.size)), transpose=self.transpose,
            )  # fmt: skip
