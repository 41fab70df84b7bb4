"""Boxes (xmin, ymin, xmax, ymax) of detectors: those to begin with, decoding, suppression of overlaps, rows of results.

Arrays are as on the host. Priors without area and images without size are found by the device, which raises ValueError
for them when it next waits; boxes made of them mean nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.labels import bad_image, bad_prior
from blobmem.ops.registry import ArraySpec, op

Pair = tuple[float, float]

_KERNELS = Kernels("boxes")
_CODES = {"CORNER": 1, "CENTER_SIZE": 2, "CORNER_SIZE": 3}
_SUPPRESSING = 128  # blocks at most, each with room to sort the boxes of a class


@op(family="cuda")
def prior_boxes(y: CudaArray, *, plane: tuple[int, int], sizes: Sequence[Pair], image: Pair, step: Pair, offset: float,
                clip: bool, variance: Sequence[float]) -> None:  # fmt: skip
    """y[0] = the boxes of each size at each point of a plane, row by row, y[1] = their variances; y (2, boxes * 4).

    The keywords are as on the host. A launch for each size: the op runs once.
    """
    points = plane[0] * plane[1]
    variances = tuple(variance) * (4 // len(variance))
    for k, (wide, tall) in enumerate(sizes):
        _KERNELS.over(y, "prior_boxes", points, y, *plane, len(sizes), k, wide / 2, tall / 2, *image, *step, offset,
                      clip, *variances, each=1)  # fmt: skip


@op(family="cuda")
def decode_boxes(offsets: CudaArray, priors: CudaArray, boxes: CudaArray, *, code: str, variances: bool) -> None:
    """boxes = priors moved by offsets (images, boxes, places, 4), as the code says:

    CORNER: corners + offsets; CORNER_SIZE: corners + offsets * sides; CENTER_SIZE: centre + offsets * sides, and
    sides * exp(offsets). priors (1 or 2, boxes * 4): boxes, then what offsets are multiplied by if `variances`.
    A prior without area is an error, unless the code is CORNER.
    """
    images, count, places, _ = offsets.shape
    faults = priors.device.faults
    factors = None
    if variances:
        factors = priors.address + (priors.shape[0] - 1) * priors.shape[1] * priors.dtype.itemsize
    _KERNELS.over(boxes, "decode", images * count * places, offsets, priors, factors, boxes, images, count, places,
                  _CODES[code], faults, faults.code(("prior", code), functools.partial(bad_prior, code)),
                  each=1)  # fmt: skip


@op(family="cuda")
def propose_boxes(scores: CudaArray, deltas: CudaArray, info: CudaArray, boxes: CudaArray, kept_scores: CudaArray, *,
                  anchors: Sequence[Sequence[float]], stride: int, min_size: float) -> None:  # fmt: skip
    """boxes = the anchors at each point, moved by deltas (centre, logarithm of the size) and clipped to the image.

    Arrays and keywords are as on the host: kept_scores is not a number for a box smaller than min_size times scale. An
    image without size or scale is an error. A launch for each anchor.
    """
    images, _, height, width = scores.shape
    faults = scores.device.faults
    code = faults.code("image without size", bad_image)
    for a, (left, top, right, bottom) in enumerate(anchors):
        _KERNELS.over(scores, "propose", images * height * width, scores, deltas, info, boxes, kept_scores, images,
                      height, width, info.shape[1], len(anchors), a, left, top, right - left + 1, bottom - top + 1,
                      stride, min_size, math.nan, faults, code, each=1)  # fmt: skip


def _sorting(count: int, pairs: int) -> tuple[int, int]:
    """Blocks that suppress, and places that each has for sorting."""
    return min(pairs, _SUPPRESSING), 1 << max(0, count - 1).bit_length()


def _orders(boxes: ArraySpec, scores: ArraySpec, kept: ArraySpec, **attributes: Any) -> int:
    images, count, classes = scores.shape
    blocks, length = _sorting(count, images * classes)
    return 4 * max(1, blocks) * length


@op(family="cuda", workspace=_orders)
def suppress_boxes(boxes: CudaArray, scores: CudaArray, kept: CudaArray, *, background: int, least: float,
                   entering: int, threshold: float, eta: float, pixels: bool, ws: CudaArray) -> None:  # fmt: skip
    """kept = the indices of the boxes of each class that overlap with no better one, best first, then -1.

    Of equal scores the box with the lower index is better. Class by class, those with a score above `least` enter, the
    best `entering` of them; one goes if its intersection over union with one that stays is above `threshold`, which
    shrinks by the factor `eta` after each that stays, while it is above 0.5. The keywords are as on the host.
    """
    images, count, classes = scores.shape
    blocks, length = _sorting(count, images * classes)
    _KERNELS.run(scores, "suppress", blocks, THREADS, boxes, scores, kept, ws, images * classes, count, classes,
                 boxes.shape[1], kept.shape[2], length, background, least, entering, threshold, eta,
                 pixels)  # fmt: skip


@op(family="cuda")
def best_boxes(scores: CudaArray, kept: CudaArray, counts: CudaArray, *, most: int) -> None:
    """counts = how many of each class's kept boxes are among an image's `most` best; all of them if that is negative.

    kept is that of `suppress_boxes`; counts int32 (images, classes).
    """
    images, count, classes = scores.shape
    _KERNELS.run(scores, "best_of", images, THREADS, scores, kept, counts, count, classes, kept.shape[2], most)


@op(family="cuda")
def detection_rows(boxes: CudaArray, scores: CudaArray, kept: CudaArray, counts: CudaArray,
                   rows: CudaArray) -> None:  # fmt: skip
    """rows (the sum of counts, 7) = image, class, score and box, by image, then class, then score.

    If there is none at all: a row for every image, of -1 but for the image.
    """
    images, count, classes = scores.shape
    _KERNELS.run(scores, "write_detections", images * classes, THREADS, boxes, scores, kept, counts, rows,
                 rows.shape[0], count, classes, boxes.shape[1], kept.shape[2])  # fmt: skip


@op(family="cuda")
def region_rows(boxes: CudaArray, scores: CudaArray, kept: CudaArray, regions: CudaArray,
                region_scores: CudaArray | None) -> None:  # fmt: skip
    """regions (the number kept, 5) = image and box, best first; region_scores (None: not wanted) = their scores."""
    _KERNELS.run(scores, "write_regions", kept.shape[0], THREADS, boxes, scores, kept, regions, region_scores,
                 regions.shape[0], scores.shape[1], kept.shape[2])  # fmt: skip
