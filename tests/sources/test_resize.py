from fractions import Fraction
from math import floor

import numpy as np
import pytest

from blobmem.data.resize import resize


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def taps(length, target, i, along_rows):
    """The two source pixels of pixel i and their weights of 2048, by exact arithmetic up to the last step."""
    place = float(np.float32((i + 0.5) * (1.0 / (target / length)) - 0.5))
    first = floor(place)
    share = np.float32(place - first)
    if along_rows and (first < 0 or first >= length - 1):
        share = np.float32(0)
    weights = [round(Fraction(float(np.float32(1) - share)) * 2048), round(Fraction(float(share)) * 2048)]
    return [min(max(p, 0), length - 1) for p in (first, first + 1)], weights


def by_hand(plane, height, width):
    result = np.empty((height, width), np.uint8)
    for i in range(height):
        rows, b = taps(plane.shape[0], height, i, False)
        for j in range(width):
            columns, a = taps(plane.shape[1], width, j, True)
            sums = [sum(int(plane[r, c]) * w for c, w in zip(columns, a, strict=True)) for r in rows]
            total = sum((w * (s >> 4)) >> 16 for w, s in zip(b, sums, strict=True))
            result[i, j] = (total + 2) >> 2
    return result


SIZES = [
    (7, 9, 5, 4),
    (7, 9, 14, 18),
    (3, 4, 17, 5),
    (20, 31, 3, 2),
    (1, 1, 4, 3),
    (6, 8, 3, 4),
    (5, 1, 2, 6),
    (2, 9, 9, 2),
]


@pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, size)) for size in SIZES])
def test_every_pixel_is_what_the_rule_says(size):
    planes = noise(2, *size[:2])
    made = resize(planes, *size[2:])
    assert made.dtype == np.uint8 and made.shape == (2, *size[2:])
    for plane, result in zip(planes, made, strict=True):
        assert np.array_equal(result, by_hand(plane, *size[2:]))


def test_values_that_opencv_gives():
    assert resize(np.array([[[0, 255]]], np.uint8), 1, 4).tolist() == [[[0, 64, 191, 255]]]
    assert resize(np.array([[[10, 20], [30, 43]]], np.uint8), 1, 1).tolist() == [[[26]]]
    assert resize(np.array([[[0], [100], [200]]], np.uint8), 2, 1).tolist() == [[[25], [175]]]


def test_it_is_close_to_real_interpolation_and_does_not_smooth():
    planes = noise(1, 40, 50, seed=3)
    made = resize(planes, 13, 17)[0].astype(float)
    y, x = ((np.arange(n) + 0.5) * m / n - 0.5 for n, m in ((13, 40), (17, 50)))
    i, j = np.floor(y).astype(int), np.floor(x).astype(int)
    v, u = (y - i)[:, None], (x - j)[None, :]
    p = planes[0].astype(float)
    exact = (1 - v) * ((1 - u) * p[i][:, j] + u * p[i][:, j + 1]) + v * (
        (1 - u) * p[i + 1][:, j] + u * p[i + 1][:, j + 1]
    )
    assert np.abs(made - exact).max() < 1


def test_an_image_of_that_size_is_left_alone_and_flat_ones_stay_flat():
    planes = noise(3, 8, 8)
    assert resize(planes, 8, 8) is planes
    for value in (0, 1, 77, 254, 255):
        assert np.all(resize(np.full((1, 11, 7), value, np.uint8), 23, 16) == value)


def test_views_are_read_as_they_look():
    planes = noise(3, 12, 10)
    view = planes[:, 2:9, ::-1]
    assert np.array_equal(resize(view, 5, 5), resize(view.copy(), 5, 5))
