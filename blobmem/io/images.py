"""Image files to arrays, and arrays to other sizes and crops: float32, (height, width, channels)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.io import resampling

Dims = Sequence[int] | np.ndarray
"""A height and a width."""

_LUMINANCE = np.array([0.2125, 0.7154, 0.0721])
"""What red, green and blue are worth in grey (Rec. 709)."""

_WHITE = {"I;16": 65535, "I;16L": 65535, "I;16B": 65535, "I;16N": 65535, "I": 2**31 - 1, "F": 1}
"""The largest value in Pillow's modes with more than 8 bits a channel."""


def load_image(filename: Any, color: bool = True) -> np.ndarray:
    """An image file's pixels from 0 to 1: (H, W, 3) in red, green, blue, or without `color` (H, W, 1) in grey.

    Transparency is dropped, and grey becomes three equal channels. `filename` is a path or a file opened in binary
    mode. Raises OSError if it cannot be read or is no image that Pillow knows.
    """
    try:
        with importlib.import_module("PIL.Image").open(filename) as image:
            pixels = _pixels(image)
    except (OSError, MemoryError):
        raise
    # a decoder over broken bytes may raise anything
    except Exception as error:
        raise OSError(f"{filename} cannot be read as an image: {error}") from error
    if not color and pixels.ndim == 3:
        pixels = pixels @ _LUMINANCE
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3 if color else 1, axis=2)
    return pixels.astype(np.float32)


def _pixels(image: Any) -> np.ndarray:
    """(H, W) or (H, W, 3) values from 0 to 1."""
    if image.mode in _WHITE:
        # older versions of Pillow give 16 bits in a PNG file as 32
        white = 65535 if image.mode == "I" and image.format == "PNG" else _WHITE[image.mode]
        return np.asarray(image).astype(np.float64) / white
    grey = image.mode in ("1", "L", "LA", "La")
    return np.asarray(image.convert("L" if grey else "RGB")).astype(np.float64) / 255


def resize_image(im: np.ndarray, new_dims: Dims, interp_order: int = 1) -> np.ndarray:
    """An image (H, W, K) in another height and width, as float32.

    Args:
        new_dims: height and width, 1 or more each.
        interp_order: 0 for the nearest pixel, 1 for linear, 3 for cubic interpolation.

    As in pycaffe, there are two ways. Images of one or three channels are rectangles of pixels, beyond which lies their
    smallest value, so that the outermost pixels of an enlarged image are drawn to it; no value leaves the range that it
    had. In images of any other number of channels, the centres of the corner pixels stay where they are.

    Raises NetError, a ValueError, for another order, an image of another number of axes, or empty ones.
    """
    im = np.asarray(im)
    if interp_order not in resampling.ORDERS:
        raise NetError(f"interp_order: expected one of {resampling.ORDERS}, got {interp_order!r}")
    dims = tuple(int(length) for length in new_dims)
    if im.ndim != 3 or len(dims) != 2 or 0 in im.shape or min(dims) < 1:
        raise NetError(
            f"expected an image of (height, width, channels) and two new dimensions, none of them empty; got an image "
            f"of shape {im.shape} and {dims}"
        )
    if im.shape[2] in (1, 3):
        return _resize_areas(im, dims, interp_order)
    if interp_order == 3:
        im = resampling.spline_coefficients(resampling.spline_coefficients(im, 0), 1)
    for axis, length in enumerate(dims):
        im = resampling.along(im, axis, resampling.cornered(im.shape[axis], length, interp_order))
    return im.astype(np.float32)


def _resize_areas(im: np.ndarray, dims: tuple[int, ...], order: int) -> np.ndarray:
    low, high = float(im.min()), float(im.max())
    rows, columns = (resampling.centred(im.shape[axis], dims[axis], order) for axis in (0, 1))
    result = resampling.along(resampling.along(im, 0, rows), 1, columns)
    covered = np.multiply.outer(rows.weights.sum(0), columns.weights.sum(0))
    result += low * (1 - covered)[:, :, None]
    return result.clip(low, high).astype(np.float32)


def oversample(images: Sequence[np.ndarray] | np.ndarray, crop_dims: Dims) -> np.ndarray:
    """Ten crops of each of N images of one shape (H, W, K): the four corners, the centre, and all of them mirrored.

    Args:
        crop_dims: height and width of the crops.

    Returns float32 (10 N, height, width, K), five crops and then five mirrored ones for each image. Raises NetError, a
    ValueError, if there are no images, they differ in shape, or are smaller than the crops.
    """
    height, width = (int(length) for length in crop_dims)
    shapes = {np.shape(image) for image in images}
    if len(shapes) != 1:
        raise NetError(f"expected images of one shape, got {' and '.join(map(str, sorted(shapes))) or 'none'}")
    (shape,) = shapes
    if len(shape) != 3 or not (1 <= height <= shape[0] and 1 <= width <= shape[1]):
        raise NetError(f"images of shape {shape} have no crops of {height} x {width}")
    down, right = shape[0] - height, shape[1] - width
    corners = [(0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2)]
    crops = np.empty((len(images), 10, height, width, shape[2]), dtype=np.float32)
    for image, ten in zip(images, crops, strict=True):
        for crop, (top, left) in zip(ten, corners, strict=False):
            crop[...] = image[top : top + height, left : left + width]
        ten[5:] = ten[:5, :, ::-1]
    return crops.reshape(-1, *crops.shape[2:])
