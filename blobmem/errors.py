"""The exceptions that blobmem raises for its users, in one place.

All derive from `BlobmemError`, so that one `except` catches whatever the package reports, and each also derives
from the built-in exception that a caller who has never heard of blobmem would catch.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlobmemError(Exception):
    """Base of everything blobmem raises on purpose."""


class DeviceError(BlobmemError):
    """A device was misused (an address outside a live allocation, say), cannot do what was asked, or failed."""


class OutOfDeviceMemory(BlobmemError, MemoryError):
    """A device has no room for an allocation. Nothing was changed: the same call succeeds once there is room.

    Attributes:
        requested: bytes that were asked for (for growth: the bytes of room that were missing for it to go ahead).
        free: bytes that were free at that moment.
        total: the device's capacity in bytes.
        holders: (label, bytes) of the largest live allocations, largest first.
    """

    def __init__(
        self,
        message: str,
        requested: int = 0,
        free: int = 0,
        total: int = 0,
        holders: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.free = free
        self.total = total
        self.holders = list(holders)


class SharedBlobError(BlobmemError, RuntimeError):
    """Bytes of a blob shared between nets were asked for after another net had rewritten them."""


class NetError(BlobmemError, ValueError):
    """A net, solver or model file is wrong; the message names the file, the layer and the field."""
