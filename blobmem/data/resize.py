"""Bilinear resizing of 8-bit images, bit for bit as OpenCV's `resize` does it by default (INTER_LINEAR).

Caffe's nets were trained on images resized so. Pillow's filters widen with the reduction and give another, smoother
image; here every pixel is made of at most four, however large the image was.

With n pixels made of m, pixel i lies at x = (i + 0.5) * m / n - 0.5 of the source. Its neighbours floor(x) and
floor(x) + 1 have weights in units of 1/2048, first along rows, then along columns, where products lose their last bits
before they are added. Places and weights are worked out in single precision.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel

_UNIT = 2048  # weight of a whole pixel


def resize(planes: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 values (channels, height, width) of another height and width, 1 or more each; the same array if it fits."""
    if planes.shape[1:] == (height, width):
        return planes
    result = np.empty((len(planes), height, width), dtype=np.uint8)
    rows = _taps(planes.shape[1], height, False)
    columns = _taps(planes.shape[2], width, True)
    _bilinear(np.ascontiguousarray(planes), result, *rows, *columns)
    return result


def _taps(length: int, target: int, rest_at_ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each target pixel its two source pixels, (target, 2), and their weights, (target, 2).

    Beyond the ends both are the end's pixel. OpenCV then gives the whole weight to one of them along rows
    (`rest_at_ends`), but splits it as before along columns, which can differ by the last bit.
    """
    scale = 1.0 / (target / length)
    places = ((np.arange(target) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(places).astype(np.int64)
    share = places - first.astype(np.float32)
    if rest_at_ends:
        share[(first < 0) | (first >= length - 1)] = 0
    one = np.float32(1)
    weights = np.rint(np.stack([one - share, share], axis=1) * np.float32(_UNIT)).astype(np.int32)
    pixels = np.clip(np.stack([first, first + 1], axis=1), 0, length - 1)
    return pixels, weights


@kernel
def _bilinear(source, target, rows, row_weights, columns, column_weights):  # type: ignore[no-untyped-def]
    channels, height, width = target.shape
    for c in range(channels):
        for i in range(height):
            upper, lower = source[c, rows[i, 0]], source[c, rows[i, 1]]
            b0, b1 = row_weights[i, 0], row_weights[i, 1]
            out = target[c, i]
            for j in range(width):
                left, right = columns[j, 0], columns[j, 1]
                a0, a1 = column_weights[j, 0], column_weights[j, 1]
                above = np.int32(upper[left]) * a0 + np.int32(upper[right]) * a1
                below = np.int32(lower[left]) * a0 + np.int32(lower[right]) * a1
                out[j] = (((b0 * (above >> 4)) >> 16) + ((b1 * (below >> 4)) >> 16) + 2) >> 2
