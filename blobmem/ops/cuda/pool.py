"""Pooling over planes; arrays, windows and what they give are as on the host.

With `layout="NHWC"` all arrays, masks too, are (images, height, width, channels); the numbers in a mask stay the same.
Both kinds of masks are written by the same kernels, which are told which it is.

A gradient is gathered: each element of dx sums, row by row, over the windows that see it, so a mask has to be that of a
pooling with these windows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.sources import dims
from blobmem.ops.cuda import planes
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.layout import channels_first
from blobmem.ops.registry import op

if TYPE_CHECKING:
    from blobmem.ops.host.random import Draws

Pair = tuple[int, int]
Shape = tuple[int, ...]

_KERNELS = Kernels("pool")
_GRADIENTS = Kernels("pool_gradient")
_LAST = Kernels("pool_last")
_WIDE = 32  # elements of a window that a warp shares
_CELLS = {((2, 2), 1), ((2, 2), 2), ((1, 1), 3)}  # strides and `seen` whose gradients with channels last go by cells
_FEW = 8  # windows in a row that are too few for a thread each: neighbouring threads would read far apart


class Windows(NamedTuple):
    """Windows (height, width) over planes of x, (images * channels), and where they are in y.

    y's planes lie one after another, but those of an image begin `gap` elements further; the first begins at `at`.
    """

    x_plane: Pair
    y_plane: Pair
    planes: int
    kernel: Pair
    stride: Pair
    pad: Pair
    channels: int = 1
    gap: int = 0
    at: int = 0

    def dims(self) -> tuple[bytes, bytes]:
        """What kernels take last."""
        return (
            dims((*self.kernel, *self.stride, *self.pad)),
            dims((*self.x_plane, *self.y_plane, self.channels, self.gap, self.at)),
        )

    def forward(self, x: CudaArray, name: str, *arguments: object) -> None:
        """Queue a kernel over y's elements."""
        planes.run(_KERNELS, x, name, self.planes, self.y_plane[0] * self.y_plane[1], *arguments, *self.dims())

    def by_size(self, x: CudaArray, name: str, *arguments: object) -> None:
        """`forward` with the variant of a kernel that suits the windows."""
        (tall, wide), places = self.kernel, self.y_plane[0] * self.y_plane[1]
        if tall * wide >= _WIDE and self.y_plane[1] < _FEW:
            blocks = -(-self.planes * places * 32 // THREADS)
            _KERNELS.run(x, f"{name}_wide", blocks, THREADS, self.planes, places, *arguments, *self.dims())
        else:
            self.forward(x, f"{name}_{tall if tall == wide and tall in (2, 3) else 'any'}", *arguments)

    def backward(self, dx: CudaArray, name: str, *arguments: object) -> None:
        """Queue a gradient over dx's elements, in the variant for how many windows see one."""
        seen, size = self.seen(), self.x_plane
        if self.stride == (2, 2) and seen <= 2:
            name, size = f"{name}_cells_{seen}", self.cells(2)
        else:
            name = f"{name}_{seen if seen <= 3 else 'any'}"
        planes.run(_GRADIENTS, dx, name, self.planes, size[0] * size[1], *arguments, *self.dims())

    def seen(self) -> int:
        """The most windows along an axis that see an element."""
        return max(-(-size // step) for size, step in zip(self.kernel, self.stride, strict=True))

    def cells(self, step: int) -> Pair:
        """How many cells x's plane has down and across (source/pool.cuh)."""
        (height, width), (top, left) = self.x_plane, self.pad
        return (height - 1 + top) // step - top // step + 1, (width - 1 + left) // step - left // step + 1

    def forward_last(self, itemsize: int) -> _Last:
        """The launch over y's elements, the channels last."""
        tall, wide = self.kernel
        count = self.planes * self.y_plane[0] * self.y_plane[1]
        ending = str(tall) if tall == wide and tall in (2, 3) else "any"
        return _Last(ending, self._blocks_last(itemsize, count), (count, *self.dims()))

    def backward_last(self, itemsize: int) -> _Last:
        """The launch of a gradient over dx's elements, or its cells, the channels last."""
        seen, step = self.seen(), self.stride[0]
        by_cells = (self.stride, seen) in _CELLS
        ending, size = (f"{seen}_{step}", self.cells(step)) if by_cells else ("any", self.x_plane)
        blocks = self._blocks_last(itemsize, self.planes * size[0] * size[1])
        return _Last(ending, blocks, (self.planes // self.channels, *self.dims()))

    def _blocks_last(self, itemsize: int, count: int) -> int:
        pack = 16 // itemsize
        return -(-count // (THREADS * (1 if self.channels % pack else pack)))


class _Last(NamedTuple):
    """A launch with channels last: the ending of the kernel's name, blocks, and what it takes after the arrays."""

    ending: str
    blocks: int
    arguments: tuple[object, ...]


@functools.lru_cache(4096)
def _windows(x: Shape, y: Shape, kernel: Pair, stride: Pair, pad: Pair, layout: str) -> Windows:
    images, channels, height, width = channels_first(x, layout)
    _, _, rows, columns = channels_first(y, layout)
    return Windows((height, width), (rows, columns), images * channels, kernel, stride, pad, channels)


@functools.lru_cache(4096)
def _last(backward: bool, x: Shape, y: Shape, kernel: Pair, stride: Pair, pad: Pair, layout: str,
          itemsize: int) -> _Last:  # fmt: skip
    windows = _windows(x, y, kernel, stride, pad, layout)
    return windows.backward_last(itemsize) if backward else windows.forward_last(itemsize)


def _forward(x: CudaArray, y: CudaArray, name: str, layout: str, arguments: tuple[object, ...],
             *window: Pair) -> None:  # fmt: skip
    if layout == "NCHW":
        _windows(x.shape, y.shape, *window, layout).by_size(x, name, *arguments)
        return
    ending, blocks, rest = _last(False, x.shape, y.shape, *window, layout, x.dtype.itemsize)
    _LAST.run(x, f"{name}_{ending}", blocks, THREADS, *arguments, *rest)


def _backward(dy: CudaArray, dx: CudaArray, name: str, layout: str, arguments: tuple[object, ...],
              *window: Pair) -> None:  # fmt: skip
    if layout == "NCHW":
        _windows(dx.shape, dy.shape, *window, layout).backward(dx, name, *arguments, True)
        return
    ending, blocks, rest = _last(True, dx.shape, dy.shape, *window, layout, dx.dtype.itemsize)
    if dx.size:
        _LAST.run(dx, f"{name}_{ending}", blocks, THREADS, *arguments, *rest)


def with_kind(mask: CudaArray | None) -> tuple[CudaArray | None, bool]:
    """A mask as kernels take it: itself, and whether it is in bytes."""
    return mask, mask is not None and mask.dtype == np.uint8


@op(family="cuda")
def max_pool_forward(x: CudaArray, y: CudaArray, mask: CudaArray | None, *, kernel: Pair, stride: Pair, pad: Pair,
                     layout: str = "NCHW") -> None:  # fmt: skip
    """y = the largest of each window; mask (int32 or uint8, None: not wanted) = its place."""
    _forward(x, y, "largest", layout, (x, y, *with_kind(mask)), kernel, stride, pad)


@op(family="cuda")
def max_pool_backward(dy: CudaArray, mask: CudaArray, dx: CudaArray, *, kernel: Pair, stride: Pair, pad: Pair,
                      layout: str = "NCHW") -> None:  # fmt: skip
    """dx = the sum of dy over the windows whose value came from there; of stochastic pooling too."""
    _backward(dy, dx, "largest_gradient", layout, (dy, *with_kind(mask), dx), kernel, stride, pad)


@op(family="cuda")
def ave_pool_forward(x: CudaArray, y: CudaArray, *, kernel: Pair, stride: Pair, pad: Pair,
                     layout: str = "NCHW") -> None:  # fmt: skip
    """y = the mean of each window."""
    _forward(x, y, "average", layout, (x, y), kernel, stride, pad)


@op(family="cuda")
def ave_pool_backward(dy: CudaArray, dx: CudaArray, *, kernel: Pair, stride: Pair, pad: Pair,
                      layout: str = "NCHW") -> None:  # fmt: skip
    """dx = the sum over windows of dy over their size."""
    _backward(dy, dx, "average_gradient", layout, (dy, dx), kernel, stride, pad)


def stochastic(x: CudaArray, y: CudaArray, mask: CudaArray | None, draws: Draws | None, windows: Windows) -> None:
    """One of each window, the element of y its number among the draws; without draws the value to expect."""
    if draws is None:
        windows.forward(x, "expected", x, y)
    else:
        windows.forward(x, "stochastic", x, y, *with_kind(mask), *map(int, draws.key()))


@op(family="cuda")
def stochastic_pool_forward(x: CudaArray, y: CudaArray, mask: CudaArray | None, *, draws: Draws | None, kernel: Pair,
                            stride: Pair, pad: Pair) -> None:  # fmt: skip
    """y = one of each window, with probability in proportion to its value; the host's choice."""
    stochastic(x, y, mask, draws, _windows(x.shape, y.shape, kernel, stride, pad, "NCHW"))
