"""A net's losses on their way to the host, behind what computes them and without holding up what comes next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blobmem.devices import Device, Event, Pages
from blobmem.memory import Intent, Side
from blobmem.memory.blob import Blob

Places = list[tuple[tuple[int, ...], np.dtype]]
Losses = Sequence[tuple[Blob, float]]
"""Blobs that are losses, with their weights."""

_ROOM = 4096


class Landing(NamedTuple):
    """Memory of the host, page-locked where that can be, in which losses of a net arrive.

    Attributes:
        places: their shapes and dtypes.
        pages: where it is.
        arrays: one for each.
        addresses: of these.
    """

    places: Places
    pages: Pages
    arrays: list[np.ndarray]
    addresses: list[int]

    @property
    def is_seen(self) -> bool:
        """Whether kernels can write there."""
        return self.pages.pinned > 0


class LossReader:
    """Reads a net's losses: where a device computes on a stream, into page-locked memory of the host."""

    def __init__(self) -> None:
        self._free: list[Landing] = []

    def read(self, device: Device, losses: Losses) -> Callable[[], float]:
        """What gives the sum of the losses times their weights, as they are when this is called, once.

        Where ops have finished when they return, that has been read by then. Elsewhere its reading is queued; the
        function waits for it, but not for what is queued after it, and raises what kernels found wrong until then.
        """
        if not losses:  # and nothing to wait for
            return lambda: 0.0
        stream = device.compute_stream()
        views = [blob.data_view for blob, _ in losses]
        if stream is None or any(view.memory.resident_side(view.offset, view.nbytes) is Side.HOST for view in views):
            arrays = [blob.cpu_data() for blob, _ in losses]
            total = _total(arrays, losses) if device.compute else 0.0
            return lambda: total
        landing = self.lend(device, losses)
        for array, view in zip(landing.arrays, views, strict=True):
            address = view.memory.access(Side.DEVICE, view.offset, view.nbytes, Intent.READ, stream)
            device.memcpy_dtoh(array, address, stream)
        return self.after(stream.record(), landing, losses)

    def after(self, read: Event, landing: Landing, losses: Losses) -> Callable[[], float]:
        """`read`'s function, of losses that have arrived after an event where `lend` said."""

        def wait() -> float:
            read.synchronize()
            total = _total(landing.arrays, losses)
            self.free(landing)
            return total

        return wait

    def free(self, landing: Landing) -> None:
        """What `lend` gave is read, or was not used."""
        self._free.append(landing)

    def lend(self, device: Device, losses: Losses) -> Landing:
        """Where to put such losses; until they have been read nobody else is told to put any there."""
        places = [(blob.shape, blob.dtype) for blob, _ in losses]
        while self._free:
            landing = self._free.pop()
            if landing.places == places:
                return landing
        # for two passes, of which one may begin before the other's losses are read
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in 2 * places]
        nbytes = max(sum(sizes), _ROOM)
        pages = Pages(nbytes, nbytes)
        pages.pin(device, pages.reserved)
        arrays = [
            pages.bytes(stop - size, stop).view(dtype).reshape(shape)
            for size, stop, (shape, dtype) in zip(sizes, itertools.accumulate(sizes), 2 * places, strict=True)
        ]
        for some in (arrays[len(places) :], arrays[: len(places)]):
            self._free.append(Landing(places, pages, some, [array.ctypes.data for array in some]))
        return self._free.pop()


def _total(arrays: Sequence[np.ndarray], losses: Losses) -> float:
    total = 0.0
    for array, (_, weight) in zip(arrays, losses, strict=True):
        # most are one number, of which a sum would take longer
        total += weight * float(array.item() if array.size == 1 else array.sum(dtype=np.float64))
    return total
