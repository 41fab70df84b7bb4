"""Options that sources of images have in common."""

from __future__ import annotations

from collections.abc import Sequence

from blobmem.data.datum import RecordError, Shape, dims
from blobmem.data.transform import Transformer, random_words
from blobmem.layers.base import Layer


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
