"""The window that Convolution, Deconvolution and Im2col slide over the spatial axes, from a ConvolutionParameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blobmem.layers.base import Layer

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Its size, step, zeros around the bottom, and distance between its elements, each with an entry per axis."""

    kernel: Shape
    stride: Shape
    pad: Shape
    dilation: Shape

    @classmethod
    def of(cls, layer: Layer, axes: int) -> Window:
        """The window that the layer's options say, over so many axes. Raises NetError."""
        window = cls(
            _option(layer, ("kernel_size", "kernel_h", "kernel_w"), axes, None),
            _option(layer, ("stride", "stride_h", "stride_w"), axes, 1),
            _option(layer, ("pad", "pad_h", "pad_w"), axes, 0),
            _option(layer, ("dilation", "", ""), axes, 1),
        )
        for name, values in (("kernel_size", window.kernel), ("stride", window.stride), ("dilation", window.dilation)):
            if min(values, default=1) < 1:
                raise layer.error(name, "values of 1 or more", values)
        return window

    @property
    def attributes(self) -> dict[str, Any]:
        """What ops take besides the kernel, which they see in the weights."""
        return {"stride": self.stride, "pad": self.pad, "dilation": self.dilation}

    def extent(self, axis: int) -> int:
        """Points that the dilated kernel spans on a spatial axis."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def places(self, size: int, axis: int) -> int:
        """In how many places the window fits on a spatial axis of that size, padded; below 1 if in none."""
        return (size + 2 * self.pad[axis] - self.extent(axis)) // self.stride[axis] + 1


def _option(layer: Layer, names: tuple[str, str, str], axes: int, default: int | None) -> Shape:
    """An option given once for all axes, once per axis, or (for two axes) as its _h and _w fields."""
    options = layer.param.convolution_param
    name, name_h, name_w = names
    given = list(getattr(options, name))
    if name_h and (options.HasField(name_h) or options.HasField(name_w)):
        if given:
            raise layer.error(name, f"either {name} or {name_h} and {name_w}, not both")
        if axes != 2:
            raise layer.error(name_h, f"{name} with one value for each of the {axes} spatial axes")
        if default is None and not (options.HasField(name_h) and options.HasField(name_w)):
            raise layer.error(name, f"both {name_h} and {name_w}")
        return (getattr(options, name_h), getattr(options, name_w))
    if not given:
        if default is None and axes:
            raise layer.error(name, "a value")
        return (default or 0,) * axes
    if len(given) not in (1, axes):
        raise layer.error(name, f"1 value or {axes}, one for each spatial axis", f"{len(given)}")
    return tuple(given) * axes if len(given) == 1 else tuple(given)
