"""Pooling over a pyramid of levels; arrays and levels are as on the host, the pooling itself is that of `pool`.

A launch for each level: gradients of the levels after the first are added to what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.pool import Pair, Windows, stochastic, with_kind
from blobmem.ops.registry import op

if TYPE_CHECKING:
    from blobmem.ops.host.random import Draws

Levels = tuple[tuple[Pair, Pair, int], ...]


def _windows(x: CudaArray, y: CudaArray, levels: Levels) -> Iterator[Windows]:
    """The windows of each level."""
    images, channels, height, width = x.shape
    at = 0
    for kernel, pad, bins in levels:
        size = channels * bins * bins
        yield Windows((height, width), (bins, bins), images * channels, kernel, kernel, pad, channels,
                      y.shape[1] - size, at)  # fmt: skip
        at += size


@op(family="cuda")
def spp_max_forward(x: CudaArray, y: CudaArray, mask: CudaArray | None, *, levels: Levels) -> None:
    """y = the largest of each window; mask (int32, of y's shape; None: not wanted) = its index in the plane."""
    for windows in _windows(x, y, levels):
        windows.by_size(x, "largest", x, y, *with_kind(mask))


@op(family="cuda")
def spp_max_backward(dy: CudaArray, mask: CudaArray, dx: CudaArray, *, levels: Levels) -> None:
    """dx = the sum of dy over the windows of all levels whose value came from there; of stochastic pooling too."""
    for windows in _windows(dx, dy, levels):
        windows.backward(dx, "largest_gradient", dy, *with_kind(mask), dx, windows.at == 0)


@op(family="cuda")
def spp_ave_forward(x: CudaArray, y: CudaArray, *, levels: Levels) -> None:
    """y = the mean of each window."""
    for windows in _windows(x, y, levels):
        windows.by_size(x, "average", x, y)


@op(family="cuda")
def spp_ave_backward(dy: CudaArray, dx: CudaArray, *, levels: Levels) -> None:
    """dx = the sum over the windows of all levels of dy over their size."""
    for windows in _windows(dx, dy, levels):
        windows.backward(dx, "average_gradient", dy, dx, windows.at == 0)


@op(family="cuda")
def spp_stochastic_forward(x: CudaArray, y: CudaArray, mask: CudaArray | None, *, draws: Draws | None,
                           levels: Levels) -> None:  # fmt: skip
    """y and mask as in `pool.stochastic_pool_forward`."""
    for windows in _windows(x, y, levels):
        stochastic(x, y, mask, draws, windows)
