"""A convolution of one image in slabs of its first spatial axis, where its plan takes more workspace than there is.

Plans that turn images over take as many bytes of workspace as the arrays, and what takes less is many times as slow.
Images of a batch are taken part by part; one alone is here: slabs of it are copied, with the rows around them that
they need and zeros beyond the image, and each is convolved as an image of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from blobmem import dtypes
from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import Key
from blobmem.ops.cuda.conv_direct import add, take_channels_last
from blobmem.ops.cuda.conv_plans import chosen, plan_ms, plan_of, room_of, within
from blobmem.ops.cuda.cudnn import RELU, Plan
from blobmem.ops.cuda.layout import aligned, in_layout, to_channels_last, weights_turn
from blobmem.ops.cuda.strided import copy

WORTH = 0.8
"""What part of the time of the plan for little workspace slabs may seem to take, as copies come to that."""

TRIES = 3
"""How many numbers of slabs are looked at: each wants a search."""


class Slabs(NamedTuple):
    """A convolution as so many of a slab.

    Attributes:
        number: of slabs, equal parts of the rows of what is written, or of y for weights.
        key: of a slab; forward without what follows a convolution.
        plan_bytes: the workspace of its plan.
    """

    number: int
    key: Key
    plan_bytes: int

    @property
    def nbytes(self) -> int:
        """All of the workspace."""
        return _starts(self.key)[-1] + self.plan_bytes

    @property
    def _turns(self) -> bool:
        """Whether plans have weights in another order than the file."""
        return weights_turn(self.key.w, self.key.layout)

    @property
    def _axis(self) -> int:
        """That of the rows."""
        return 1 if self.key.layout == "NHWC" else 2

    def forward(self, x: CudaArray, w: CudaArray, y: CudaArray, pad: int, ws: CudaArray | None,
                turned: bool = False) -> None:  # fmt: skip
        """y = x convolved with w, which may be in the plan's order; `pad` is the image's along the axis."""
        plan, (images, outputs, fresh), ws = self._arrays(x, ws)
        w, axis = w if turned else self._turned(w, fresh), self._axis
        rows = outputs.shape[axis]
        for first in range(0, y.shape[axis], rows):
            _take(x, first - pad, images, axis)
            self._run(plan, (images, w, outputs), ws)
            _put(outputs, y, first, axis)

    def backward_data(self, dy: CudaArray, w: CudaArray, dx: CudaArray, pad: int, ws: CudaArray | None) -> None:
        """dx = the gradient for x."""
        plan, (images, outputs, fresh), ws = self._arrays(dx, ws)
        w, axis = self._turned(w, fresh), self._axis
        rows = images.shape[axis]
        for first in range(0, dx.shape[axis], rows):
            _take(dy, first + pad - self.key.pad[0], outputs, axis)
            self._run(plan, (images, w, outputs), ws)
            _put(images, dx, first, axis)

    def backward_weights(self, x: CudaArray, dy: CudaArray, dw: CudaArray, pad: int, ws: CudaArray | None,
                         accumulate: bool) -> None:  # fmt: skip
        """dw = the gradient for w, or with `accumulate` plus that."""
        plan, (images, outputs, fresh), ws = self._arrays(x, ws)
        axis = self._axis
        rows = outputs.shape[axis]
        for first in range(0, dy.shape[axis], rows):
            _take(x, first - pad, images, axis)
            _take(dy, first, outputs, axis)
            adds = accumulate or first > 0
            self._run(plan, (images, fresh if adds or self._turns else dw, outputs), ws)
            if self._turns:
                take_channels_last(fresh, dw, accumulate=adds)
            elif adds:
                add(fresh, dw)

    def _turned(self, w: CudaArray, fresh: CudaArray) -> CudaArray:
        """The weights as a plan wants them."""
        if not self._turns:
            return w
        to_channels_last(w, fresh)
        return fresh

    def _arrays(self, like: CudaArray, ws: CudaArray | None) -> tuple[Plan, list[CudaArray], CudaArray]:
        """The plan, and in the workspace a slab of x, of y, and weights, or the gradient for them of one slab."""
        held, (y, w, _) = 0 if ws is None else ws.nbytes, _starts(self.key)
        if ws is None or held < self.nbytes:
            raise DeviceError(f"a convolution in slabs needs {self.nbytes} bytes of workspace but was given {held}")
        plan = plan_of(self.key, like.device)
        assert isinstance(plan, Plan)  # as it was chosen for that
        shapes = [*(in_layout(shape, self.key.layout) for shape in (self.key.x, self.key.y)), _beside(self.key)]
        return plan, [ws.part(at, shape, like.dtype) for at, shape in zip((0, y, w), shapes, strict=True)], ws

    def _run(self, plan: Plan, arrays: tuple[CudaArray, ...], ws: CudaArray) -> None:
        plan.run([array.address for array in arrays], ws.address + _starts(self.key)[-1])


def slabs_of(key: Key, room: int | None, device: Any) -> Slabs | None:
    """The slabs by which a convolution runs where its plan takes more workspace than there is room for; None where it
    does not, where no slabs take as little, or the plan for that room is as fast.

    On a device with a GPU this searches for plans.
    """
    if room is None or not _can_divide(key):
        return None
    whole = key._replace(direction="forward+bias") if key.direction == RELU else key
    usual = room_of(whole, device)
    wanted = 0 if usual is None else _wanted(whole, usual.nbytes, device)
    if wanted <= room:
        return None
    for number, slab in _numbers(key, wanted, room):
        ms, taken = plan_ms(slab, device), room_of(slab, device)
        if ms is None or taken is None or not taken.turns or taken.parts > 1 or taken.nbytes > room - _starts(slab)[-1]:
            continue
        slow = plan_ms(within(whole, room, device), device)
        return Slabs(number, slab, taken.nbytes) if slow is None or number * ms < WORTH * slow else None
    return None


def known_ms(key: Key, room: int | None, device: Any) -> float | None:
    """What the plans of slabs took when they were chosen, where a convolution with little room runs so; None if it does
    not, or they are not known. Nothing is searched for."""
    usual = None if room is None or not _can_divide(key) else chosen(key, device)
    wanted = 0 if usual is None else _wanted(key, usual.workspace, device)
    if room is None or wanted <= room:
        return None
    for number, slab in _numbers(key, wanted, room):
        choice = chosen(slab, device)
        if choice is not None and choice.workspace <= room - _starts(slab)[-1]:
            return number * choice.ms
    return None


def _wanted(key: Key, nbytes: int, device: Any) -> int:
    """The workspace of the plan that a convolution would run by, of which one was found that takes so many bytes: as
    much as x and y, if that is one for want of memory to search for others."""
    if algorithms.predict(device.model, key.math, key) is not None:
        return nbytes
    return max(nbytes, (math.prod(key.x) + math.prod(key.y)) * dtypes.of(key.dtype).itemsize)


def _can_divide(key: Key) -> bool:
    return key.x[0] == 1 and len(key.x) > 3 and key.stride[0] == 1


def _numbers(key: Key, nbytes: int, room: int) -> Iterator[tuple[int, Key]]:
    """The least numbers of slabs of which one seems to take no more room, and its key; the whole takes so many bytes,
    in proportion to x and y. What follows a convolution comes after all slabs."""
    halo, data = key.dilation[0] * (key.w[2] - 1), key.direction == "data"
    rows, found = (key.x if data else key.y)[2], 0
    for number in range(2, rows + 1):
        if rows % number or found == TRIES:
            continue
        part = rows // number
        x, pad = (part, halo) if data else (part + halo, 0)
        slab = key._replace(
            direction=key.direction.partition("+")[0], x=(*key.x[:2], x, *key.x[3:]), pad=(pad, *key.pad[1:])
        )
        share = (math.prod(slab.x) + math.prod(slab.y)) / (math.prod(key.x) + math.prod(key.y))
        if _starts(slab)[-1] + share * nbytes <= room:
            found += 1
            yield number, slab


def _starts(slab: Key) -> tuple[int, int, int]:
    """Where a workspace has y's slab, behind x's, weights, and the plan's own."""
    width = dtypes.of(slab.dtype).itemsize
    y = aligned(math.prod(slab.x) * width)
    w = y + aligned(math.prod(slab.y) * width)
    return y, w, w + aligned(math.prod(_beside(slab)) * width)


def _beside(slab: Key) -> tuple[int, ...]:
    """The shape of weights that a workspace has room for."""
    return slab.w if slab.direction == "weights" or weights_turn(slab.w, slab.layout) else (0,)


def _take(image: CudaArray, first: int, slab: CudaArray, axis: int) -> None:
    """slab = the image's rows from `first` on, zeros where it has none."""
    begin, end = max(0, first), min(image.shape[axis], first + slab.shape[axis])
    if end - begin < slab.shape[axis]:
        slab.zero()
    _copy(image, begin, slab, begin - first, end - begin, axis)


def _put(slab: CudaArray, image: CudaArray, first: int, axis: int) -> None:
    _copy(slab, 0, image, first, slab.shape[axis], axis)


def _copy(x: CudaArray, x_first: int, y: CudaArray, y_first: int, rows: int, axis: int) -> None:
    """Rows of an image to another's."""
    outer, row = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    x_steps, y_steps = (x.shape[axis] * row, 1), (y.shape[axis] * row, 1)
    copy(x, y, (outer, rows * row), x_steps, y_steps, x_first * row, y_first * row)
