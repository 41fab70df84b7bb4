"""Reduction: all values from an axis on as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import EXACT, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2


@register_layer
class Reduction(Layer):
    """`coeff` times the sum, the sum of absolute values or of squares, or the mean, over the axes from `axis` on.

    The mean of no values is 0.
    """

    type = "Reduction"
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        self.operation = caffe_pb2.ReductionParameter.ReductionOp.Name(self.param.reduction_param.operation)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.reduction_param
        axis = self.axis_of(bottom[0], options.axis, "axis")
        top[0].reshape(bottom[0].shape[:axis])
        self.rows = (bottom[0].count_of(0, axis), bottom[0].count_of(axis))
        self.attributes = {"operation": self.operation, "coeff": options.coeff}

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, y = read(bottom[0], self.rows), overwrite(top[0], self.rows[:1])
        yield call("reduction_forward", x, y, **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x = None if self.operation in ("SUM", "MEAN") else read(bottom[0], self.rows)
            dy, dx = read_diff(top[0], self.rows[:1]), overwrite_diff(bottom[0], self.rows)
            yield call("reduction_backward", x, dy, dx, **self.attributes)
