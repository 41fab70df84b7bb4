"""Max pooling over regions of planes (Girshick 2015, section 2.1).

x is (images, channels, height, width), y (regions, channels, rows, columns). Regions are (count, 5): image, x1, y1, x2,
y2, both ends included, rounded after they have been multiplied by `scale`; one that ends before it begins is one
element wide. Neighbouring cells may overlap by an element. A cell outside the plane gives 0.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.region_kernels import add_to_largest, largest_of_cells
from blobmem.ops.labels import bad_region
from blobmem.ops.registry import op


def _check(regions: np.ndarray, images: int) -> None:
    good = np.isfinite(regions).all(axis=1) & (regions[:, 0] >= 0) & (regions[:, 0] < images)
    if not good.all():
        k = int(np.argmin(good))
        raise bad_region(images, k, regions[k].tolist())


@op
def roi_pool_forward(x: np.ndarray, regions: np.ndarray, y: np.ndarray, argmax: np.ndarray | None, *,
                     scale: float) -> None:  # fmt: skip
    """y = the largest of each cell; argmax (int32, None: not wanted) = its index in x's plane, or -1.

    Of equals it is the first. Raises ValueError for a region of an image that is not there.
    """
    _check(regions, x.shape[0])
    places = np.empty((0, 0, 0, 0), np.int32) if argmax is None else argmax
    cells = math.prod(y.shape[2:])
    parallel_for(largest_of_cells, y.shape[0] * y.shape[1], x, regions, y, places, argmax is not None, float(scale),
                 grain=1 + 2048 // max(1, cells))  # fmt: skip


@op
def roi_pool_backward(dy: np.ndarray, regions: np.ndarray, argmax: np.ndarray, dx: np.ndarray) -> None:
    """dx = the sum of dy over the cells whose value came from there."""
    _check(regions, dx.shape[0])
    cost = math.prod(dy.shape) // max(1, dy.shape[1]) + dx.size // max(1, dx.shape[1])
    parallel_for(add_to_largest, dx.shape[1], dy, regions, argmax, dx, grain=1 + 8192 // max(1, cost))
