import numpy as np
import pytest

from blobmem.data.datum import RecordError
from blobmem.data.resize import resize
from blobmem.data.window_cut import cut_of, cut_out


def test_a_window_alone_fills_the_square():
    cut = cut_of((3, 4, 10, 20), (30, 40), 8, 0, False, False)
    assert cut == (4, 21, 3, 11, 8, 8, 0, 0)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 30, 40), dtype=np.uint8)
    assert np.array_equal(cut_out(pixels, cut, False), resize(pixels[:, 4:21, 3:11], 8, 8))
    assert np.array_equal(cut_out(pixels, cut, True), resize(pixels[:, 4:21, 3:11], 8, 8)[:, :, ::-1])


def test_context_is_so_many_pixels_of_the_result():
    # 40 pixels become 20 of 40 with 10 on each side: the window grows to 80
    cut = cut_of((60, 60, 99, 99), (200, 200), 40, 10, False, False)
    assert cut == (40, 121, 40, 121, 40, 40, 0, 0)


def test_what_lies_outside_of_the_image_stays_empty():
    # grown to columns -20 to 60 of 50 and rows 40 to 120: 20 and 11 of 81 columns are outside
    box = (0, 60, 39, 99)
    cut = cut_of(box, (200, 50), 40, 10, False, False)
    assert cut == (40, 121, 0, 50, 40, 25, 0, 10)
    mirrored = cut_of(box, (200, 50), 40, 10, False, True)
    assert mirrored == cut._replace(along=5)


def test_a_square_takes_the_longer_side():
    # 10 x 30 around (15, 35): 30 x 30
    cut = cut_of((10, 20, 19, 49), (100, 100), 30, 0, True, False)
    assert (cut.top, cut.bottom, cut.left, cut.right) == (20, 51, 0, 31)
    assert (cut.height, cut.width, cut.down, cut.along) == (30, 30, 0, 0)


def test_sizes_and_margins_never_leave_the_square():
    rng = np.random.default_rng(1)
    outside = 0
    for _ in range(3000):
        height, width = rng.integers(1, 60, 2)
        x, y = np.sort(rng.integers(-20, 80, 2)), np.sort(rng.integers(-20, 80, 2))
        size = int(rng.integers(1, 40))
        pad = int(rng.integers(0, (size + 1) // 2))
        box = (int(x[0]), int(y[0]), int(x[1]), int(y[1]))
        try:
            cut = cut_of(box, (height, width), size, pad, bool(rng.integers(2)), bool(rng.integers(2)))
        except RecordError:
            outside += 1
            continue
        assert 0 <= cut.top < cut.bottom <= height and 0 <= cut.left < cut.right <= width
        assert cut.height >= 0 and cut.width >= 0
        if cut.height and cut.width:
            assert cut.down >= 0 and cut.along >= 0
            assert cut.down + cut.height <= size and cut.along + cut.width <= size
    assert 300 < outside < 2700


def test_windows_that_cannot_be_cut():
    with pytest.raises(RecordError, match="wrong order"):
        cut_of((5, 5, 4, 9), (20, 20), 8, 0, False, False)
    with pytest.raises(RecordError, match="not inside its image of 20 x 30"):
        cut_of((5, 5, 30, 9), (20, 30), 8, 0, False, False)
    with pytest.raises(RecordError, match="no pixel in common"):
        cut_of((50, 5, 60, 9), (20, 30), 8, 1, False, False)
