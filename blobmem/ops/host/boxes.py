"""Boxes (xmin, ymin, xmax, ymax) of detectors: those to begin with, decoding, suppression of overlaps, rows of results.

Of SSD (Liu et al. 2016) and of region proposal networks (Ren et al. 2015). Boxes that have been decoded are (images,
places, boxes, 4), where a place is a class, or one for all classes; scores are (images, boxes, classes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blobmem.ops.host.box_kernels import (
    CENTER_SIZE,
    CORNER,
    CORNER_SIZE,
    best_of,
    decode,
    first_without_area,
    propose,
    suppress,
    write_detections,
    write_regions,
)
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.labels import bad_image, bad_prior
from blobmem.ops.registry import op

Pair = tuple[float, float]

_CODES = {"CORNER": CORNER, "CENTER_SIZE": CENTER_SIZE, "CORNER_SIZE": CORNER_SIZE}


@op
def prior_boxes(y: np.ndarray, *, plane: tuple[int, int], sizes: Sequence[Pair], image: Pair, step: Pair, offset: float,
                clip: bool, variance: Sequence[float]) -> None:  # fmt: skip
    """y[0] = the boxes of each size at each point of a plane, row by row, y[1] = their variances; y (2, boxes * 4).

    Args:
        plane: height and width in points.
        sizes: width and height of the boxes at each point, in pixels.
        image: height and width in pixels, which become 1.
        step: pixels between neighbouring points, (vertically, horizontally); the first lies `offset` steps inside.
        clip: whether boxes end at the image's edge.
        variance: one, or four.
    """
    boxes = y[0].reshape(*plane, len(sizes), 4)
    across, down = ((np.arange(count) + offset) * s for count, s in zip(plane[::-1], step[::-1], strict=True))
    half = np.array(sizes) / 2
    for sign, first in ((-1, 0), (1, 2)):
        boxes[..., first] = (across[:, None] + sign * half[:, 0]) / image[1]
        boxes[..., first + 1] = (down[:, None, None] + sign * half[:, 1]) / image[0]
    if clip:
        np.clip(boxes, 0, 1, out=boxes)
    y[1].reshape(-1, 4)[...] = variance


@op
def decode_boxes(offsets: np.ndarray, priors: np.ndarray, boxes: np.ndarray, *, code: str, variances: bool) -> None:
    """boxes = priors moved by offsets (images, boxes, places, 4), as the code says:

    CORNER: corners + offsets; CORNER_SIZE: corners + offsets * sides; CENTER_SIZE: centre + offsets * sides, and
    sides * exp(offsets). priors (1 or 2, boxes * 4): boxes, then what offsets are multiplied by if `variances`.
    Raises ValueError for a prior without area, unless the code is CORNER.
    """
    images, count, _, _ = offsets.shape
    corners, factors = priors[0].reshape(-1, 4), priors[-1].reshape(-1, 4)
    if code != "CORNER" and (bad := first_without_area(corners)) >= 0:
        raise bad_prior(code, bad, corners[bad].tolist())
    parallel_for(decode, images * count, offsets, corners, factors, variances, _CODES[code], boxes,
                 grain=1 + 1024 // max(1, offsets.shape[2]))  # fmt: skip


@op
def propose_boxes(scores: np.ndarray, deltas: np.ndarray, info: np.ndarray, boxes: np.ndarray, kept_scores: np.ndarray,
                  *, anchors: Sequence[Sequence[float]], stride: int, min_size: float) -> None:  # fmt: skip
    """boxes = the anchors at each point, moved by deltas (centre, logarithm of the size) and clipped to the image.

    Args:
        scores: (images, 2 * anchors, height, width), of background and then of objects.
        deltas: (images, 4 * anchors, height, width).
        info: (images, 3 or more): height and width in pixels, and the scale (of each, if there are four).
        boxes: (images, 1, height * width * anchors, 4).
        kept_scores: (images, height * width * anchors, 1); not a number for a box smaller than min_size times scale.

    Raises ValueError for an image without size or scale.
    """
    images, _, height, width = scores.shape
    used = np.ascontiguousarray(info[:, :4])
    for n in range(images):
        if not (np.isfinite(used[n]).all() and used[n].min() > 0):
            raise bad_image(n, used[n].tolist())
    parallel_for(propose, images * height, scores, deltas, used, np.array(anchors, np.float64), stride, float(min_size),
                 boxes, kept_scores, grain=1 + 1024 // max(1, width * len(anchors)))  # fmt: skip


@op
def suppress_boxes(boxes: np.ndarray, scores: np.ndarray, kept: np.ndarray, *, background: int, least: float,
                   entering: int, threshold: float, eta: float, pixels: bool) -> None:  # fmt: skip
    """kept = the indices of the boxes of each class that overlap with no better one, best first, then -1.

    Of equal scores the box with the lower index is better. Class by class, those with a score above `least` enter, the
    best `entering` of them; one goes if its intersection over union with one that stays is above `threshold`, which
    shrinks by the factor `eta` after each that stays, while it is above 0.5.

    Args:
        kept: int32 (images, classes, the most that stay).
        background: a class that keeps nothing; -1 for none.
        pixels: whether a side is xmax - xmin + 1, as of pixels, or xmax - xmin.
    """
    images, count, classes = scores.shape
    parallel_for(suppress, images * classes, boxes, scores, kept, background, float(least), entering, float(threshold),
                 float(eta), float(pixels), scratch_of=(count, np.int32))  # fmt: skip


@op
def best_boxes(scores: np.ndarray, kept: np.ndarray, counts: np.ndarray, *, most: int) -> None:
    """counts = how many of each class's kept boxes are among an image's `most` best; all of them if that is negative.

    kept is that of `suppress_boxes`; counts int32 (images, classes).
    """
    parallel_for(best_of, len(kept), scores, kept, counts, most)


@op
def detection_rows(boxes: np.ndarray, scores: np.ndarray, kept: np.ndarray, counts: np.ndarray,
                   rows: np.ndarray) -> None:  # fmt: skip
    """rows (the sum of counts, 7) = image, class, score and box, by image, then class, then score.

    If there is none at all: a row for every image, of -1 but for the image.
    """
    if not write_detections(boxes, scores, kept, counts, rows):
        rows.fill(-1)
        rows[:, 0] = np.arange(len(rows))


@op
def region_rows(boxes: np.ndarray, scores: np.ndarray, kept: np.ndarray, regions: np.ndarray,
                region_scores: np.ndarray | None) -> None:  # fmt: skip
    """regions (the number kept, 5) = image and box, best first; region_scores (None: not wanted) = their scores."""
    values = (regions if region_scores is None else region_scores).reshape(-1)
    write_regions(boxes, scores, kept, regions, values, region_scores is not None)
