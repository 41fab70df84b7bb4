"""Layers that only see a blob in another shape: Flatten, Reshape. They move no byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

from blobmem.layers.base import ANY, SAME, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob


class _Alias(Layer):
    bottom_kinds = (ANY,)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape(self.shape_of(bottom[0]))
        top[0].share_data(bottom[0])
        top[0].share_diff(bottom[0])

    def shape_of(self, bottom: Blob) -> tuple[int, ...]:
        raise NotImplementedError


@register_layer
class Flatten(_Alias):
    """Axes `axis` to `end_axis` as one."""

    type = "Flatten"

    def shape_of(self, bottom: Blob) -> tuple[int, ...]:
        options = self.param.flatten_param
        first = self.axis_of(bottom, options.axis, "axis")
        last = self.axis_of(bottom, options.end_axis, "end_axis")
        return (*bottom.shape[:first], bottom.count_of(first, last + 1), *bottom.shape[last + 1 :])


@register_layer
class Reshape(_Alias):
    """Axes [axis, axis + num_axes) in another shape: 0 keeps a dimension, one -1 is inferred."""

    type = "Reshape"

    def shape_of(self, bottom: Blob) -> tuple[int, ...]:
        options = self.param.reshape_param
        axes = bottom.num_axes
        start = options.axis if options.axis >= 0 else axes + options.axis + 1
        if not 0 <= start <= axes:
            raise self.error("axis", f"a place on {bottom.describe()}", options.axis)
        if options.num_axes < -1:
            raise self.error("num_axes", "-1 (all that follow), 0 or more", options.num_axes)
        end = axes if options.num_axes == -1 else start + options.num_axes
        if end > axes:
            raise self.error("num_axes", f"at most {axes - start} axes from {start} on", options.num_axes)
        dims = list(options.shape.dim)
        replaced = bottom.shape[start:end]
        if dims.count(-1) > 1 or min(dims, default=0) < -1:
            raise self.error("shape", "dimensions of 0 or more, and at most one -1", dims)
        for i, dim in enumerate(dims):
            if dim == 0:
                if start + i >= axes:
                    raise self.error("shape", f"a dimension to keep on axis {start + i} of {bottom.describe()}", "0")
                dims[i] = bottom.shape[start + i]
        total = math.prod(replaced)
        if -1 in dims:
            known, values = math.prod(dim for dim in dims if dim != -1), total
            if not known and dims.count(0) == replaced.count(0):
                # nothing in the blob: the axes that are 0 stay so, and the others say what is left
                known = math.prod(dim for dim in dims if dim > 0)
                values = math.prod(dim for dim in replaced if dim > 0)
            if not known or values % known:
                raise self.error("shape", f"dimensions that divide {total} values evenly", list(options.shape.dim))
            dims[dims.index(-1)] = values // known
        if math.prod(dims) != total:
            raise self.error("shape", f"{total} values as {replaced} has", list(options.shape.dim))
        return (*bottom.shape[:start], *dims, *bottom.shape[end:])
