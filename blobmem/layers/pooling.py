"""Pooling over windows of two spatial axes: max, average, stochastic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import EXACT, NET, TRAIN, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff
from blobmem.proto import caffe_pb2

_MAX, _AVERAGE, _STOCHASTIC = 0, 1, 2
_MOST_IN_BYTES = 255  # elements of a window whose places fit into bytes, one number being left for none
_MOST_PAD = 2**20  # scratch has a row with its padding


@register_layer
class Pooling(Layer):
    """Max, average or stochastic pooling of (batch, channels, height, width).

    A second top (max only) takes the index in the plane of each maximum, as a float.
    """

    type = "Pooling"
    tops = (1, 2)
    top_kinds = (NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.pooling_param
        self.method = options.pool
        self.is_global = options.global_pooling
        if len(top) > 1 and self.method != _MAX:
            raise self.error("top", "one top, unless pool is MAX", len(top))
        if self.is_global:
            if options.HasField("kernel_size") or options.HasField("kernel_h") or options.HasField("kernel_w"):
                raise self.error("kernel_size", "none, since global_pooling takes the bottom's size")
            self.kernel = (0, 0)
        else:
            self.kernel = self._pair("kernel_size", "kernel_h", "kernel_w")
            if min(self.kernel) < 1:
                raise self.error("kernel_size", "1 or more (or global_pooling)", self.kernel)
        self.stride = self._pair("stride", "stride_h", "stride_w")
        self.pad = self._pair("pad", "pad_h", "pad_w")
        if min(self.stride) < 1:
            raise self.error("stride", "1 or more", self.stride)
        if max(self.pad) > _MOST_PAD:
            raise self.error("pad", f"{_MOST_PAD} or less", self.pad)
        if self.is_global and (self.pad != (0, 0) or self.stride != (1, 1)):
            raise self.error("global_pooling", "pad 0 and stride 1")
        if not self.is_global and any(p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            raise self.error("pad", f"less than the window, {self.kernel}", self.pad)
        if self.pad != (0, 0) and self.method == _STOCHASTIC:
            raise self.error("pad", "0 for stochastic pooling", self.pad)
        self.in_bytes = not self.is_global and math.prod(self.kernel) <= _MOST_IN_BYTES and len(top) == 1
        self.ceil = options.round_mode == caffe_pb2.PoolingParameter.CEIL

    def _pair(self, name: str, name_h: str, name_w: str) -> tuple[int, int]:
        options = self.param.pooling_param
        if options.HasField(name_h) != options.HasField(name_w):
            raise self.error(name, f"both {name_h} and {name_w}, or {name}")
        if options.HasField(name_h):
            if options.HasField(name):
                raise self.error(name, f"either {name} or {name_h} and {name_w}, not both")
            return getattr(options, name_h), getattr(options, name_w)
        value = getattr(options, name)
        return value, value

    def _out_dim(self, size: int, axis: int) -> int:
        kernel, stride, pad = self.kernel[axis], self.stride[axis], self.pad[axis]
        steps = (size + 2 * pad - kernel) / stride
        result = (math.ceil(steps) if self.ceil else math.floor(steps)) + 1
        # with padding, on either axis, the last window must start inside the image or its padding on the left
        if self.pad != (0, 0) and (result - 1) * stride >= size + pad:
            result -= 1
        return result

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes != 4:
            raise self.error("bottom", "4 axes (batch, channels, height, width)", bottom[0].describe())
        batch, channels, *plane = bottom[0].shape
        if self.is_global:
            self.kernel = (plane[0], plane[1])
        dims = [self._out_dim(size, axis) for axis, size in enumerate(plane)]
        if min(*dims, *plane) < 1:
            raise self.error("kernel_size", f"a window that fits into {bottom[0].describe()}", self.kernel)
        for blob in top:
            blob.reshape(batch, channels, *dims)
        # beyond the plane nothing changes, but scratch would grow
        kernel = tuple(min(k, size + 2 * p) for k, size, p in zip(self.kernel, plane, self.pad, strict=True))
        stride = tuple(max(1, min(s, size + p)) for s, size, p in zip(self.stride, plane, self.pad, strict=True))
        self.window: dict[str, Any] = {"kernel": kernel, "stride": stride, "pad": self.pad}
        if self.method != _AVERAGE:
            self.internal_blob("mask", top[0].shape, "uint8" if self.in_bytes else "int32")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        wanted = self.method == _MAX and (self.keeps_state or len(top) > 1)
        mask = self.internal["mask"] if wanted or (self.method == _STOCHASTIC and self.phase == TRAIN) else None
        out = [read(bottom[0]), overwrite(top[0])]
        if self.method == _AVERAGE:
            yield call("ave_pool_forward", *out, **self.window)
        elif self.method == _STOCHASTIC:
            draws = self.draws("stochastic") if self.phase == TRAIN else None
            yield call("stochastic_pool_forward", *out, overwrite(mask) if mask else None, draws=draws, **self.window)
        else:
            yield call("max_pool_forward", *out, overwrite(mask) if mask else None, **self.window)
            if len(top) > 1 and mask:
                yield call("copy", read(mask), overwrite(top[1]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        if self.method == _AVERAGE:
            yield call("ave_pool_backward", read_diff(top[0]), overwrite_diff(bottom[0]), **self.window)
        elif self.method == _STOCHASTIC and self.phase != TRAIN:
            raise self.error("pool", "phase TRAIN, since stochastic pooling has no gradient in phase TEST")
        else:
            yield call(
                "max_pool_backward", read_diff(top[0]), read(self.internal["mask"]), overwrite_diff(bottom[0]),
                **self.window,
            )  # fmt: skip
