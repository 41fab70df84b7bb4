"""A batch in the making: the memory it is made in, and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]
Spec = tuple[Shape, np.dtype]

_ALIGNMENT = 64  # bytes


def specs(arrays: Sequence[np.ndarray]) -> list[Spec]:
    """Shape and dtype of each array."""
    return [(array.shape, array.dtype) for array in arrays]


def spec_bytes(spec: Spec) -> int:
    """Bytes of an array of that shape and dtype."""
    return math.prod(spec[0]) * spec[1].itemsize


class Buffer:
    """Memory of one batch; it grows to the largest that it has held."""

    def __init__(self) -> None:
        self.raw = np.empty(0, np.uint8)

    def arrays(self, specs: Sequence[Spec]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, one after the other in the buffer."""
        sizes = [spec_bytes(spec) for spec in specs]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        if self.raw.nbytes < offsets[-1]:
            self.raw = np.empty(0, np.uint8)  # not the old one and the new one at once
            self.raw = np.empty(offsets[-1], np.uint8)
        return [
            self.raw[offset : offset + size].view(dtype).reshape(shape)
            for (shape, dtype), offset, size in zip(specs, offsets, sizes, strict=False)
        ]


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
