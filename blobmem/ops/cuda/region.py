"""Max pooling over regions of planes; arrays and what they give are as on the host.

A region of an image that is not there, or without ends, is empty; the device raises ValueError for it when it next
waits.
"""

from __future__ import annotations

import functools

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.labels import bad_region
from blobmem.ops.registry import op

_KERNELS = Kernels("region")


def _fault(x: CudaArray) -> tuple[int, int]:
    """Where kernels tell of what is no region of the images of x, and how they call it."""
    faults = x.device.faults
    return faults.address, faults.code(("region", x.shape[0]), functools.partial(bad_region, x.shape[0]))


@op(family="cuda")
def roi_pool_forward(x: CudaArray, regions: CudaArray, y: CudaArray, argmax: CudaArray | None, *,
                     scale: float) -> None:  # fmt: skip
    """y = the largest of each cell; argmax (int32, None: not wanted) = its index in x's plane, or -1."""
    _KERNELS.over(x, "largest_of_cells", y.size, x, regions, y, argmax, y.size, *x.shape, *y.shape[2:], scale,
                  *_fault(x), each=1)  # fmt: skip


@op(family="cuda")
def roi_pool_backward(dy: CudaArray, regions: CudaArray, argmax: CudaArray, dx: CudaArray) -> None:
    """dx = the sum of dy over the cells whose value came from there."""
    images, channels, height, width = dx.shape
    blocks = images * channels if height * width else 0
    _KERNELS.run(dx, "add_to_largest", blocks, THREADS, dy, regions, argmax, dx, dy.shape[0], dy.shape[2] * dy.shape[3],
                 images, channels, height * width, *_fault(dx))  # fmt: skip
