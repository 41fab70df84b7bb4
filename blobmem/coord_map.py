"""Which coordinates of one blob lie over which of another, for nets described with `net_spec`.

A map (axis, scale, shift) says that from `axis` + 1 on (the axis before the spatial ones), coordinate i of a layer's
input lies over i * scale + shift of its output; scale and shift are numbers or arrays with an entry for each axis, and
the identity is (None, 1, 0). Maps compose along the layers between two tops, and `crop` makes of the result the layer
that aligns them. The names are pycaffe's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.net_spec import Function, Top, layers

PASS_THROUGH_LAYERS = [
    "AbsVal", "BatchNorm", "Bias", "BNLL", "Dropout", "Eltwise", "ELU", "Log", "LRN", "Exp", "MVN", "Power", "ReLU",
    "PReLU", "Scale", "Sigmoid", "Split", "TanH", "Threshold", "Clip", "Swish", "ReLU6",
]  # fmt: skip
"""Types whose outputs lie over their inputs, pixel by pixel."""

_WINDOWS = {
    "Convolution": "convolution_param",
    "ConvolutionDepthwise": "convolution_param",
    "DepthwiseConvolution": "convolution_param",
    "Deconvolution": "convolution_param",
    "Im2col": "convolution_param",
    "Pooling": "pooling_param",
}
_SIDES = {f"{name}_{side}" for name in ("kernel", "stride", "pad") for side in "hw"}

Map = tuple[int | None, Any, Any]


class UndefinedMapException(NetError):
    """A layer has no map between its coordinates."""


class AxisMismatchException(NetError):
    """Two maps begin at different axes."""


class NoMapError(NetError, RuntimeError):
    """Two tops have no common ancestor that maps lead to."""


class CropError(NetError, AssertionError):
    """A top cannot be cropped to another one."""


def coord_map(fn: Function) -> Map:
    """The map of a layer. Raises UndefinedMapException if it has none."""
    if fn.type_name in PASS_THROUGH_LAYERS:
        return None, 1, 0
    if fn.type_name == "Crop":
        axis, offset = crop_params(fn)
        return axis - 1, 1, -offset
    if fn.type_name not in _WINDOWS:
        raise UndefinedMapException(f"{fn.type_name} layers have no map between their coordinates")
    axis, stride, kernel, pad = conv_params(fn)
    if fn.type_name == "Deconvolution":
        return axis, stride, (kernel - 1) / 2 - pad
    return axis, 1 / stride, (pad - (kernel - 1) / 2) / stride


def conv_params(fn: Function) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Axis, stride, kernel size (dilated) and pad of a layer with windows, as arrays of one entry or one per axis.

    Raises CropError where they are given by side (`kernel_h`), NetError where there is no kernel size.
    """
    params = fn.params.get(_WINDOWS.get(fn.type_name, ""), fn.params)
    by_side = sorted(_SIDES & set(params))
    if by_side:
        raise CropError(f"{fn.type_name}, {by_side[0]}: expected kernel_size, stride and pad instead")
    if "kernel_size" not in params:
        raise NetError(f"{fn.type_name}, kernel_size: expected one for a map between coordinates, got none")
    dilation = np.array(params.get("dilation", 1), ndmin=1)
    kernel = (np.array(params["kernel_size"], ndmin=1) - 1) * dilation + 1
    stride, pad = np.array(params.get("stride", 1), ndmin=1), np.array(params.get("pad", 0), ndmin=1)
    return params.get("axis", 1), stride, kernel, pad


def crop_params(fn: Function) -> tuple[int, np.ndarray]:
    """Axis and offsets of a Crop layer, as an array of one entry or one per axis."""
    params = fn.params.get("crop_param", fn.params)
    return params.get("axis", 2), np.array(params.get("offset", 0), ndmin=1)


def compose(base_map: Map, next_map: Map) -> Map:
    """The map that is `next_map` and then `base_map`. Raises AxisMismatchException if they begin at different axes."""
    axis1, scale1, shift1 = base_map
    axis2, scale2, shift2 = next_map
    if axis1 is not None and axis2 is not None and axis1 != axis2:
        raise AxisMismatchException(f"maps from axis {axis1} and from axis {axis2} on cannot be composed")
    return axis2 if axis1 is None else axis1, scale1 * scale2, scale1 * shift2 + shift1


def inverse(coord_map: Map) -> Map:
    """The map from outputs to inputs."""
    axis, scale, shift = coord_map
    return axis, 1 / scale, -shift / scale


def coord_map_from_to(top_from: Top, top_to: Top) -> Map:
    """The map from coordinates of one top to those of another, by way of the tops that both come from.

    Raises NoMapError, a RuntimeError, if no maps connect the two, AxisMismatchException if those that do begin at
    different axes.
    """
    from_maps = dict(_walk(top_from))
    for top, to_map in _walk(top_to):
        if top in from_maps:
            return compose(to_map, inverse(from_maps[top]))
    raise NoMapError("no map between these two tops: are they connected by layers that keep their axes?")


def _walk(end: Top) -> Iterator[tuple[Top, Map]]:
    """A top and those before it, from near to far, each with the map from it to the top."""
    maps: dict[Top, Map] = {end: (None, 1, 0)}
    waiting = [end]
    for top in waiting:
        yield top, maps[top]
        try:
            step = coord_map(top.fn)
        except UndefinedMapException:
            continue
        for bottom in _mapped(top.fn):
            if bottom not in maps:
                maps[bottom] = compose(maps[top], step)
                waiting.append(bottom)


def _mapped(fn: Function) -> Sequence[Top]:
    """The inputs that a layer's map is about: all, but of a Crop only what it crops."""
    return fn.inputs[:1] if fn.type_name == "Crop" else fn.inputs


def crop(top_from: Top, top_to: Top) -> Any:
    """A Crop layer that cuts out of one top what lies over another.

    Raises CropError, an AssertionError, if their scales differ, or the offset is negative or between two pixels; and
    what `coord_map_from_to` raises.
    """
    axis, scale, shift = coord_map_from_to(top_from, top_to)
    if not np.all(scale == 1):
        raise CropError(f"expected tops of one scale to crop, got one of {scale} times the other's")
    if not np.all(shift <= 0):
        raise CropError(f"the first top ends within the second: its offset there would be {-shift}")
    if not np.all(np.round(shift) == shift):
        raise CropError(f"expected an offset of whole pixels to crop at, got {-shift}")
    offset = [int(pixels) for pixels in -np.ravel(shift)]
    first = 2 if axis is None else axis + 1
    return layers.Crop(top_from, top_to, crop_param={"axis": first, "offset": offset})
