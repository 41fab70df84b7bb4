"""Options that sources of images have in common, and where old files state them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blobmem.data.datum import RecordError, Shape, dims
from blobmem.data.transform import Transformer, random_words
from blobmem.layers.base import Layer
from blobmem.proto import caffe_pb2

_MOVED = ("scale", "mean_file", "crop_size", "mirror")


def transform_param(param: Any, options: Any) -> Any:
    """A layer's transform_param, and what of it stands in the source's own message `options`, as in files before it.

    Where both state a field, transform_param's counts.
    """
    result = caffe_pb2.TransformationParameter()
    for field in _MOVED:
        if options.HasField(field):
            setattr(result, field, getattr(options, field))
    if param.transform_param.mean_value:
        result.ClearField("mean_file")
    result.MergeFrom(param.transform_param)
    return result


def first_position(layer: Layer, rand_skip: int) -> int:
    """How many items the layer skips once: by chance, but fewer than `rand_skip`."""
    if not rand_skip:
        return 0
    words = random_words(layer.context.state.seed, f"{layer.name}/rand_skip", 0, 1)
    return words[0][0] % rand_skip


def stated_item(layer: Layer, transformer: Transformer, stated: Sequence[int]) -> Shape:
    """The shape of the first top's items, from the stated shape of an image. Raises NetError if it makes no sense."""
    what = f"input shape of '{layer.param.top[0]}'"
    shape = tuple(int(length) for length in stated)
    if len(shape) != 3 or min(shape) < 1:
        raise layer.error(what, "channels x height x width, 1 or more each", shape)
    try:
        return transformer.crop_of((shape[0], shape[1], shape[2]))
    except RecordError as error:
        raise layer.error(what, f"one that fits transform_param ({error})", dims(shape)) from None


def place_of(layer: Layer, field: str) -> str:
    """How errors about what a layer's option names begin."""
    net = f"{layer.context.source}: " if layer.context.source else ""
    return f"{net}layer '{layer.name}' ({layer.type}), {field}"
