"""Im2col: the columns that a convolution multiplies its weights with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.layers.window import Window
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


@register_layer
class Im2col(Layer):
    """For each channel one channel per element of a window: what that element sees from each place of the window.

    Takes a convolution's options; those about weights and groups mean nothing here.
    """

    type = "Im2col"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        self.axis = self.axis_of(bottom[0], self.param.convolution_param.axis, "axis")
        axes = bottom[0].num_axes - self.axis - 1
        if not axes:
            raise self.error("axis", f"an axis of {bottom[0].describe()} with others after it", self.axis)
        self.window = Window.of(self, axes)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        spatial = shape[self.axis + 1 :]
        if len(spatial) != len(self.window.kernel):
            raise self.error("bottom", f"{len(self.window.kernel)} axes after axis {self.axis}", bottom[0].describe())
        places = [self.window.places(size, axis) for axis, size in enumerate(spatial)]
        if min(places) < 1:
            raise self.error("kernel_size", f"a window that fits into {bottom[0].describe()}", self.window.kernel)
        channels = shape[self.axis] * math.prod(self.window.kernel)
        top[0].reshape(*shape[: self.axis], channels, *places)
        images = math.prod(shape[: self.axis])
        self.planes, self.columns = (images, *shape[self.axis :]), (images, channels, *places)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, y = read(bottom[0], self.planes), overwrite(top[0], self.columns)
        yield call("im2col_forward", x, y, kernel=self.window.kernel, **self.window.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            dy, dx = read_diff(top[0], self.columns), overwrite_diff(bottom[0], self.planes)
            yield call("im2col_backward", dy, dx, kernel=self.window.kernel, **self.window.attributes)
