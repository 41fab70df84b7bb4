"""Compiled: boxes (xmin, ymin, xmax, ymax), decoded, and freed of those that overlap with better ones."""

from __future__ import annotations

import math

import numpy as np

from blobmem.ops.host.compiled import kernel, part

CORNER, CENTER_SIZE, CORNER_SIZE = 1, 2, 3
"""What an offset is added to: corners, centre and logarithm of the size, or corners in units of the size."""


@kernel
def first_without_area(priors):
    """The first of (boxes, 4) whose width or height is not above 0; -1 if there is none."""
    for p in range(priors.shape[0]):
        if not (priors[p, 2] > priors[p, 0] and priors[p, 3] > priors[p, 1]):
            return p
    return -1


@kernel
def decode(start, stop, offsets, priors, variances, with_variances, code, boxes):
    """For [start, stop) of (images, boxes): offsets (images, boxes, places, 4) to boxes (images, places, boxes, 4)."""
    count, places = priors.shape[0], offsets.shape[2]
    v0 = v1 = v2 = v3 = 1.0
    for i in range(start, stop):
        n, p = i // count, i % count
        x0, y0, x1, y1 = priors[p, 0], priors[p, 1], priors[p, 2], priors[p, 3]
        wide, tall = x1 - x0, y1 - y0
        if with_variances:
            v0, v1, v2, v3 = variances[p, 0], variances[p, 1], variances[p, 2], variances[p, 3]
        for c in range(places):
            a, b = v0 * offsets[n, p, c, 0], v1 * offsets[n, p, c, 1]
            d, e = v2 * offsets[n, p, c, 2], v3 * offsets[n, p, c, 3]
            box = boxes[n, c, p]
            if code == CENTER_SIZE:
                x, y = a * wide + (x0 + x1) / 2, b * tall + (y0 + y1) / 2
                w, h = math.exp(d) * wide / 2, math.exp(e) * tall / 2
                box[0], box[1], box[2], box[3] = x - w, y - h, x + w, y + h
            else:
                sx, sy = (1.0, 1.0) if code == CORNER else (wide, tall)
                box[0], box[1], box[2], box[3] = x0 + a * sx, y0 + b * sy, x1 + d * sx, y1 + e * sy


@part
def clipped(value, limit):
    """The value inside [0, limit]; not a number stays what it is."""
    if value < 0:
        return 0.0
    return limit if value > limit else value


@kernel
def propose(start, stop, scores, deltas, info, anchors, stride, least, boxes, kept_scores):
    """Rows [start, stop) of (images, height): anchors moved by deltas and clipped, in order of row, column, anchor.

    A box whose sides are less than `least` of the original image gets a score that is not a number.
    """
    count, height, width = anchors.shape[0], scores.shape[2], scores.shape[3]
    for i in range(start, stop):
        n, r = i // height, i % height
        right, bottom = info[n, 1] - 1.0, info[n, 0] - 1.0
        tall_scale, wide_scale = info[n, 2], info[n, 3 if info.shape[1] > 3 else 2]
        for k in range(width * count):
            c, a = k // count, k % count
            w, h = anchors[a, 2] - anchors[a, 0] + 1, anchors[a, 3] - anchors[a, 1] + 1
            x = c * stride + anchors[a, 0] + 0.5 * w + deltas[n, 4 * a, r, c] * w
            y = r * stride + anchors[a, 1] + 0.5 * h + deltas[n, 4 * a + 1, r, c] * h
            w, h = math.exp(deltas[n, 4 * a + 2, r, c]) * w, math.exp(deltas[n, 4 * a + 3, r, c]) * h
            place = r * width * count + k
            box = boxes[n, 0, place]
            box[0], box[2] = clipped(x - 0.5 * w, right), clipped(x + 0.5 * w, right)
            box[1], box[3] = clipped(y - 0.5 * h, bottom), clipped(y + 0.5 * h, bottom)
            large = box[2] - box[0] + 1 >= least * wide_scale and box[3] - box[1] + 1 >= least * tall_scale
            kept_scores[n, place, 0] = scores[n, count + a, r, c] if large else np.nan


@part
def before(scores, a, b):
    """Whether box a comes before box b: a higher score, or the same and a lower index."""
    return scores[a] > scores[b] or (scores[a] == scores[b] and a < b)


@part
def sink(heap, size, at, scores):
    """Let an element of a heap sink to where none below it comes before it."""
    moved = heap[at]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and before(scores, heap[below + 1], heap[below]):
            below += 1
        if before(scores, moved, heap[below]):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = moved


@part
def overlap(a, b, one):
    """Intersection over union; `one` is added to sides, 1 where coordinates are of pixels, both ends included."""
    wide, tall = min(a[2], b[2]) - max(a[0], b[0]) + one, min(a[3], b[3]) - max(a[1], b[1]) + one
    if not (wide > 0 and tall > 0):
        return 0.0
    shared = np.float64(wide) * tall
    first = (np.float64(a[2]) - a[0] + one) * (np.float64(a[3]) - a[1] + one)
    second = (np.float64(b[2]) - b[0] + one) * (np.float64(b[3]) - b[1] + one)
    return shared / (first + second - shared)


@kernel
def suppress(start, stop, heap, boxes, scores, kept, background, least, entering, threshold, eta, one):
    """Classes [start, stop) of (images * classes): the best boxes that overlap with none before them, best first.

    Those above `least` enter, `entering` at most; kept[n, c] takes as many as it has room for, then -1.
    """
    classes, places, room = scores.shape[2], boxes.shape[1], kept.shape[2]
    for i in range(start, stop):
        n, c = i // classes, i % classes
        chosen = kept[n, c]
        chosen[:] = -1
        if c == background:
            continue
        score, candidates = scores[n, :, c], boxes[n, c if places > 1 else 0]
        size = 0
        for p in range(score.size):
            if score[p] > least:
                heap[size] = p
                size += 1
        for at in range(size // 2 - 1, -1, -1):
            sink(heap, size, at, score)
        found, limit = 0, threshold
        for _ in range(min(size, entering)):
            if found == room:
                break
            best = heap[0]
            size -= 1
            heap[0] = heap[size]
            if size > 0:
                sink(heap, size, 0, score)
            good = True
            for k in range(found):
                if overlap(candidates[best], candidates[chosen[k]], one) > limit:
                    good = False
                    break
            if good:
                chosen[found] = best
                found += 1
                if eta < 1 and limit > 0.5:
                    limit *= eta


@kernel
def best_of(start, stop, scores, kept, counts, most):
    """Images [start, stop): how many of each class's boxes are among the image's `most` best (all, if negative)."""
    classes, room = kept.shape[1], kept.shape[2]
    for n in range(start, stop):
        counts[n, :] = 0
        taken = 0
        while most < 0 or taken < most:
            best = -1
            for c in range(classes):
                k = counts[n, c]
                if k == room or kept[n, c, k] < 0:
                    continue
                if best < 0 or scores[n, kept[n, c, k], c] > scores[n, kept[n, best, counts[n, best]], best]:
                    best = c
            if best < 0:
                break
            counts[n, best] += 1
            taken += 1


@kernel
def write_detections(boxes, scores, kept, counts, rows):
    """Rows [image, class, score, box], by image, class and score; how many they are."""
    places, row = boxes.shape[1], 0
    for n in range(counts.shape[0]):
        for c in range(counts.shape[1]):
            for k in range(counts[n, c]):
                p = kept[n, c, k]
                rows[row, 0], rows[row, 1], rows[row, 2] = n, c, scores[n, p, c]
                for i in range(4):
                    rows[row, 3 + i] = boxes[n, c if places > 1 else 0, p, i]
                row += 1
    return row


@kernel
def write_regions(boxes, scores, kept, regions, region_scores, with_scores):
    """Rows [image, box] in the order in which they were kept, and their scores if wanted."""
    row = 0
    for n in range(kept.shape[0]):
        for k in range(kept.shape[2]):
            p = kept[n, 0, k]
            if p < 0:
                break
            regions[row, 0] = n
            for i in range(4):
                regions[row, 1 + i] = boxes[n, 0, p, i]
            if with_scores:
                region_scores[row] = scores[n, p, 0]
            row += 1
