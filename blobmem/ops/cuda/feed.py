"""Batches from the host's buffers to a net's tops, as bytes: what `Transformer` does to items, done on the device.

These ops have no twin on the host, where the batches are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from blobmem.devices.base import Event
from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("feed")
_WARPS = 8  # in a block; each takes a row


class Unit(Protocol):
    """Batches that lie together.

    Attributes:
        packed: they, as they go to the device, in memory that stays what it is until `sent`'s event.
        place: which of the units that the device has room for this one becomes.
    """

    @property
    def packed(self) -> np.ndarray: ...
    @property
    def place(self) -> int: ...

    def sent(self, event: Event) -> None:
        """It is on its way, and its memory free from the event on."""


class Taken(Protocol):
    """A batch that has been taken from its source.

    Attributes:
        number: which of the batches that the device has room for it is, unit after unit.
        unsent: units to be sent now: that of the batch if it is not on the device, or one that will be used later.
        left: the place of the unit that the batches before were in, if this one is in another.
        ready: of a batch that has no bytes the values of the tops, else nothing.
    """

    @property
    def number(self) -> int: ...
    @property
    def unsent(self) -> Sequence[Unit]: ...
    @property
    def left(self) -> int | None: ...
    @property
    def ready(self) -> Sequence[np.ndarray]: ...


@op(family="cuda", captures=False)
def feed_images(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
                take: Callable[[Any], Taken], places: Sequence[int], scale: float, mirror: bool) -> None:  # fmt: skip
    """The next batch, `take(device)`, through `packed` into data (items, channels, height, width) and labels (items,).

    In `packed`, a uint8 array, is one unit, of this batch alone: from places[0] on the bytes, in data's shape; from
    places[1] on int32 (items, 3), where each item was cut out of its record, top and left, and whether its rows are
    turned round, which only with `mirror` any are; from places[2] on the labels. data = (bytes - mean) * scale, mean of
    shape (channels, height and width of a record), or (channels or 1, 1, 1).
    """
    number = _send_next(packed, data, labels, take, places)
    if number >= 0:
        _place(packed, mean, data, labels, places, scale, mirror, number)
        packed.device.link().used(packed)


def _begin(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
           take: Callable[[Any], Taken], places: Sequence[int], **_: Any) -> int:  # fmt: skip
    return _send_next(packed, data, labels, take, places)


@op(family="cuda", captures=False, before=_begin)
def feed_images_of_unit(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
                        take: Callable[[Any], Taken], places: Sequence[int], scale: float, mirror: bool,
                        together: int, begun: int | None = None) -> None:  # fmt: skip
    """As `feed_images`, of units of so many batches `together`, of which `packed` has several.

    In each are all batches' bytes, then all cuts, all labels. A unit stays there until another is sent to its place.
    """
    number = _begin(packed, mean, data, labels, take=take, places=places) if begun is None else begun
    _place(packed, mean, data, labels, places, scale, mirror, number, together)


def _send_next(
    packed: CudaArray, data: CudaArray, labels: CudaArray | None, take: Callable[[Any], Taken], places: Sequence[int]
) -> int:
    """Take a batch, and send what is not on the device; the batch's number, -1 if the tops have it now."""
    device = packed.device
    batch = take(device)
    if batch.ready:
        _send_ready(device, (data, labels), batch.ready)
        return -1
    if batch.left is not None:
        device.link().used(_unit(packed, places, batch.left))
    for unit in batch.unsent:
        unit.sent(device.link().send(_unit(packed, places, unit.place), unit.packed))
    return batch.number


def _unit(packed: CudaArray, places: Sequence[int], place: int) -> CudaArray:
    return packed.part(place * places[-1], places[-1:])


def _place(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, places: Sequence[int],
           scale: float, mirror: bool, number: int, together: int = 1) -> None:  # fmt: skip
    """Transform a batch that has been sent; for -1 the kernel does nothing."""
    items, channels, height, width = data.shape
    unit, before = divmod(max(number, 0), together)
    before, address = before * items, packed.address + unit * places[-1]
    pixels = address + places[0] + before * channels * height * width
    given = None if labels is None else address + places[2] + before * labels.dtype.itemsize
    strides = _strides(mean)
    cuts = address + places[1] + before * 12 if mirror or any(strides[1:]) else None
    grid = -(-channels * height // _WARPS), min(items, 65535), 1
    _KERNELS.run(data, "place_images", grid, 32 * _WARPS, pixels, cuts, given, mean, data, labels,
                 items if number >= 0 else 0, channels, height, width, *strides, scale)  # fmt: skip


def _send_ready(device: Any, targets: Sequence[CudaArray | None], values: Sequence[np.ndarray]) -> None:
    """Send values to tops once everything queued so far is done; wait for that."""
    for target, array in zip(targets, values, strict=False):
        assert target is not None
        device.link().used(target)
        device.link().send(target, array).synchronize()


def _strides(mean: CudaArray | None) -> tuple[int, int, int]:
    """By how much the mean's values lie apart along channels, height and width."""
    if mean is None:
        return 0, 0, 0
    channels, height, width = mean.shape
    plane = height * width
    return (plane if channels > 1 else 0), (width if plane > 1 else 0), int(plane > 1)
