"""What a layer gives the op that feeds a net: batches of bytes on their way to a device, or there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blobmem.data.prefetch_batch import Batch
from blobmem.devices import Device, Event


class Unit:
    """Some batches of bytes, one after the other, which are sent together. See blobmem.ops.cuda.feed.Taken.

    Args:
        sent: told when it has been sent, with the event after which its memory is free.
        batch: what was lent for it.
        nbytes: of the batch's buffer that are sent.
        count: batches in it.
        items: of each batch.
        device: where it goes.
    """

    ready: Sequence[np.ndarray] = ()

    def __init__(
        self,
        sent: Callable[[Unit, Event], None],
        batch: Batch,
        nbytes: int,
        count: int,
        items: int,
        device: Device,
    ) -> None:
        self._sent, self._count, self._items, self._device = sent, count, items, device
        self._position, self._seed = batch.position, batch.seed
        self.batch = batch
        self.packed: np.ndarray | None = batch.buffer.raw[:nbytes]
        self.number = 0

    def turn_to(self, position: int, seed: int, device: Device) -> bool:
        """Be about the batch at a position; False if that is not in this unit, or the unit not on that device."""
        number, rest = divmod(position - self._position, self._items)
        if rest or not 0 <= number < self._count or seed != self._seed or device is not self._device:
            return False
        self.number = number
        return True

    def sent(self, event: Event) -> None:
        self._sent(self, event)
        self.packed = None


class Ready:
    """A batch that has no bytes, as the tops' values. See blobmem.ops.cuda.feed.Taken."""

    packed, number = None, 0

    def __init__(self, sent: Callable[[], None], arrays: Sequence[np.ndarray]) -> None:
        self._sent, self.ready = sent, arrays

    def sent(self, event: Event) -> None:
        self._sent()
