"""Labels and other values that ops of every family check: what losses are divided by, and what is said of bad values.

The last two parameters of a message are the place of the bad value and the value; a device that tells of it later
fills them in then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from blobmem.errors import NetError


def ignore_as_number(ignore_label: int | None) -> float:
    """The label to ignore as kernels take it; no label equals not-a-number."""
    return float("nan") if ignore_label is None else float(ignore_label)


def normalizer(normalization: str, outer: int, inner: int, valid: int) -> float:
    """What losses are divided by: all positions, those not ignored, the batch, or nothing; never below 1."""
    counts = {"FULL": outer * inner, "VALID": valid, "BATCH_SIZE": outer, "NONE": 1}
    return max(1.0, float(counts[normalization]))


def bad_label(layer: str, classes: int, item: int, value: float) -> NetError:
    """For a label that is neither a class nor ignored."""
    where = f"layer '{layer}': " if layer else ""
    return NetError(
        f"{where}label {value:g} of item {item} is no class: expected 0 to {classes - 1}; check the data and "
        "num_output, or set ignore_label for items without a class"
    )


def bad_index(layer: str, items: int, place: int, value: float) -> NetError:
    """For an index of an item that there is not."""
    expected = f"a whole number from 0 to {items - 1}" if items else "no index, since there are no items"
    return NetError(f"layer '{layer}': index {value:g} at place {place}: expected {expected}; check the data")


def bad_prior(code: str, box: int, corners: Sequence[float] | float) -> ValueError:
    """For a prior box without area; a device gives one side that is not above 0 in place of the corners."""
    shown = f"side {corners:g}" if isinstance(corners, float) else str(corners)
    return ValueError(f"prior box {box}, {shown}, has no area, which code type {code} divides by")


def bad_image(image: int, given: Sequence[float] | float) -> ValueError:
    """For an image without size; a device gives one of the numbers."""
    shown = f"{given:g} among them" if isinstance(given, float) else str(given)
    return ValueError(f"image {image} has height, width and scale {shown}; they are numbers above 0")


def bad_place(shape: Sequence[int], rows: int, columns: int, at: int, value: float) -> ValueError:
    """For an element `at`, counted through a mask of `shape`, that is neither a place in a plane nor -1."""
    indices = tuple(at // math.prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape))
    return ValueError(
        f"mask value {value:g} at {indices} is no place in a plane of {rows} x {columns}: give the size of what was "
        "pooled"
    )


def bad_region(images: int, region: int, given: Sequence[float] | float) -> ValueError:
    """For a region without image or ends; a device gives one of the numbers."""
    shown = f"has {given:g}" if isinstance(given, float) else f"is {given}"
    return ValueError(f"region {region} {shown}; it is an image, 0 to {images - 1}, and four finite coordinates")
