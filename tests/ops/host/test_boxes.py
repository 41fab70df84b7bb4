"""Boxes by hand, and against plain loops."""

import numpy as np
import pytest

from blobmem.ops.host import boxes as ops

PRIORS = np.array([[0.1, 0.2, 0.5, 0.4], [0.0, 0.0, 1.0, 1.0]])
VARIANCES = np.array([[0.1, 0.1, 0.2, 0.2], [1.0, 2.0, 3.0, 4.0]])


def test_prior_boxes(dtype, close, garbage):
    y = garbage(2, 1 * 2 * 2 * 4)
    ops.prior_boxes(y, plane=(1, 2), sizes=[(4, 4), (8, 2)], image=(10, 20), step=(10, 8), offset=0.5, clip=False,
                    variance=(0.1, 0.2, 0.3, 0.4))  # fmt: skip
    expected = [[2, 3, 6, 7], [0, 4, 8, 6], [10, 3, 14, 7], [8, 4, 16, 6]]
    close(y[0].reshape(-1, 4), np.array(expected) / [20, 10, 20, 10])
    close(y[1].reshape(-1, 4), np.tile([0.1, 0.2, 0.3, 0.4], (4, 1)))


def test_prior_boxes_clipped(dtype, close, garbage):
    y = garbage(2, 4)
    ops.prior_boxes(y, plane=(1, 1), sizes=[(30, 4)], image=(10, 20), step=(10, 20), offset=0, clip=True,
                    variance=(0.1,))  # fmt: skip
    close(y, np.array([[0, 0, 0.75, 0.2], [0.1] * 4]))


def decoded(prior, offset, factor, code):
    """One box, from the definitions."""
    x0, y0, x1, y1 = prior
    wide, tall = x1 - x0, y1 - y0
    a, b, c, d = np.array(offset) * factor
    if code == "CORNER":
        return [x0 + a, y0 + b, x1 + c, y1 + d]
    if code == "CORNER_SIZE":
        return [x0 + a * wide, y0 + b * tall, x1 + c * wide, y1 + d * tall]
    x, y, w, h = (x0 + x1) / 2 + a * wide, (y0 + y1) / 2 + b * tall, wide * np.exp(c), tall * np.exp(d)
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


@pytest.mark.parametrize("variances", [False, True], ids=["in target", "variances"])
@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
@pytest.mark.parametrize("places", [1, 3])
def test_decode(places, code, variances, dtype, close, garbage):
    offsets = np.random.default_rng(0).normal(size=(2, 2, places, 4)).astype(dtype)
    priors = np.stack([PRIORS.ravel(), VARIANCES.ravel()][: 1 + variances]).astype(dtype)
    expected = np.zeros((2, places, 2, 4))
    for n, p, c in np.ndindex(2, 2, places):
        expected[n, c, p] = decoded(PRIORS[p], offsets[n, p, c], VARIANCES[p] if variances else 1, code)
    boxes = garbage(2, places, 2, 4)
    ops.decode_boxes(offsets, priors, boxes, code=code, variances=variances)
    close(boxes, expected, 4)


@pytest.mark.parametrize("code", ["CENTER_SIZE", "CORNER_SIZE"])
def test_a_prior_without_area(code, dtype):
    priors = np.array([[0, 0, 1, 1, 0.5, 0, 0.5, 1], [1] * 8], dtype)
    offsets, boxes = np.zeros((1, 2, 1, 4), dtype), np.zeros((1, 1, 2, 4), dtype)
    with pytest.raises(ValueError, match=f"prior box 1, .*has no area, which code type {code} divides by"):
        ops.decode_boxes(offsets, priors, boxes, code=code, variances=True)
    ops.decode_boxes(offsets, priors, boxes, code="CORNER", variances=True)
    assert boxes[0, 0, 1].tolist() == [0.5, 0, 0.5, 1]


def iou(a, b, one):
    wide, tall = min(a[2], b[2]) - max(a[0], b[0]) + one, min(a[3], b[3]) - max(a[1], b[1]) + one
    if wide <= 0 or tall <= 0:
        return 0.0
    areas = [(box[2] - box[0] + one) * (box[3] - box[1] + one) for box in (a, b)]
    return wide * tall / (sum(areas) - wide * tall)


def survivors(boxes, scores, least, entering, threshold, eta, one):
    order = [p for p in sorted(range(len(scores)), key=lambda p: (-scores[p], p)) if scores[p] > least]
    kept = []
    for p in order[:entering]:
        if all(iou(boxes[p], boxes[q], one) <= threshold for q in kept):
            kept.append(p)
            if eta < 1 and threshold > 0.5:
                threshold *= eta
    return kept


SUPPRESSION = {
    "plain": {},
    "best": {"entering": 20},
    "confident": {"least": 0.6},
    "strict": {"threshold": 0.0},
    "shrinking": {"threshold": 0.9, "eta": 0.8},
    "pixels": {"pixels": True},
    "background": {"background": 1},
}


@pytest.mark.parametrize("options", SUPPRESSION.values(), ids=SUPPRESSION.keys())
@pytest.mark.parametrize("places", [1, 3])
def test_suppression(places, options, dtype):
    options = {
        "background": -1,
        "least": -np.inf,
        "entering": 70,
        "threshold": 0.3,
        "eta": 1.0,
        "pixels": False,
    } | options
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 8, (2, places, 70, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, 5, corner.shape)], -1).astype(dtype)
    scores = (rng.integers(0, 40, (2, 70, 3)) / 40).astype(dtype)  # some are equal
    kept = np.full((2, 3, 70), 7, np.int32)
    ops.suppress_boxes(boxes, scores, kept, **options)
    for n, c in np.ndindex(2, 3):
        wanted = [options[name] for name in ("least", "entering", "threshold", "eta", "pixels")]
        expected = survivors(boxes[n, c % places].tolist(), scores[n, :, c].tolist(), *wanted)
        if c == options["background"]:
            expected = []
        assert kept[n, c].tolist() == expected + [-1] * (70 - len(expected))
    few = np.full((2, 3, 4), 7, np.int32)
    ops.suppress_boxes(boxes, scores, few, **options)
    np.testing.assert_array_equal(few, kept[:, :, :4])


def test_scores_that_are_not_numbers_stay_out(dtype):
    boxes, scores = np.zeros((1, 1, 3, 4), dtype), np.array([np.nan, 1, -np.inf], dtype).reshape(1, 3, 1)
    boxes[0, 0] = [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    kept = np.zeros((1, 1, 3), np.int32)
    ops.suppress_boxes(boxes, scores, kept, background=-1, least=-np.inf, entering=3, threshold=0.5, eta=1.0,
                       pixels=False)  # fmt: skip
    assert kept.ravel().tolist() == [1, -1, -1]


def test_the_best_of_an_image_and_its_rows(dtype):
    scores = np.array([[0.9, 0.2], [0.5, 0.8], [0.7, 0.5]], dtype).reshape(1, 3, 2)
    boxes = np.arange(24, dtype=dtype).reshape(1, 2, 3, 4)
    kept = np.array([[[0, 2, 1], [1, 2, -1]]], np.int32)
    counts = np.zeros((1, 2), np.int32)
    for most, expected in ((-1, [3, 2]), (0, [0, 0]), (2, [1, 1]), (3, [2, 1]), (4, [3, 1]), (9, [3, 2])):
        ops.best_boxes(scores, kept, counts, most=most)
        assert counts[0].tolist() == expected
    ops.best_boxes(scores, kept, counts, most=3)
    rows = np.full((3, 7), np.nan, dtype)
    ops.detection_rows(boxes, scores, kept, counts, rows)
    expected = [[0, 0, 0.9, 0, 1, 2, 3], [0, 0, 0.7, 8, 9, 10, 11], [0, 1, 0.8, 16, 17, 18, 19]]
    np.testing.assert_array_equal(rows, np.array(expected, dtype))


def test_nothing_found_gives_a_row_for_each_image(dtype):
    scores, boxes, rows = np.ones((3, 2, 1), dtype), np.ones((3, 1, 2, 4), dtype), np.ones((3, 7), dtype)
    ops.detection_rows(boxes, scores, np.full((3, 1, 2), -1, np.int32), np.zeros((3, 1), np.int32), rows)
    assert rows.tolist() == [[n, *[-1] * 6] for n in range(3)]


def test_proposals(dtype, close):
    """One anchor of 5 x 3 pixels at two points 8 pixels apart, of two images."""
    scores = np.zeros((2, 2, 1, 2), dtype)
    scores[:, 1] = [[[0.5, 0.6]], [[0.7, 0.8]]]
    deltas = np.zeros((2, 4, 1, 2), dtype)
    deltas[0, :, 0, 1] = [0.2, 1, np.log(2), 0]  # one to the right, three down, twice as wide
    deltas[1, :, 0, 0] = [-9, 0, 0, 0]  # out of the image
    info = np.array([[20, 14, 1], [20, 14, 2]], dtype)
    boxes, kept = np.zeros((2, 1, 2, 4), dtype), np.zeros((2, 2, 1), dtype)
    ops.propose_boxes(scores, deltas, info, boxes, kept, anchors=[(0, 0, 4, 2)], stride=8, min_size=2)
    # centre (8 + 2.5, 1.5), moved to (11.5, 4.5), 10 x 3
    close(boxes[0, 0], np.array([[0, 0, 5, 3], [6.5, 3, 13, 6]]), 2)
    close(boxes[1, 0], np.array([[0, 0, 0, 3], [8, 0, 13, 3]]), 2)
    np.testing.assert_array_equal(kept.ravel(), np.array([0.5, 0.6, np.nan, 0.8], dtype))


def test_the_order_of_proposals_and_both_scales(dtype, garbage):
    scores = np.arange(2 * 4 * 3 * 2, dtype=dtype).reshape(2, 4, 3, 2)
    boxes, kept = garbage(2, 1, 12, 4), garbage(2, 12, 1)
    info = np.array([[100, 100, 1, 2]] * 2, dtype)
    arrays = scores, np.zeros((2, 8, 3, 2), dtype), info, boxes, kept
    ops.propose_boxes(*arrays, anchors=[(0, 0, 3, 3), (0, 0, 7, 7)], stride=8, min_size=1)
    np.testing.assert_array_equal(kept[:, :, 0], scores[:, 2:].transpose(0, 2, 3, 1).reshape(2, 12))
    assert boxes[0, 0, 5].tolist() == [0, 8, 8, 16]  # row 1, column 1 of 2 is 6 and 7; 5 is row 1, column 0, anchor 1
    ops.propose_boxes(*arrays, anchors=[(0, 0, 3, 3), (0, 0, 7, 7)], stride=8, min_size=3)
    assert np.isnan(kept[0, :, 0]).tolist() == [True, False] * 6  # 5 wide, where 6 are needed


@pytest.mark.parametrize("info", [(0, 5, 1), (5, 5, 0), (np.nan, 5, 1)], ids=["height", "scale", "nan"])
def test_an_image_without_size(info, dtype):
    with pytest.raises(ValueError, match="image 0 has height, width and scale .*numbers above 0"):
        ops.propose_boxes(np.zeros((1, 2, 1, 1), dtype), np.zeros((1, 4, 1, 1), dtype), np.array([info], dtype),
                          np.zeros((1, 1, 1, 4), dtype), np.zeros((1, 1, 1), dtype), anchors=[(0, 0, 3, 3)], stride=8,
                          min_size=1)  # fmt: skip


def test_region_rows(dtype):
    boxes, scores = np.arange(16, dtype=dtype).reshape(2, 1, 2, 4), np.arange(4, dtype=dtype).reshape(2, 2, 1)
    kept = np.array([[[1, -1]], [[0, 1]]], np.int32)
    regions, values = np.full((3, 5), np.nan, dtype), np.full((3, 1), np.nan, dtype)
    ops.region_rows(boxes, scores, kept, regions, values)
    assert regions.tolist() == [[0, 4, 5, 6, 7], [1, 8, 9, 10, 11], [1, 12, 13, 14, 15]]
    assert values.ravel().tolist() == [1, 2, 3]
    regions.fill(np.nan)
    ops.region_rows(boxes, scores, kept, regions, None)
    assert regions[0].tolist() == [0, 4, 5, 6, 7]


def test_threads_and_memory(dtype, same_bits, frugal):
    rng = np.random.default_rng(0)
    offsets = rng.normal(size=(2, 4000, 1, 4)).astype(dtype)
    corner = rng.uniform(0, 0.9, (4000, 2))
    priors = np.stack([np.hstack([corner, corner + 0.1]).ravel(), np.full(16000, 0.1)]).astype(dtype)
    boxes, scores = np.zeros((2, 1, 4000, 4), dtype), rng.uniform(size=(2, 4000, 5)).astype(dtype)
    attributes = {"code": "CENTER_SIZE", "variances": True}
    _, _, boxes = same_bits(ops.decode_boxes, offsets, priors, boxes, **attributes)
    frugal(ops.decode_boxes, offsets, priors, boxes, **attributes)
    attributes = {"background": 0, "least": 0.1, "entering": 400, "threshold": 0.45, "eta": 1.0, "pixels": False}
    kept = np.zeros((2, 5, 400), np.int32)
    _, _, kept = same_bits(ops.suppress_boxes, boxes, scores, kept, **attributes)
    frugal(ops.suppress_boxes, boxes, scores, kept, **attributes)
    counts = np.zeros((2, 5), np.int32)
    _, _, counts = same_bits(ops.best_boxes, scores, kept, counts, most=200)
    assert counts.sum() == 400
    frugal(ops.best_boxes, scores, kept, counts, most=200)
