"""Convolution of each channel by itself, under the two names that it has in files."""

from __future__ import annotations

from collections.abc import Sequence

from blobmem.layers.base import register_layer
from blobmem.layers.convolution import Convolution
from blobmem.memory.blob import Blob


@register_layer
class DepthwiseConvolution(Convolution):
    """A convolution with, unless they are given, as many groups as channels, and as many outputs."""

    type = "DepthwiseConvolution"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.convolution_param
        channels = bottom[0].shape[self.axis_of(bottom[0], options.axis, "axis")]
        for name in ("group", "num_output"):
            if not options.HasField(name):
                setattr(options, name, channels)
        super().setup(bottom, top)


@register_layer
class ConvolutionDepthwise(DepthwiseConvolution):
    """Another name of DepthwiseConvolution."""

    type = "ConvolutionDepthwise"
