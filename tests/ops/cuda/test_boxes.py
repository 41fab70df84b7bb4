"""Boxes against the host's: the same indices in the same order, and the same rows."""

import numpy as np
import pytest

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


@DTYPES
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize("variance", [(0.1,), (0.1, 0.2, 0.3, 0.4)], ids=["one", "four"])
def test_prior_boxes(variance, clip, dtype, cuda):
    sizes = [(30, 30), (42.5, 42.5), (43, 21)]
    y = np.full((2, 3 * 5 * len(sizes) * 4), np.nan, dtype)
    cuda.compare("prior_boxes", y, plane=(3, 5), sizes=sizes, image=(100, 150), step=(33.3, 30), offset=0.5, clip=clip,
                 variance=variance)  # fmt: skip


def decoding(rng, images, count, places, dtype):
    corner = rng.uniform(0, 0.8, (count, 2))
    priors = np.stack([np.hstack([corner, corner + rng.uniform(0.05, 0.2, (count, 2))]), rng.uniform(0, 1, (count, 4))])
    offsets = rng.normal(size=(images, count, places, 4))
    return offsets.astype(dtype), priors.reshape(2, -1).astype(dtype)


@DTYPES
@pytest.mark.parametrize("variances", [False, True], ids=["in target", "variances"])
@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
@pytest.mark.parametrize("images, count, places", [(2, 37, 1), (2, 5, 3), (0, 5, 1)])
def test_decode(images, count, places, code, variances, dtype, cuda, rng):
    offsets, priors = decoding(rng, images, count, places, dtype)
    boxes = np.full((images, places, count, 4), np.nan, dtype)
    for given in (priors, priors[: 2 if variances else 1]):
        cuda.compare("decode_boxes", offsets, given, boxes, code=code, variances=variances)


@DTYPES
def test_a_prior_without_area(dtype, cuda, rng):
    offsets, priors = decoding(rng, 2, 4, 1, dtype)
    boxes = np.zeros((2, 1, 4, 4), dtype)
    priors[0, 10] = priors[0, 8]
    for code in ("CENTER_SIZE", "CORNER_SIZE"):
        with pytest.raises(ValueError, match=f"prior box 2, side 0, has no area, which code type {code} divides by"):
            cuda.run("decode_boxes", offsets, priors, boxes, code=code, variances=True)
    cuda.compare("decode_boxes", offsets, priors, boxes, code="CORNER", variances=True)


ANCHORS = [(-8, -8, 23, 23), (-24.5, -8, 40, 23), (0, 0, 5, 3)]


@DTYPES
@pytest.mark.parametrize("numbers", [3, 4, 6])
@pytest.mark.parametrize("least", [4, 16])
def test_proposals(least, numbers, dtype, cuda, rng):
    images, height, width, anchors = 2, 3, 5, len(ANCHORS)
    scores = rng.uniform(size=(images, 2 * anchors, height, width)).astype(dtype)
    deltas = rng.normal(size=(images, 4 * anchors, height, width)).astype(dtype) * 0.5
    info = np.array([[50, 80, 1, 1.5, 0, -1], [48, 60, 1.25, 1, 0, 0]], dtype)[:, :numbers].copy()
    boxes = np.full((images, 1, height * width * anchors, 4), np.nan, dtype)
    kept = np.full((images, height * width * anchors, 1), 7, dtype)
    cuda.compare("propose_boxes", scores, deltas, info, boxes, kept, anchors=ANCHORS, stride=16, min_size=least)


@pytest.mark.parametrize("info, shown", [((0, 5, 1), "0"), ((5, 5, -2), "-2"), ((np.nan, 5, 1), "nan"),
                                         ((5, np.inf, 1), "inf")])  # fmt: skip
def test_an_image_without_size(info, shown, cuda):
    arrays = [np.zeros(shape, np.float32) for shape in ((1, 2, 1, 1), (1, 4, 1, 1), (1, 1, 1, 4), (1, 1, 1))]
    with pytest.raises(ValueError, match=f"image 0 has height, width and scale {shown} among them; they are numbers"):
        cuda.run("propose_boxes", *arrays[:2], np.array([info], np.float32), *arrays[2:], anchors=[(0, 0, 3, 3)],
                 stride=8, min_size=1)  # fmt: skip


SUPPRESSION = {
    "plain": {},
    "best": {"entering": 20},
    "confident": {"least": 0.6},
    "strict": {"threshold": 0.0},
    "shrinking": {"threshold": 0.9, "eta": 0.8},
    "pixels": {"pixels": True},
    "background": {"background": 1},
    "none": {"least": 2.0},
}


def boxes_and_scores(rng, images, count, classes, places, dtype):
    corner = rng.uniform(0, 8, (images, places, count, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, 5, corner.shape)], -1).astype(dtype)
    scores = (rng.integers(0, 40, (images, count, classes)) / 40).astype(dtype)  # some are equal
    scores[:, ::9] = np.nan
    return boxes, scores


@DTYPES
@pytest.mark.parametrize("options", SUPPRESSION.values(), ids=SUPPRESSION.keys())
@pytest.mark.parametrize("places", [1, 3])
def test_suppression(places, options, dtype, cuda, rng):
    boxes, scores = boxes_and_scores(rng, 2, 70, 3, places, dtype)
    defaults = {"background": -1, "least": -np.inf, "entering": 70, "threshold": 0.3, "eta": 1.0, "pixels": False}
    for room in (70, 4):
        cuda.compare("suppress_boxes", boxes, scores, np.full((2, 3, room), 7, np.int32), **defaults | options)


def test_suppression_of_many(cuda, rng):
    """More classes than blocks, more boxes than threads."""
    attributes = {"background": 0, "least": 0.1, "entering": 300, "threshold": 0.2, "eta": 1.0, "pixels": False}
    for images, count, classes in ((10, 6, 14), (1, 700, 2), (0, 5, 2), (2, 0, 2)):
        boxes, scores = boxes_and_scores(rng, images, count, classes, 1, np.float32)
        kept = np.full((images, classes, 300), 7, np.int32)
        cuda.compare("suppress_boxes", boxes, scores, kept, **attributes)


@DTYPES
@pytest.mark.parametrize("classes, count", [(3, 20), (280, 2)])
def test_the_best_of_an_image_and_its_rows(classes, count, dtype, cuda, rng):
    boxes, scores = boxes_and_scores(rng, 2, count, classes, classes, dtype)
    kept = np.full((2, classes, count), 7, np.int32)
    attributes = {"background": 0, "least": 0.1, "entering": count, "threshold": 0.2, "eta": 1.0, "pixels": False}
    kept = cuda.compare("suppress_boxes", boxes, scores, kept, **attributes)[2]
    for most in (-1, 0, 1, 7, 10**6):
        counts = cuda.compare("best_boxes", scores, kept, np.full((2, classes), 7, np.int32), most=most)[2]
        rows = np.full((counts.sum() or 2, 7), np.nan, dtype)
        cuda.compare("detection_rows", boxes, scores, kept, counts, rows, atol=0)


@DTYPES
def test_nothing_found_gives_a_row_for_each_image(dtype, cuda):
    scores, boxes, rows = np.ones((3, 2, 1), dtype), np.ones((3, 1, 2, 4), dtype), np.full((3, 7), 9, dtype)
    kept, counts = np.full((3, 1, 2), -1, np.int32), np.zeros((3, 1), np.int32)
    got = cuda.compare("detection_rows", boxes, scores, kept, counts, rows, atol=0)[4]
    assert got.tolist() == [[n, *[-1] * 6] for n in range(3)]


@DTYPES
def test_region_rows(dtype, cuda, rng):
    boxes, scores = boxes_and_scores(rng, 3, 400, 1, 1, dtype)
    scores[1] = np.nan  # nothing of the second image is kept
    attributes = {"background": -1, "least": -np.inf, "entering": 400, "threshold": 0.1, "eta": 1.0, "pixels": True}
    kept = cuda.compare("suppress_boxes", boxes, scores, np.zeros((3, 1, 300), np.int32), **attributes)[2]
    found = np.count_nonzero(kept >= 0)
    for values in (None, np.full((found, 1), np.nan, dtype)):
        cuda.compare("region_rows", boxes, scores, kept, np.full((found, 5), np.nan, dtype), values, atol=0)
