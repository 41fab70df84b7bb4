"""Image files and sizes."""

import numpy as np
import pytest
from PIL import Image

from blobmem import io
from blobmem.errors import NetError

RGB = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[51, 102, 204], [255, 255, 255], [0, 0, 0]]], dtype=np.uint8)
GREY = np.array([[0, 51, 255]], dtype=np.uint8)


@pytest.fixture
def saved(tmp_path):
    def save(image, name="x.png"):
        image.save(tmp_path / name)
        return tmp_path / name

    return save


def test_a_colour_image(saved):
    path = saved(Image.fromarray(RGB))
    image = io.load_image(path)
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, RGB / 255, rtol=1e-6)
    grey = io.load_image(str(path), color=False)
    assert grey.shape == (2, 3, 1)
    np.testing.assert_allclose(grey[0, :, 0], [0.2125, 0.7154, 0.0721], rtol=1e-6)


def test_a_grey_image(saved):
    path = saved(Image.fromarray(GREY))
    np.testing.assert_allclose(io.load_image(path, color=False)[0, :, 0], [0, 0.2, 1], rtol=1e-6)
    np.testing.assert_allclose(io.load_image(path), np.repeat(GREY[:, :, None], 3, 2) / 255, rtol=1e-6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK"])
def test_other_modes(saved, mode):
    image = Image.fromarray(RGB).convert(mode)
    expected = np.asarray(image.convert("L" if mode in ("LA", "1") else "RGB")) / 255
    loaded = io.load_image(saved(image, "x.tif" if mode == "CMYK" else "x.png"))
    np.testing.assert_allclose(loaded, np.broadcast_to(np.atleast_3d(expected), (2, 3, 3)), atol=1e-6)


def test_opacity_is_dropped_not_blended(saved):
    pixels = np.dstack([RGB, np.zeros((2, 3), np.uint8)])
    np.testing.assert_allclose(io.load_image(saved(Image.fromarray(pixels))), RGB / 255, rtol=1e-6)


def test_sixteen_bits(saved):
    path = saved(Image.fromarray(np.array([[0, 13107, 65535]], dtype=np.uint16)))
    np.testing.assert_allclose(io.load_image(path, color=False)[0, :, 0], [0, 0.2, 1], rtol=1e-6)


def test_floats_stay_as_they_are(saved):
    path = saved(Image.fromarray(np.array([[-1.5, 0.25]], dtype=np.float32)), "x.tif")
    np.testing.assert_array_equal(io.load_image(path, color=False)[0, :, 0], [-1.5, 0.25])


def test_files_that_are_no_images(tmp_path):
    with pytest.raises(FileNotFoundError):
        io.load_image(tmp_path / "nothing.png")
    (tmp_path / "x.png").write_text("no image")
    with pytest.raises(OSError, match="cannot identify"):
        io.load_image(tmp_path / "x.png")
    with open(tmp_path / "x.png", "rb") as file, pytest.raises(OSError, match="cannot identify"):
        io.load_image(file)


def test_enlarged_pixels_are_drawn_to_the_smallest_at_the_edges():
    image = np.array([[1.0, 5.0]])[:, :, None]
    enlarged = io.resize_image(image, (1, 4))
    assert enlarged.dtype == np.float32
    np.testing.assert_allclose(enlarged[0, :, 0], [1, 2, 4, 4])
    np.testing.assert_allclose(io.resize_image(image.repeat(3, 2), (1, 4))[0], enlarged[0].repeat(3, 1))


def test_cubics_do_not_leave_the_range():
    image = np.array([[0.0, 9, 0, 9, 9, 0]])[:, :, None]
    enlarged = io.resize_image(image, (1, 50), 3)
    assert enlarged.min() == 0 and enlarged.max() == 9
    two = io.resize_image(image.repeat(2, 2), (1, 50), 3)
    assert two.min() < 0 and two.max() > 9  # a spline may


def test_any_number_of_channels():
    image = np.arange(12.0).reshape(3, 2, 2)
    np.testing.assert_allclose(io.resize_image(image, (5, 3))[:, :, 0], [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 10]])  # fmt: skip
    np.testing.assert_allclose(io.resize_image(image, np.array([2, 1]), 3)[:, 0, 1], [1, 9], atol=1e-6)


def test_whole_numbers_are_not_overrun():
    image = np.array([[[-128], [127]]], dtype=np.int8)
    np.testing.assert_allclose(io.resize_image(image, (1, 1))[0, 0], [-0.5])
    np.testing.assert_allclose(io.resize_image(np.full((2, 2, 3), 200, np.uint8), (3, 3)), np.full((3, 3, 3), 200.0))


@pytest.mark.parametrize(
    ("shape", "dims", "order"),
    [((4, 4), (2, 2), 1), ((4, 0, 3), (2, 2), 1), ((4, 4, 3), (0, 2), 1), ((4, 4, 3), (2,), 1), ((4, 4, 3), (2, 2), 2)],
    ids=["axes", "empty", "to-nothing", "one-dim", "order"],
)
def test_what_cannot_be_resized(shape, dims, order):
    with pytest.raises(NetError, match="expected"):
        io.resize_image(np.zeros(shape), dims, order)


def test_ten_crops():
    image = np.arange(20).reshape(4, 5, 1)
    crops = io.oversample([image, image + 100], (2, 3))
    assert crops.shape == (20, 2, 3, 1) and crops.dtype == np.float32
    np.testing.assert_array_equal(crops[:5, 0, 0, 0], [0, 2, 10, 12, 6])
    np.testing.assert_array_equal(crops[5:10], crops[:5, :, ::-1])
    np.testing.assert_array_equal(crops[10:], crops[:10] + 100)


def test_what_has_no_crops():
    with pytest.raises(NetError, match=r"images of shape \(4, 5, 1\) have no crops of 5 x 2"):
        io.oversample([np.zeros((4, 5, 1))], (5, 2))
    with pytest.raises(NetError, match=r"got \(4, 5, 1\) and \(4, 6, 1\)"):
        io.oversample([np.zeros((4, 5, 1)), np.zeros((4, 6, 1))], (2, 2))
    with pytest.raises(NetError, match="got none"):
        io.oversample([], (2, 2))
