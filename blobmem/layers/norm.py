"""BatchNorm, and the layers that scale and shift by a blob: Scale, Bias."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import TEST, Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import (
    Call,
    accumulate_diff,
    call,
    overwrite,
    overwrite_diff,
    read,
    read_diff,
    write,
)
from blobmem.ops.host.fillers import Filler


@register_layer
class BatchNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps) per channel, Ioffe and Szegedy 2015; Scale does the rest.

    Parameters: sums of means and of variances over the iterations, decayed, and the sum of their weights (1,).
    """

    type = "BatchNorm"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.batch_norm_param
        given = options.HasField("use_global_stats")
        self.use_global = options.use_global_stats if given else self.phase == TEST
        self.eps, self.fraction = options.eps, options.moving_average_fraction
        self.channels = 1 if bottom[0].num_axes == 1 else bottom[0].shape[1]
        for shape in ((self.channels,), (self.channels,), (1,)):
            self.add_param(shape, dtype=self.context.exact)
        for index, spec in enumerate(self.param.param):
            if spec.lr_mult != 0 and spec.HasField("lr_mult"):
                raise self.error(f"param {index}, lr_mult", "0, since these are statistics", spec.lr_mult)
        while len(self.param.param) < 3:
            self.param.param.add()
        for spec in self.param.param:
            # statistics are no business of the solver's
            spec.lr_mult = 0

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shape = bottom[0].shape
        if bottom[0].num_axes > 1 and shape[1] != self.channels:
            raise self.error("bottom", f"{self.channels} channels on axis 1", bottom[0].describe())
        top[0].reshape_like(bottom[0])
        self.folded = (math.prod(shape[:1]), self.channels, math.prod(shape[2:]))
        if not self.use_global:
            self.internal_blob("normalized", shape)
            self.internal_blob("mean", (2 * self.channels,), self.context.exact)  # and what they have lost by rounding
            self.internal_blob("inverse_std", (self.channels,), self.context.exact)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if not bottom[0].count:
            return  # no items, no statistics: the running ones stay as they are
        x, y = read(bottom[0], self.folded), overwrite(top[0], self.folded)
        if self.use_global:
            yield call("batch_norm_inference", x, y, *map(read, self.blobs), eps=self.eps)
            return
        internal = [
            overwrite(self.internal["normalized"], self.folded) if self.keeps_state else None,
            overwrite(self.internal["mean"]),
            overwrite(self.internal["inverse_std"]),
        ]
        running = map(write, self.blobs)
        yield call("batch_norm_forward", x, y, *internal, *running, eps=self.eps, fraction=self.fraction)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0] or not bottom[0].count:
            return
        dy, dx = read_diff(top[0], self.folded), overwrite_diff(bottom[0], self.folded)
        if self.use_global:
            variance, factor = read(self.blobs[1]), read(self.blobs[2])
            yield call("batch_norm_backward_global", dy, dx, variance, factor, eps=self.eps)
        else:
            saved = read(self.internal["normalized"], self.folded), read(self.internal["inverse_std"])
            yield call("batch_norm_backward", *saved, dy, dx)


class _ByBlob(Layer):
    """Broadcast a second bottom, or a parameter, over the axes from `axis` on."""

    bottoms = (1, 2)

    def place(self, bottom: Sequence[Blob], axis: int, num_axes: int) -> None:
        """Where the operand lies on the bottom's axes; with one bottom it is a parameter of that shape."""
        if len(bottom) > 1:
            first = self.axis_of(bottom[0], axis, "axis") if bottom[1].num_axes else 0
            shape = bottom[1].shape
        else:
            if num_axes < -1:
                raise self.error("num_axes", "-1 (all that follow), 0 or more", num_axes)
            first = self.axis_of(bottom[0], axis, "axis") if num_axes else 0
            end = None if num_axes == -1 else first + num_axes
            if end is not None and end > bottom[0].num_axes:
                raise self.error("num_axes", f"at most the axes of {bottom[0].describe()} from {first} on", num_axes)
            shape = bottom[0].shape[first:end]
        self.axis, self.operand_shape = first, shape

    def fold(self, bottom: Sequence[Blob]) -> None:
        """The bottom as (outer, operand, inner)."""
        shape = bottom[1].shape if len(bottom) > 1 else self.operand_shape
        end = self.axis + len(shape)
        if bottom[0].shape[self.axis : end] != shape:
            raise self.error("bottom", f"axes {self.axis} to {end - 1} of shape {shape}", bottom[0].describe())
        dims = bottom[0].shape
        self.folded = (math.prod(dims[: self.axis]), math.prod(shape), math.prod(dims[end:]))
        self.flat = (math.prod(shape),)


@register_layer
class Scale(_ByBlob):
    """y = x * gamma (+ beta), gamma a parameter or the second bottom, broadcast."""

    type = "Scale"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.scale_param
        self.place(bottom, options.axis, options.num_axes)
        if len(bottom) == 1:
            default = Filler("constant", 1.0)
            self.add_param(self.operand_shape, options.filler if options.HasField("filler") else default)
        self.beta: Blob | None = None
        if options.bias_term:
            self.beta = self.add_param(self.operand_shape, options.bias_filler)
        if top[0] is bottom[0] and len(bottom) > 1 and bottom[0] is bottom[1]:
            raise self.error("top", "another blob than its two bottoms")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.fold(bottom)
        top[0].reshape_like(bottom[0])
        if top[0] is bottom[0]:
            self.internal_blob("bottom", bottom[0].shape)

    input_is_kept = False  # by the layer before, in the array that is also this layer's

    def gamma(self, bottom: Sequence[Blob]) -> Blob:
        return bottom[1] if len(bottom) > 1 else self.blobs[0]

    def _gamma_needs_gradient(self) -> bool:
        return len(self.param.bottom) > 1 or not self.param_grads or self.param_grads[0]

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if "bottom" in self.internal and self.keeps_state and self._gamma_needs_gradient() and not self.input_is_kept:
            yield call("copy", read(bottom[0]), overwrite(self.internal["bottom"]))
        yield call(
            "scale_forward", read(bottom[0], self.folded), read(self.gamma(bottom), self.flat),
            read(self.beta, self.flat) if self.beta else None, overwrite(top[0], self.folded),
        )  # fmt: skip

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        gamma, dy = self.gamma(bottom), read_diff(top[0], self.folded)
        if self.beta is not None and self.param_grads[-1]:
            yield call("scale_backward_beta", dy, accumulate_diff(self.beta, self.flat))
        x = read(self.internal.get("bottom", bottom[0]), self.folded)
        if len(bottom) > 1 and propagate_down[1]:
            yield call("scale_backward_gamma", x, dy, overwrite_diff(gamma, self.flat), accumulate=False)
        elif len(bottom) == 1 and self.param_grads[0]:
            yield call("scale_backward_gamma", x, dy, accumulate_diff(gamma, self.flat))
        if propagate_down[0]:
            yield call("scale_backward_data", dy, read(gamma, self.flat), overwrite_diff(bottom[0], self.folded))


@register_layer
class Bias(_ByBlob):
    """y = x + b, b a parameter or the second bottom, broadcast."""

    type = "Bias"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.bias_param
        self.place(bottom, options.axis, options.num_axes)
        if len(bottom) == 1:
            self.add_param(self.operand_shape, options.filler)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.fold(bottom)
        top[0].reshape_like(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        bias = bottom[1] if len(bottom) > 1 else self.blobs[0]
        yield call("bias_forward", read(bottom[0], self.folded), read(bias, self.flat), overwrite(top[0], self.folded))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        dy = read_diff(top[0], self.folded)
        if len(bottom) > 1 and propagate_down[1]:
            yield call("scale_backward_beta", dy, overwrite_diff(bottom[1], self.flat), accumulate=False)
        elif len(bottom) == 1 and self.param_grads[0]:
            yield call("scale_backward_beta", dy, accumulate_diff(self.blobs[0], self.flat))
        if propagate_down[0] and top[0] is not bottom[0]:
            yield call("copy", read_diff(top[0]), overwrite_diff(bottom[0]))
