"""A net's losses on their way to the host, behind what computes them and without holding up what comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blobmem.devices import Device, Pages
from blobmem.memory import Intent, Side
from blobmem.memory.blob import Blob

Shape = tuple[int, ...]
Losses = Sequence[tuple[Blob, float]]
"""Blobs that are losses, with their weights."""

_ROOM = 4096


class LossReader:
    """Reads a net's losses: where a device computes on a stream, into page-locked memory of the host."""

    def __init__(self) -> None:
        self._pages: Pages | None = None
        self._places: tuple[list[tuple[Shape, np.dtype]], list[np.ndarray]] = [], []

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
        arrays = self._arrays(device, losses)
        for array, view in zip(arrays, views, strict=True):
            address = view.memory.access(Side.DEVICE, view.offset, view.nbytes, Intent.READ, stream)
            device.memcpy_dtoh(array, address, stream)
        read = stream.record()

        def wait() -> float:
            read.synchronize()
            return _total(arrays, losses)

        return wait

    def _arrays(self, device: Device, losses: Losses) -> list[np.ndarray]:
        wanted, places = self._places
        if self._pages is not None and self._pages.pinned and wanted == [(b.shape, b.dtype) for b, _ in losses]:
            return places
        needed = sum(blob.nbytes for blob, _ in losses)
        if self._pages is None or self._pages.reserved < needed or not self._pages.pinned:
            self._pages = Pages(max(needed, _ROOM), max(needed, _ROOM))
            self._pages.pin(device, self._pages.reserved)
        arrays, offset = [], 0
        for blob, _ in losses:
            stop = offset + blob.nbytes
            arrays.append(self._pages.bytes(offset, stop).view(blob.dtype).reshape(blob.shape))
            offset = stop
        self._places = [(blob.shape, blob.dtype) for blob, _ in losses], arrays
        return arrays


def _total(arrays: Sequence[np.ndarray], losses: Losses) -> float:
    total = 0.0
    for array, (_, weight) in zip(arrays, losses, strict=True):
        # most are one number, of which a sum would take longer
        total += weight * float(array.item() if array.size == 1 else array.sum(dtype=np.float64))
    return total
