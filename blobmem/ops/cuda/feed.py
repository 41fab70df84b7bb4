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
    """A batch that has been taken from its source.

    Attributes:
        packed: its bytes, cuts and labels as they go to the device, in memory that stays what it is until `sent`'s
            event; or None.
        arrays: where it is not packed, the values of the tops.
    """

    packed: np.ndarray | None
    arrays: Sequence[np.ndarray]

    def sent(self, event: Event) -> None:
        """The batch is behind, and its memory free from the event on."""


@op(family="cuda")
def feed_images(packed: CudaArray, mean: CudaArray | None, data: CudaArray, labels: CudaArray | None, *,
                take: Callable[[Any], Taken], places: Sequence[int], scale: float) -> None:  # fmt: skip
    """The next batch, `take(device)`, through `packed` into data (items, channels, height, width) and labels (items,).

    In `packed`, a uint8 array, are from places[0] on the bytes, in data's shape; from places[1] on an int32 (items, 3),
    where each was cut out of its record, top and left, and whether its rows are turned round; from places[2] on the
    labels, of data's dtype. data = (bytes - mean) * scale, mean of shape (channels, height and width of a record), or
    (channels or 1, 1, 1).
    """
    device = packed.device
    link = device.link()
    batch = take(device)
    if batch.packed is None:
        for target, values in zip((data, labels), batch.arrays, strict=False):
            assert target is not None
            event = link.send(target, values)
            event.synchronize()
        batch.sent(event)
        return
    batch.sent(link.send(packed, batch.packed))
    items, channels, height, width = data.shape
    cuts, given = packed.address + places[1], None if labels is None else packed.address + places[2]
    grid = -(-channels * height // _WARPS), min(items, 65535)
    _KERNELS.run(data, "place_images", grid, 32 * _WARPS, packed, cuts, given, mean, data, labels, items, channels,
                 height, width, *_strides(mean), scale)  # fmt: skip
    link.used(packed)


def _strides(mean: CudaArray | None) -> tuple[int, int, int]:
    """By how much the mean's values lie apart along channels, height and width."""
    if mean is None:
        return 0, 0, 0
    channels, height, width = mean.shape
    plane = height * width
    return (plane if channels > 1 else 0), (width if plane > 1 else 0), int(plane > 1)
