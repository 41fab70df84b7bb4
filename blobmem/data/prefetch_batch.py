"""A batch in the making: the memory it is made in, and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blobmem.devices import Device
from blobmem.devices.pages import Pages

Shape = tuple[int, ...]
Spec = tuple[Shape, np.dtype]

_ALIGNMENT = 64  # bytes


def specs(arrays: Sequence[np.ndarray]) -> list[Spec]:
    """Shape and dtype of each array."""
    return [(array.shape, array.dtype) for array in arrays]


def spec_bytes(spec: Spec) -> int:
    """Bytes of an array of that shape and dtype."""
    return math.prod(spec[0]) * spec[1].itemsize


def places(specs: Sequence[Spec]) -> list[int]:
    """Where each of these arrays starts if they lie one after the other, and last where all of them end."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + -(-spec_bytes(spec) // _ALIGNMENT) * _ALIGNMENT)
    return offsets


_NONE = np.empty(0, np.uint8)


class Buffer:
    """Memory of one batch; it grows to the largest that it has held."""

    def __init__(self) -> None:
        self.raw = _NONE

    def arrays(self, specs: Sequence[Spec]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, at their `places` in the buffer."""
        sizes, offsets = [spec_bytes(spec) for spec in specs], places(specs)
        if self.raw.nbytes < offsets[-1]:
            self.raw = _NONE  # not the old one and the new one at once
            self.raw = self._room(offsets[-1])
        return [
            self.raw[offset : offset + size].view(dtype).reshape(shape)
            for (shape, dtype), offset, size in zip(specs, offsets, sizes, strict=False)
        ]

    def _room(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)


class LockableBuffer(Buffer):
    """One whose pages a device can lock, so that copies of them run beside everything else."""

    def __init__(self) -> None:
        super().__init__()
        self._pages = Pages(1)

    def _room(self, nbytes: int) -> np.ndarray:
        if nbytes > self._pages.reserved:
            self._pages = Pages(nbytes)
        self._pages.use(nbytes)
        return self._pages.bytes(0, nbytes)

    def lock(self, device: Device) -> None:
        """Lock all of it, where the device can. To be called by the thread that takes, while no copy is under way."""
        if self._pages.pinned < self.raw.nbytes:
            self._pages.pin(device, self.raw.nbytes)


class Batch:
    """A batch that is ready or in the making, in parts that any thread takes.

    Attributes:
        pending: parts that are not finished.
        late: the one who takes it had to wait.
        error: the first item of the earliest part that failed, and why.
    """

    def __init__(self, position: int, seed: int, buffer: Buffer, items: int, parts: int) -> None:
        self.position = position
        self.seed = seed
        self.buffer = buffer
        self.arrays: list[np.ndarray] = []
        # in reverse: the last one is taken first
        self.parts = [slice(items * n // parts, items * (n + 1) // parts) for n in reversed(range(parts))]
        self.pending = parts
        self.late = False
        self.error: tuple[int, BaseException] | None = None
