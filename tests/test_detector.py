"""Detector: which pixels of which windows reach the net."""

import sys
import types

import numpy as np
import pytest
from PIL import Image

from blobmem import Detector, io, set_mode_cpu
from blobmem.errors import NetError

NET = """
name: "means"
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "flat" type: "Flatten" bottom: "pool" top: "flat" }
"""
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
WINDOWS = [[2, 3, 12, 15], [0, 0, 8, 8], [5, 10, 20, 30]]


@pytest.fixture
def detector(tmp_path):
    set_mode_cpu()
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    return lambda **settings: Detector(str(path), None, **settings)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(path)
    return str(path)


def test_windows_are_cut_out_and_brought_to_the_input(detector, image):
    found = detector(raw_scale=255, mean=np.array([1, 2, 3])).detect_windows(iter([(image, WINDOWS), (image, [])]))
    assert [entry["window"] for entry in found] == WINDOWS
    assert {entry["filename"] for entry in found} == {image}
    for entry, (y0, x0, y1, x1) in zip(found, WINDOWS, strict=True):
        expected = io.resize_image(PIXELS[y0:y1, x0:x1], (8, 8)).mean((0, 1)) - [1, 2, 3]
        np.testing.assert_allclose(entry["prediction"], expected, rtol=1e-4)


def test_no_windows_is_nothing_found(detector, image):
    assert detector().detect_windows([(image, [])]) == []


def test_a_window_that_leaves_the_image_is_cut_off(detector):
    np.testing.assert_array_equal(detector().crop(PIXELS, (-5, 25, 3, 99)), PIXELS[:3, 25:])
    with pytest.raises(NetError, match=r"window \[30, 0, 40, 5\] .* has no part of an image of \(20, 30\)"):
        detector().crop(PIXELS, (30, 0, 40, 5))


def test_context_in_the_middle_of_an_image(detector):
    crop = detector(context_pad=2).crop(PIXELS, np.array([6, 10, 9, 13]))
    # 4 pixels (rounded as R-CNN does) fill 4 of 8: the box is twice as wide around its centre
    np.testing.assert_allclose(crop, io.resize_image(PIXELS[4:12, 8:16], (8, 8)), rtol=1e-5)
    assert crop.shape == (8, 8, 3) and crop.dtype == np.float32


def test_context_beyond_the_image_is_the_mean(detector):
    swap, mean = (2, 1, 0), np.array([10.0, 20, 30])
    one = detector(context_pad=2, mean=mean, channel_swap=swap, raw_scale=255)
    crop = one.crop(PIXELS / 255, np.array([0, 0, 7, 7]))
    # the box goes from -4 to 12: 17 pixels in 8, of which the first 4 are outside
    np.testing.assert_allclose(crop[:2], np.broadcast_to(mean[::-1] / 255, (2, 8, 3)), rtol=1e-6)
    np.testing.assert_allclose(crop[2:, 2:], io.resize_image(PIXELS[:12, :12] / 255, (6, 6)), rtol=1e-5)
    np.testing.assert_allclose(one.transformer.preprocess("data", crop)[:, :2], 0, atol=1e-4)


def test_an_image_as_mean(detector):
    mean = np.arange(192.0).reshape(3, 8, 8)
    one = detector(context_pad=1, mean=mean)
    assert one.crop_dims.tolist() == [8, 8, 3]
    np.testing.assert_array_equal(one.crop_mean, mean.transpose(1, 2, 0))
    one.configure_crop(None)
    assert one.crop(PIXELS, (0, 0, 5, 6)).shape == (5, 6, 3)


def test_context_that_leaves_nothing(detector):
    for pad in (4, -1):
        with pytest.raises(NetError, match="context_pad: expected less than half of the input's 8 pixels"):
            detector(context_pad=pad)


def test_context_needs_a_square_input(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET.replace("dim: 8 dim: 8", "dim: 8 dim: 9"))
    with pytest.raises(NetError, match="context_pad: expected a square input, got 8 x 9"):
        Detector(str(path), None, context_pad=1)


def test_selective_search(detector, image, monkeypatch):
    search = types.ModuleType("selective_search_ijcv_with_python")
    search.get_windows = lambda files, cmd: [WINDOWS] * len(files) if cmd == "selective_search_rcnn" else None
    monkeypatch.setitem(sys.modules, search.__name__, search)
    assert [entry["window"] for entry in detector().detect_selective_search([image])] == WINDOWS


def test_selective_search_that_is_not_installed(detector, image):
    with pytest.raises(ImportError, match="https://github.com/sergeyk/selective_search_ijcv_with_python"):
        detector().detect_selective_search([image])
