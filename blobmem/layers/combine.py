"""Layers that join and divide blobs: Eltwise, Concat, Slice, Split, Silence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from blobmem.layers.base import ANY, SAME, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff

_PROD, _SUM, _MAX = 0, 1, 2


@register_layer
class Eltwise(Layer):
    """Product, weighted sum or maximum of bottoms of one shape. As in Caffe a maximum takes `coeff` and ignores it."""

    type = "Eltwise"
    bottoms = (2, None)
    bottom_kinds = (SAME,)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.eltwise_param
        self.operation, self.stable = options.operation, options.stable_prod_grad
        if options.coeff and self.operation == _PROD:
            raise self.error("coeff", "none for a product", list(options.coeff))
        if options.coeff and len(options.coeff) != len(bottom):
            raise self.error("coeff", f"none or {len(bottom)}, one for each bottom", len(options.coeff))
        self.coeffs = tuple(options.coeff) or (1.0,) * len(bottom)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in bottom[1:]:
            if blob.shape != bottom[0].shape:
                raise self.error("bottom", f"bottoms of one shape, as {bottom[0].describe()}", blob.describe())
        top[0].reshape_like(bottom[0])
        if self.operation == _MAX:
            self.internal_blob("mask", bottom[0].shape, "int32")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        arrays = [*map(read, bottom), overwrite(top[0])]
        if self.operation == _SUM:
            yield call("eltwise_sum", *arrays, coeffs=self.coeffs)
        elif self.operation == _PROD:
            yield call("eltwise_prod", *arrays)
        else:
            yield call("eltwise_max", *arrays, overwrite(self.internal["mask"]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if self.operation == _PROD and top[0] in bottom:
            raise self.error("top", "another blob than its bottoms, whose values the gradient needs", top[0].name)
        dy = read_diff(top[0])
        # in place, the gradient of the bottom that is the top comes last: it replaces dy
        for index, blob in sorted(enumerate(bottom), key=lambda item: item[1] is top[0]):
            if not propagate_down[index]:
                continue
            dx = overwrite_diff(blob)
            if self.operation == _SUM:
                yield call("eltwise_sum_backward", dy, dx, coeff=self.coeffs[index])
            elif self.operation == _MAX:
                yield call("eltwise_max_backward", dy, read(self.internal["mask"]), dx, index=index)
            elif self.stable:
                others = [read(other) for i, other in enumerate(bottom) if i != index]
                yield call("eltwise_prod_backward", dy, dx, *others)
            else:
                yield call("eltwise_prod_backward_unstable", dy, dx, read(blob), read(top[0]))


@register_layer
class Concat(Layer):
    """Bottoms one after another along an axis."""

    type = "Concat"
    bottoms = (1, None)
    bottom_kinds = (SAME,)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if len(bottom) > 1:
            refuse_in_place(self)
        options = self.param.concat_param
        if options.HasField("axis") and options.HasField("concat_dim"):
            raise self.error("concat_dim", "axis alone; concat_dim is its old name")
        given = options.concat_dim if options.HasField("concat_dim") else options.axis
        self.axis = self.axis_of(bottom[0], given, "axis")

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        first = list(bottom[0].shape)
        for blob in bottom[1:]:
            dims = list(blob.shape)
            if len(dims) != len(first) or any(
                a != b for i, (a, b) in enumerate(zip(dims, first, strict=True)) if i != self.axis
            ):
                raise self.error(
                    "bottom", f"shapes equal but for axis {self.axis}, as {bottom[0].describe()}", blob.describe()
                )
        first[self.axis] = sum(blob.shape[self.axis] for blob in bottom)
        top[0].reshape(first)
        if len(bottom) == 1:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if len(bottom) > 1:
            yield call("concat_forward", *map(read, bottom), overwrite(top[0]), axis=self.axis)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        offsets = itertools.accumulate((blob.shape[self.axis] for blob in bottom), initial=0)
        for blob, offset, wanted in zip(bottom, offsets, propagate_down, strict=False):
            if wanted and len(bottom) > 1:
                dx = overwrite_diff(blob)
                yield call("concat_backward", read_diff(top[0]), dx, axis=self.axis, offset=offset)


@register_layer
class Slice(Layer):
    """A bottom divided along an axis, at the given points or evenly."""

    type = "Slice"
    tops = (1, None)
    bottom_kinds = (ANY,)
    top_kinds = (SAME,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if len(top) > 1:
            refuse_in_place(self)
        options = self.param.slice_param
        if options.HasField("axis") and options.HasField("slice_dim"):
            raise self.error("slice_dim", "axis alone; slice_dim is its old name")
        given = options.slice_dim if options.HasField("slice_dim") else options.axis
        self.axis = self.axis_of(bottom[0], given, "axis")
        self.points = list(options.slice_point)
        if self.points and len(self.points) != len(top) - 1:
            raise self.error("slice_point", f"none or {len(top) - 1}, one fewer than tops", len(self.points))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        size = bottom[0].shape[self.axis]
        if not self.points and size % len(top):
            raise self.error("slice_point", f"points, as {size} is not a multiple of {len(top)} tops")
        step = size // len(top)
        bounds = [0, *(self.points or range(step, step * len(top), step)), size]
        if any(a >= b for a, b in itertools.pairwise(bounds)) and size:
            raise self.error("slice_point", f"rising points between 0 and {size}", self.points)
        for blob, (start, stop) in zip(top, itertools.pairwise(bounds), strict=True):
            dims = list(bottom[0].shape)
            dims[self.axis] = stop - start
            blob.reshape(dims)
        if len(top) == 1:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if len(top) > 1:
            yield call("slice_forward", read(bottom[0]), *map(overwrite, top), axis=self.axis)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0] and len(top) > 1:
            yield call("slice_backward", *map(read_diff, top), overwrite_diff(bottom[0]), axis=self.axis)


@register_layer
class Split(Layer):
    """Several tops that are the bottom itself; their gradients add up."""

    type = "Split"
    tops = (1, None)
    bottom_kinds = (ANY,)
    top_kinds = (SAME,)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in top:
            blob.reshape_like(bottom[0])
            blob.share_data(bottom[0])

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        # a top whose gradient nobody writes (an accuracy's) would only add zeros
        written = [blob for blob, used in zip(top, self.top_grads, strict=True) if used]
        if written:
            yield call("sum_arrays", *map(read_diff, written), overwrite_diff(bottom[0]))
        else:
            yield call("fill", overwrite_diff(bottom[0]), value=0.0)


@register_layer
class Convert(Layer):
    """The bottom in the net's other dtype. Nets in half precision have it between layers of halves and of float32."""

    type = "Convert"
    bottom_kinds = (ANY,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape_like(bottom[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call("copy", read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            yield call("copy", read_diff(top[0]), overwrite_diff(bottom[0]))


@register_layer
class Silence(Layer):
    """Takes blobs so that they are no outputs of the net; their gradients are zero."""

    type = "Silence"
    bottoms = (1, None)
    tops = (0, 0)
    bottom_kinds = (ANY,)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        pass

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                yield call("fill", overwrite_diff(blob), value=0.0)
