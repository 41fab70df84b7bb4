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


class Taken(Protocol):
    """A batch that has been taken from its source, one of a unit of batches that lie together.

    Attributes:
        packed: the unit, as it goes to the device, in memory that stays what it is until `sent`'s event; None where it
            is on the device already, or the batch has no bytes.
        ready: of a batch that has no bytes the values of the tops, else nothing.
        number: which batch of the unit it is.
    """

    @property
    def packed(self) -> np.ndarray | None: ...
    @property
    def ready(self) -> Sequence[np.ndarray]: ...
    @property
    def number(self) -> int: ...

    def sent(self, event: Event) -> None:
        """The unit, or the batch that has no bytes, is on its way, and its memory free from the event on."""


@op(family="cuda", captures=False)
def feed_images(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
                take: Callable[[Any], Taken], places: Sequence[int], scale: float) -> None:  # fmt: skip
    """The next batch, `take(device)`, through `packed` into data (items, channels, height, width) and labels (items,).

    In `packed`, a uint8 array, are, batch after batch: from places[0] on the bytes, each batch's in data's shape; from
    places[1] on int32 (items, 3), where each item was cut out of its record, top and left, and whether its rows are
    turned round; from places[2] on the labels. data = (bytes - mean) * scale, mean of shape (channels, height and width
    of a record), or (channels or 1, 1, 1). The unit is this batch alone.
    """
    number = _send_next(packed, data, labels, take, single=True)
    if number >= 0:
        _place(packed, mean, data, labels, places, scale, number)
        packed.device.link().used(packed)


def _begin(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
           take: Callable[[Any], Taken], **_: Any) -> int:  # fmt: skip
    return _send_next(packed, data, labels, take, single=False)


@op(family="cuda", captures=False, before=_begin)
def feed_images_of_unit(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
                        take: Callable[[Any], Taken], places: Sequence[int], scale: float,
                        begun: int | None = None) -> None:  # fmt: skip
    """As `feed_images`, of units of several batches, which stay in `packed` until the next one is sent."""
    number = _begin(packed, mean, data, labels, take=take) if begun is None else begun
    _place(packed, mean, data, labels, places, scale, number)


def _send_next(
    packed: CudaArray, data: CudaArray, labels: CudaArray | None, take: Callable[[Any], Taken], single: bool
) -> int:
    """Take a batch, and send it if it is not on the device; which of the unit it is, -1 if the tops have it now."""
    device = packed.device
    batch = take(device)
    if batch.ready:
        batch.sent(_send_ready(device, (data, labels), batch.ready))
        return -1
    if batch.packed is not None:
        batch.sent(_send(device, packed, batch.packed, single))
    return batch.number


def _place(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, places: Sequence[int],
           scale: float, number: int) -> None:  # fmt: skip
    """Transform a batch that has been sent; for -1 the kernel does nothing."""
    items, channels, height, width = data.shape
    before, address = max(number, 0) * items, packed.address
    pixels = address + places[0] + before * channels * height * width
    given = None if labels is None else address + places[2] + before * labels.dtype.itemsize
    grid = -(-channels * height // _WARPS), min(items, 65535), 1
    _KERNELS.run(data, "place_images", grid, 32 * _WARPS, pixels, address + places[1] + before * 12, given, mean, data,
                 labels, items if number >= 0 else 0, channels, height, width, *_strides(mean), scale)  # fmt: skip


def _send(device: Any, target: CudaArray, source: np.ndarray, told: bool = False) -> Event:
    """Send the source once everything queued so far is done; if its last use was `told`, once that is."""
    link = device.link()
    if not told:
        link.used(target)
    event: Event = link.send(target, source)
    return event


def _send_ready(device: Any, targets: Sequence[CudaArray | None], values: Sequence[np.ndarray]) -> Event:
    for target, array in zip(targets, values, strict=False):
        assert target is not None
        event = _send(device, target, array)
        event.synchronize()
    return event


def _strides(mean: CudaArray | None) -> tuple[int, int, int]:
    """By how much the mean's values lie apart along channels, height and width."""
    if mean is None:
        return 0, 0, 0
    channels, height, width = mean.shape
    plane = height * width
    return (plane if channels > 1 else 0), (width if plane > 1 else 0), int(plane > 1)
