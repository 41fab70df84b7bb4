"""What a layer gives the op that feeds a net: batches of bytes on their way to a device, or there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blobmem.data.prefetch_batch import Batch
from blobmem.devices import Device, Event


class Unit:
    """Some batches of bytes, one after the other, which are sent together. See blobmem.ops.cuda.feed.Unit.

    Args:
        sent: told when it has been sent, with the event after which its memory is free.
        batch: what was lent for it.
        nbytes: of the batch's buffer that are sent.
        place: which of the units that the device has room for.
        count: batches in it.
        items: of each batch.
        device: where it goes.
    """

    def __init__(
        self,
        sent: Callable[[Unit, Event], None],
        batch: Batch,
        nbytes: int,
        place: int,
        count: int,
        items: int,
        device: Device,
    ) -> None:
        self._sent, self._items, self._device = sent, items, device
        self._position, self._seed = batch.position, batch.seed
        self.batch, self.place, self.count = batch, place, count
        self.packed = batch.buffer.raw[:nbytes]

    @property
    def end(self) -> int:
        """The position behind it."""
        return self._position + self.count * self._items

    def find(self, position: int, seed: int, device: Device) -> int:
        """Which batch in it is the one at a position; -1 if none is, or the unit is not on that device."""
        number, rest = divmod(position - self._position, self._items)
        if rest or not 0 <= number < self.count or seed != self._seed or device is not self._device:
            return -1
        return number

    def sent(self, event: Event) -> None:
        self._sent(self, event)


class Taken(NamedTuple):
    """See blobmem.ops.cuda.feed.Taken."""

    number: int
    unsent: Sequence[Unit] = ()
    left: int | None = None
    ready: Sequence[np.ndarray] = ()
