"""Bytes of the host on their way to a device, beside what the device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blobmem.devices.base import Event
from blobmem.devices.cuda.array import CudaArray

if TYPE_CHECKING:
    from blobmem.devices.cuda.device import CudaDevice


class Link:
    """One thread's copy stream, beside its compute stream.

    An array that is sent again and again is used on compute streams alone, and by nobody else; after each use comes
    `used`. Then a copy starts as soon as the array is free, while the device goes on with what was queued since.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._copies = device.create_copy_stream()
        self._compute = device.compute_stream()

    def send(self, target: CudaArray, source: np.ndarray) -> Event:
        """Queue a copy, which everything queued on the compute stream from now on comes after.

        It comes after the array's last use, or, if none was told, after everything on the compute stream. The event
        says when `source`, whose pages should be locked, may change.
        """
        used = self._device.last_uses.pop(target.address, None)
        self._copies.wait(used or self._compute.record())
        self._device.memcpy_htod(target.address, source, self._copies)
        arrived = self._copies.record()
        self._compute.wait(arrived)
        return arrived

    def used(self, array: CudaArray) -> None:
        """Tell that what is queued on the compute stream by now is all that uses the array, until it is sent again."""
        # of the device, not the thread: another thread's net may share the array
        self._device.last_uses[array.address] = self._compute.record()
