"""Local response normalisation (Krizhevsky et al. 2012, section 3.3) of arrays (images, channels, height, width)."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.lrn_kernels import across, across_backward, within, within_backward
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_ROW = 256
_CHUNK_ELEMENTS = 1 << 16


def _chunks(x: np.ndarray) -> tuple[int, int, int, int, int]:
    """(items, channels, positions, positions of an item, grain)."""
    images, channels = x.shape[:2]
    positions = x.size // max(1, images * channels)
    chunk = max(16, min(_ROW, _CHUNK_ELEMENTS // max(1, channels)))
    return images * -(-positions // chunk), channels, positions, chunk, 1 + 8192 // max(1, channels * chunk)


@op
def lrn_forward(x: np.ndarray, y: np.ndarray, *, local_size: int, alpha: float, beta: float, k: float) -> None:
    """y = x * scale ** -beta; scale = k + alpha / local_size * the sum of x ** 2 over local_size channels around."""
    items, channels, positions, chunk, grain = _chunks(x)
    parallel_for(across, items, x.reshape(-1), y.reshape(-1), channels, positions, chunk, local_size, float(alpha),
                 float(beta), float(k), grain=grain, scratch_of=(chunk, x.dtype))  # fmt: skip


@op
def lrn_backward(x: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, local_size: int, alpha: float, beta: float,
                 k: float) -> None:  # fmt: skip
    """dx = dy * scale ** -beta - 2 alpha beta / local_size * x * the sum of dy * y / scale over the channels around.

    scale and y are made anew, to the bits that `lrn_forward` had.
    """
    items, channels, positions, chunk, grain = _chunks(x)
    parallel_for(across_backward, items, x.reshape(-1), dy.reshape(-1), dx.reshape(-1), channels, positions, chunk,
                 local_size, float(alpha), float(beta), float(k), grain=grain,
                 scratch_of=((channels + 1) * chunk, x.dtype))  # fmt: skip


@op
def lrn_within_forward(x: np.ndarray, y: np.ndarray, *, local_size: int, alpha: float, beta: float) -> None:
    """y = x * scale ** -beta; scale = 1 + alpha * the mean of x ** 2 over local_size x local_size positions.

    The mean is that of average pooling: over the window clipped to the plane with its padding.
    """
    height, width = x.shape[2:]
    parallel_for(within, x.shape[0] * x.shape[1], x.reshape(-1), y.reshape(-1), height, width, local_size,
                 float(alpha), float(beta), scratch_of=(width, np.float64))  # fmt: skip


@op
def lrn_within_backward(x: np.ndarray, y: np.ndarray, dy: np.ndarray, dx: np.ndarray, *, local_size: int, alpha: float,
                        beta: float) -> None:  # fmt: skip
    """dx = dy * scale ** -beta - 2 alpha beta * x * the sum of dy * y / (scale * window) over the windows around.

    The scale is made anew, to the same bits.
    """
    height, width = x.shape[2:]
    parallel_for(within_backward, x.shape[0] * x.shape[1], x.reshape(-1), y.reshape(-1), dy.reshape(-1),
                 dx.reshape(-1), height, width, local_size, float(alpha), float(beta),
                 scratch_of=(width + 2 * height * width, np.float64))  # fmt: skip
