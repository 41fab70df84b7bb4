"""Convolution and Deconvolution: any number of spatial axes, groups, stride, padding, dilation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.layers.window import Window
from blobmem.memory.blob import Blob
from blobmem.ops.call import (
    Call,
    accumulate_diff,
    call,
    overwrite,
    overwrite_diff,
    read,
    read_diff,
)


class _Base(Layer):
    """What the two have in common: options, parameters, folding of the leading axes."""

    bottoms = (1, None)
    tops = (1, None)
    prefix = ""

    def check_blob_counts(self) -> None:
        super().check_blob_counts()
        if len(self.param.bottom) != len(self.param.top):
            raise self.error("top", f"as many as bottoms, {len(self.param.bottom)}", f"{len(self.param.top)}")

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.convolution_param
        self.axis = self.axis_of(bottom[0], options.axis, "axis")
        self.window = Window.of(self, bottom[0].num_axes - self.axis - 1)
        channels, outputs, group = bottom[0].shape[self.axis], int(options.num_output), int(options.group)
        if channels < 1:
            raise self.error("bottom", f"1 channel or more on axis {self.axis}", bottom[0].describe())
        if outputs < 1:
            raise self.error("num_output", "1 or more", outputs)
        if group < 1 or channels % group or outputs % group:
            raise self.error("group", f"a divisor of {channels} channels and of num_output {outputs}", group)
        self.channels, self.outputs, self.bias = channels, outputs, options.bias_term
        shape = (*self.weight_channels(channels, outputs, group), *self.window.kernel)
        self.add_param(shape, options.weight_filler)
        if self.bias:
            self.add_param((outputs,), options.bias_filler)
        self.attributes: dict[str, Any] = {**self.window.attributes, "group": group}
        self.weight_shape = shape
        if not self.window.kernel:
            # ops take one spatial axis or more: one of size 1 changes nothing
            self.attributes |= {"stride": (1,), "pad": (0,), "dilation": (1,)}
            self.weight_shape = (*shape, 1)

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        raise NotImplementedError

    def out_dim(self, size: int, axis: int) -> int:
        raise NotImplementedError

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for source, target in zip(bottom, top, strict=True):
            if source.num_axes != self.axis + 1 + len(self.window.kernel) or source.shape[self.axis] != self.channels:
                raise self.error(
                    "bottom",
                    f"{self.channels} channels on axis {self.axis} and {len(self.window.kernel)} spatial axes",
                    source.describe(),
                )
            dims = [self.out_dim(size, i) for i, size in enumerate(source.shape[self.axis + 1 :])]
            if min(dims, default=1) < 1 or 0 in source.shape[self.axis + 1 :]:
                raise self.error("kernel_size", f"a window that fits into {source.describe()}", self.window.kernel)
            target.reshape(*source.shape[: self.axis], self.outputs, *dims)

    def folded(self, blob: Blob) -> tuple[int, ...]:
        """The shape with all axes before the channels as one batch axis, and one spatial axis at least."""
        dims = (math.prod(blob.shape[: self.axis]), *blob.shape[self.axis :])
        return dims if self.window.kernel else (*dims, 1)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        bias = read(self.blobs[1]) if self.bias else None
        for x, y in zip(bottom, top, strict=True):
            yield call(
                f"{self.prefix}_forward", read(x, self.folded(x)), read(self.blobs[0], self.weight_shape), bias,
                overwrite(y, self.folded(y)), **self.attributes,
            )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        weights = self.blobs[0]
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            dy = read_diff(y, self.folded(y))
            if self.bias and self.param_grads[1]:
                yield call("conv_backward_bias", dy, accumulate_diff(self.blobs[1]))
            if self.param_grads[0]:
                yield call(
                    f"{self.prefix}_backward_weights", read(x, self.folded(x)), dy,
                    accumulate_diff(weights, self.weight_shape), **self.attributes,
                )  # fmt: skip
            if wanted:
                yield call(
                    f"{self.prefix}_backward_data", dy, read(weights, self.weight_shape),
                    overwrite_diff(x, self.folded(x)), **self.attributes,
                )  # fmt: skip


@register_layer
class Convolution(_Base):
    """y[n, o] = sum over c and the window of w[o, c] * x[n, c], plus b[o]."""

    type = "Convolution"
    prefix = "conv"

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        return outputs, channels // group

    def out_dim(self, size: int, axis: int) -> int:
        return self.window.places(size, axis)


@register_layer
class Deconvolution(_Base):
    """The gradient of a convolution with respect to its input, as a layer."""

    type = "Deconvolution"
    prefix = "deconv"

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        return channels, outputs // group

    def out_dim(self, size: int, axis: int) -> int:
        return self.window.stride[axis] * (size - 1) + self.window.extent(axis) - 2 * self.window.pad[axis]
