"""The words an access is stated in: which side, with what intent, through which view."""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from blobmem.devices.base import Stream
    from blobmem.memory.synced import SyncedMemory

ALIGNMENT = 512


class Side(enum.IntEnum):
    """One of the two sides of a memory; the values are the bits of `Extents`."""

    HOST = 1
    DEVICE = 2


class Intent(enum.StrEnum):
    """How an access will use its bytes."""

    READ = "read"
    WRITE = "write"  # a part of them, or after reading them: old bytes are brought first
    OVERWRITE = "overwrite"  # every one of them: old bytes are neither brought nor zeroed


class Head(enum.StrEnum):
    """Where the newest bytes are."""

    UNINITIALIZED = "uninitialized"
    AT_CPU = "at_cpu"
    AT_GPU = "at_gpu"
    SYNCED = "synced"
    MIXED = "mixed"


HEADS = (Head.UNINITIALIZED, Head.AT_CPU, Head.AT_GPU, Head.SYNCED)  # by bits

INTENTS: dict[str, Intent] = {str(intent): intent for intent in Intent}


def intent_of(intent: str) -> Intent:
    """The Intent of that name; ValueError lists them."""
    try:
        return INTENTS[intent]
    except (KeyError, TypeError):
        raise ValueError(f"intent {intent!r} is not one of {', '.join(INTENTS)}") from None


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class View:
    """`nbytes` bytes of a memory from `offset` on, a multiple of 512. Immutable; views are equal when these are.

    While a view is alive, `SyncedMemory.trim` keeps its bytes.
    """

    memory: SyncedMemory
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        offset, nbytes = operator.index(self.offset), operator.index(self.nbytes)
        if offset < 0 or offset % ALIGNMENT:
            raise ValueError(f"a view's offset is a multiple of {ALIGNMENT} bytes, from 0 on; {offset} is not")
        if nbytes < 0:
            raise ValueError(f"a view has 0 bytes or more, not {nbytes}")
        self.memory.register(self)

    def cpu_data(self, intent: str = Intent.READ) -> np.ndarray:
        """The bytes on the host: a uint8 array of shape (nbytes,), read-only for the intent "read"."""
        intent = intent_of(intent)
        self.memory.announce(intent)
        self.memory.access(Side.HOST, self.offset, self.nbytes, intent)
        return self.memory.host_array(self.offset, (self.nbytes,), np.uint8, intent is not Intent.READ)

    def gpu_data(self, intent: str = Intent.READ, stream: Stream | None = None) -> int:
        """The address of the bytes on the device, for work queued on `stream` (None: work done at once)."""
        intent = intent_of(intent)
        self.memory.announce(intent)
        address: int = self.memory.access(Side.DEVICE, self.offset, self.nbytes, intent, stream)
        return address
