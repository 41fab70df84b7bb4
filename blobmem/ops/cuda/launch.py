"""How ops start kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blobmem.devices.cuda.array import CudaArray

THREADS = 256
_MOST_BLOCKS = 2048  # in a launch whose threads go over their elements in strides: fills any card several times
_RUN, _LONGEST = 16, 64  # elements of a thread of `chunks`: in small arrays, and the most in large ones


class Kernels:
    """The kernels of one source, `blobmem/ops/cuda/source/NAME.cu`, compiled when one is first run."""

    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source

    def run(self, like: CudaArray, name: str, grid: int | tuple[int, ...], block: int, *arguments: Any) -> None:
        """Queue a kernel on the compute stream of `like`'s device, with T the dtype of `like`.

        Arguments are arrays (None for a null pointer), numbers, and tuples of up to 8 integers for Dims, bytes for a
        Table. Nothing is launched for an empty grid.
        """
        blocks = grid if isinstance(grid, tuple) else (grid, 1, 1)
        if 0 not in blocks:
            like.device.kernel(self.source, name, like.dtype)(blocks, block, arguments)

    def over(self, like: CudaArray, name: str, n: int, *arguments: Any, each: int = 4) -> None:
        """`run` with blocks enough for `n` elements, of which a thread takes about `each` (kernels that use FOR)."""
        if n:
            like.device.kernel(self.source, name, like.dtype)(_grid(n, each), THREADS, arguments)

    def map(self, name: str, arrays: Sequence[CudaArray], *numbers: Any) -> None:
        """`over` all elements of arrays of one size, with the arrays, that size, and numbers as arguments."""
        like, size = arrays[0], arrays[0].size
        if size:
            like.device.kernel(self.source, name, like.dtype)(_grid(size, 4), THREADS, (*arrays, size, *numbers))

    def chunks(self, like: CudaArray, name: str, n: int, *arguments: Any) -> None:
        """`run` for kernels whose blocks each take a run of the `n` elements (source/channel_maps.cuh). A thread takes
        _RUN of them, what it has on their way at once, or so many times as many that there are no more blocks than
        `over` has, but no more than _LONGEST."""
        if n:
            often = -(-n // (_MOST_BLOCKS * THREADS * _RUN))
            each = min(_LONGEST, often * _RUN)
            like.device.kernel(self.source, name, like.dtype)((-(-n // (THREADS * each)), 1, 1), THREADS, arguments)


def _grid(n: int, each: int) -> tuple[int, int, int]:
    blocks = -(-n // (THREADS * each))
    return blocks if blocks < _MOST_BLOCKS else _MOST_BLOCKS, 1, 1
