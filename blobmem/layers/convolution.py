"""Convolution and Deconvolution: any number of spatial axes, groups, stride, padding, dilation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import Layer, register_layer
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


def spatial(layer: Layer, options: Any, names: tuple[str, str, str], axes: int, default: int | None) -> tuple[int, ...]:
    """An option given once for all axes, once per axis, or (for two axes) as its _h and _w fields."""
    name, name_h, name_w = names
    given = list(getattr(options, name))
    if name_h and (options.HasField(name_h) or options.HasField(name_w)):
        if given:
            raise layer.error(name, f"either {name} or {name_h} and {name_w}, not both")
        if axes != 2:
            raise layer.error(name_h, f"{name} with one value for each of the {axes} spatial axes")
        if default is None and not (options.HasField(name_h) and options.HasField(name_w)):
            raise layer.error(name, f"both {name_h} and {name_w}")
        return (getattr(options, name_h), getattr(options, name_w))
    if not given:
        if default is None:
            raise layer.error(name, "a value")
        return (default,) * axes
    if len(given) not in (1, axes):
        raise layer.error(name, f"1 value or {axes}, one for each spatial axis", f"{len(given)}")
    return tuple(given) * axes if len(given) == 1 else tuple(given)


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
        options = self.param.convolution_param
        self.axis = self.axis_of(bottom[0], options.axis, "axis")
        axes = bottom[0].num_axes - self.axis - 1
        self.kernel = spatial(self, options, ("kernel_size", "kernel_h", "kernel_w"), axes, None)
        self.attributes: dict[str, Any] = {
            "stride": spatial(self, options, ("stride", "stride_h", "stride_w"), axes, 1),
            "pad": spatial(self, options, ("pad", "pad_h", "pad_w"), axes, 0),
            "dilation": spatial(self, options, ("dilation", "", ""), axes, 1),
            "group": int(options.group),
        }
        for name, values in (("kernel_size", self.kernel), *list(self.attributes.items())[::2]):
            if min(values, default=1) < 1:
                raise self.error(name, "values of 1 or more", values)
        channels, outputs, group = bottom[0].shape[self.axis], int(options.num_output), int(options.group)
        if outputs < 1:
            raise self.error("num_output", "1 or more", outputs)
        if group < 1 or channels % group or outputs % group:
            raise self.error("group", f"a divisor of {channels} channels and of num_output {outputs}", group)
        self.channels, self.outputs, self.bias = channels, outputs, options.bias_term
        self.add_param((*self.weight_channels(channels, outputs, group), *self.kernel), options.weight_filler)
        if self.bias:
            self.add_param((outputs,), options.bias_filler)

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        raise NotImplementedError

    def out_dim(self, size: int, axis: int) -> int:
        raise NotImplementedError

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for source, target in zip(bottom, top, strict=True):
            if source.num_axes != self.axis + 1 + len(self.kernel) or source.shape[self.axis] != self.channels:
                raise self.error(
                    "bottom",
                    f"{self.channels} channels on axis {self.axis} and {len(self.kernel)} spatial axes",
                    source.describe(),
                )
            dims = [self.out_dim(size, i) for i, size in enumerate(source.shape[self.axis + 1 :])]
            if min(dims, default=1) < 1:
                raise self.error("kernel_size", f"a window that fits into {source.describe()}", self.kernel)
            target.reshape(*source.shape[: self.axis], self.outputs, *dims)

    def folded(self, blob: Blob) -> tuple[int, ...]:
        """The shape with all axes before the channels as one batch axis."""
        return (math.prod(blob.shape[: self.axis]), *blob.shape[self.axis :])

    def extent(self, axis: int) -> int:
        """Points that the dilated kernel spans on a spatial axis."""
        dilation: tuple[int, ...] = self.attributes["dilation"]
        return dilation[axis] * (self.kernel[axis] - 1) + 1

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        bias = read(self.blobs[1]) if self.bias else None
        for x, y in zip(bottom, top, strict=True):
            yield call(
                f"{self.prefix}_forward", read(x, self.folded(x)), read(self.blobs[0]), bias,
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
                    f"{self.prefix}_backward_weights", read(x, self.folded(x)), dy, accumulate_diff(weights),
                    **self.attributes,
                )  # fmt: skip
            if wanted:
                yield call(
                    f"{self.prefix}_backward_data", dy, read(weights), overwrite_diff(x, self.folded(x)),
                    **self.attributes,
                )  # fmt: skip


@register_layer
class Convolution(_Base):
    """y[n, o] = sum over c and the window of w[o, c] * x[n, c], plus b[o]."""

    type = "Convolution"
    prefix = "conv"

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        return outputs, channels // group

    def out_dim(self, size: int, axis: int) -> int:
        pad, stride = self.attributes["pad"][axis], self.attributes["stride"][axis]
        return (size + 2 * pad - self.extent(axis)) // stride + 1


@register_layer
class Deconvolution(_Base):
    """The gradient of a convolution with respect to its input, as a layer."""

    type = "Deconvolution"
    prefix = "deconv"

    def weight_channels(self, channels: int, outputs: int, group: int) -> tuple[int, int]:
        return channels, outputs // group

    def out_dim(self, size: int, axis: int) -> int:
        pad, stride = self.attributes["pad"][axis], self.attributes["stride"][axis]
        return stride * (size - 1) + self.extent(axis) - 2 * pad
