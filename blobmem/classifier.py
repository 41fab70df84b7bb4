"""Classifier: a net that takes images as they are, under pycaffe's name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.io import oversample as ten_crops
from blobmem.io import resize_image
from blobmem.io.transformer import image_transformer
from blobmem.layers import TEST
from blobmem.net import Net


class Classifier(Net):
    """A net for classes of images, in the TEST phase.

    Args:
        model_file: the net's prototxt.
        pretrained_file: its caffemodel.
        image_dims: height and width to which images are brought before they are cropped to the net's input; those of
            the input when None.
        mean, input_scale, raw_scale, channel_swap: as in `blobmem.io.Transformer`.

    Attributes:
        transformer: what is done to a crop.
        image_dims, crop_dims: heights and widths of images and of crops.

    Raises what `Net` raises, and NetError if the first input takes no images or the settings do not fit it.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str] | None,
        image_dims: Sequence[int] | None = None,
        mean: np.ndarray | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        name, shape = image_input(self)
        self.transformer = image_transformer(
            name, shape, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.crop_dims = np.array(shape[2:])
        self.image_dims = self.crop_dims if image_dims is None else np.array(image_dims, dtype=int)
        if self.image_dims.shape != (2,) or (self.image_dims < self.crop_dims).any():
            raise NetError(
                f"image_dims: expected a height and a width from that of the input on, {shape[2]} x {shape[3]}, got "
                f"{image_dims}"
            )

    def predict(self, inputs: Sequence[np.ndarray], oversample: bool = True) -> np.ndarray:
        """The net's first output for each of N images (H, W, K), with N along its first axis.

        Args:
            inputs: the images, of any sizes and one number of channels.
            oversample: whether to take the mean over ten crops (corners, centre, and mirrored), as (N, C); the output
                for the centre alone otherwise.

        Raises NetError, a ValueError, for no images, or ones with another number of channels than the input.
        """
        if len(inputs) == 0:
            raise NetError("expected images to classify, got none")
        images = np.stack([resize_image(image, self.image_dims) for image in inputs])
        if not oversample:
            top, left = (self.image_dims - self.crop_dims) // 2
            height, width = self.crop_dims
            return predict_crops(self, images[:, top : top + height, left : left + width])
        predictions = predict_crops(self, ten_crops(images, self.crop_dims))
        mean: np.ndarray = predictions.reshape(len(images), 10, -1).mean(axis=1)
        return mean


def image_input(net: Net) -> tuple[str, tuple[int, ...]]:
    """Name and shape of a net's first input. Raises NetError if it has none."""
    if not net.inputs:
        raise NetError(f"{net.identity} has no input: expected a net for deployment, with an Input layer")
    return net.inputs[0], net.blobs[net.inputs[0]].shape


def predict_crops(net: Any, crops: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """The first output of a net with a `transformer` for N crops (H, W, K), with N along its first axis."""
    name, shape = image_input(net)
    batch = np.empty((len(crops), *shape[1:]), dtype=np.float32)
    for place, crop in zip(batch, crops, strict=True):
        image = net.transformer.preprocess(name, crop)
        if image.shape != place.shape:
            raise NetError(f"input '{name}' takes images of {shape[1]} channels, got one of shape {np.shape(crop)}")
        place[...] = image
    output: np.ndarray = net.forward_all(**{name: batch})[net.outputs[0]]
    return output
