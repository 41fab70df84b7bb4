"""Between images as people hold them and inputs as nets were trained on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.io.images import resize_image


class Transformer:
    """What each input of a net wants done to an image (H, W, K) before it sees it.

    In this order: resize to the input's height and width, transpose, swap channels, times the raw scale, minus the
    mean, times the input scale; what has not been set is left out.

    Args:
        inputs: shape of each input blob by name, (items, channels, height, width).

    Its methods raise NetError, a ValueError, for a name that is no input.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = inputs
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, np.ndarray] = {}
        self.input_scale: dict[str, float] = {}

    def preprocess(self, in_: str, data: np.ndarray) -> np.ndarray:
        """An image (H, W, K) as the input `in_` takes it, float32 (K, height, width); the image stays as it is.

        Raises NetError for an array of another number of axes.
        """
        shape = self._shape(in_)
        image = np.array(data, dtype=np.float32)
        if image.ndim != len(shape) - 1:
            raise NetError(f"image for '{in_}': expected {len(shape) - 1} axes, got an array of shape {image.shape}")
        if image.shape[:2] != shape[2:]:
            image = resize_image(image, shape[2:])
        if in_ in self.transpose:
            image = image.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            image = image[list(self.channel_swap[in_])]
        if in_ in self.raw_scale:
            image *= self.raw_scale[in_]
        if in_ in self.mean:
            image -= self.mean[in_]
        if in_ in self.input_scale:
            image *= self.input_scale[in_]
        return image

    def deprocess(self, in_: str, data: np.ndarray) -> np.ndarray:
        """What `preprocess` made, or what is in a blob of one item, as an image again; its size stays the input's."""
        shape = self._shape(in_)
        image = np.array(data, dtype=None if np.asarray(data).dtype.kind == "f" else np.float32)
        while image.ndim >= len(shape) and len(image) == 1:
            image = image[0]
        if in_ in self.input_scale:
            image /= self.input_scale[in_]
        if in_ in self.mean:
            image += self.mean[in_]
        if in_ in self.raw_scale:
            image /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            image = image[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            image = image.transpose(np.argsort(self.transpose[in_]))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """The axes of an image in their new order: (2, 0, 1) makes (K, H, W) of (H, W, K)."""
        axes = len(self._shape(in_)) - 1
        if sorted(order) != list(range(axes)):
            raise NetError(f"transpose order of '{in_}': expected the numbers 0 to {axes - 1}, got {order}")
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """The channels, the first axis after transposing, in their new order: (2, 1, 0) makes BGR of RGB."""
        channels = self._shape(in_)[1]
        if len(order) != channels:
            raise NetError(f"channel swap of '{in_}': expected {channels} channels, got {len(order)}")
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """What to multiply with before the mean is subtracted: 255 where the net knows pixels from 0 to 255."""
        self._shape(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: np.ndarray) -> None:
        """What to subtract: a value per channel (K,), or an image (K, H, W), which is resized if need be.

        One channel stands for all; (H, W) is an image of one. Raises NetError if the mean does not fit the input.
        """
        mean = np.asarray(mean)
        channels, *dims = self._shape(in_)[1:]
        if mean.ndim not in (1, 2, 3):
            raise NetError(f"mean of '{in_}': expected an array of 1 to 3 axes, got one of shape {mean.shape}")
        if mean.ndim == 1:
            mean = mean[:, None, None]
            fits = len(mean) == channels
        else:
            mean = mean.reshape(-1, *mean.shape[-2:])
            fits = len(mean) in (1, channels)
        if not fits:
            raise NetError(f"mean of '{in_}': expected {channels} channels, got {len(mean)}")
        if mean.shape[1:] not in ((1, 1), tuple(dims)):
            mean = resize_image(mean.transpose(1, 2, 0), dims).transpose(2, 0, 1)
        self.mean[in_] = mean

    def set_input_scale(self, in_: str, scale: float) -> None:
        """What to multiply with at the end, after the mean is subtracted."""
        self._shape(in_)
        self.input_scale[in_] = scale

    def _shape(self, in_: str) -> tuple[int, ...]:
        """The shape of an input."""
        if in_ not in self.inputs:
            raise NetError(f"'{in_}' is not one of the net's inputs: {', '.join(self.inputs) or 'it has none'}")
        shape = tuple(self.inputs[in_])
        if len(shape) < 2:
            raise NetError(f"input '{in_}': expected a shape of items, channels and more, got {shape}")
        return shape


def image_transformer(name: str, shape: Sequence[int], **settings: Any) -> Transformer:
    """The Transformer of one input for images (H, W, K), with those settings (`mean`, `raw_scale`, ...) that are given.

    Raises NetError for an input that takes no images, or settings that do not fit it.
    """
    if len(shape) != 4:
        raise NetError(f"input '{name}': expected one of (items, channels, height, width), got {tuple(shape)}")
    transformer = Transformer({name: tuple(shape)})
    transformer.set_transpose(name, (2, 0, 1))
    for setting, value in settings.items():
        if value is not None:
            getattr(transformer, f"set_{setting}")(name, value)
    return transformer
