"""Detector: a net that classifies windows of images, after R-CNN, under pycaffe's name.

Girshick, Donahue, Darrell and Malik, "Rich feature hierarchies for accurate object detection and semantic
segmentation", 2014, https://arxiv.org/abs/1311.2524.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.classifier import image_input, predict_crops
from blobmem.errors import NetError
from blobmem.io import load_image, resize_image
from blobmem.io.transformer import image_transformer
from blobmem.layers import TEST
from blobmem.net import Net

_SEARCH = "selective_search_ijcv_with_python"


class Detector(Net):
    """A net for windows of images, in the TEST phase.

    Args:
        model_file: the net's prototxt.
        pretrained_file: its caffemodel.
        mean, input_scale, raw_scale, channel_swap: as in `blobmem.io.Transformer`.
        context_pad: pixels of the net's input on each side that show what is around a window; None or 0 for none.

    Attributes:
        transformer: what is done to a crop.
        crop_dims: height, width and channels of the net's input.

    Raises what `Net` raises, and NetError if the first input takes no images or the settings do not fit it.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str] | None,
        mean: np.ndarray | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        name, shape = image_input(self)
        self.transformer = image_transformer(
            name, shape, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.configure_crop(context_pad)

    def detect_windows(self, images_windows: Iterable[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        """The net's first output for windows of images.

        Args:
            images_windows: for each image its file and its windows, (ymin, xmin, ymax, xmax) in pixels each.

        Returns for each window a dictionary with `window`, `prediction` and `filename`. Raises OSError for a file that
        is no image, NetError, a ValueError, for a window that has no part of its image.
        """
        found: list[dict[str, Any]] = []
        crops = []
        for filename, windows in images_windows:
            image = load_image(filename)
            for window in windows:
                crops.append(self.crop(image, window))
                found.append({"window": window, "filename": filename})
        if found:
            for entry, prediction in zip(found, predict_crops(self, crops), strict=True):
                entry["prediction"] = prediction
        return found

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """`detect_windows` with the windows that selective search proposes.

        Raises ImportError if its Python interface is not installed.
        """
        try:
            search = importlib.import_module(_SEARCH)
        except ModuleNotFoundError as error:
            if error.name != _SEARCH:
                raise
            raise ImportError(
                "selective search is a program of its own, in MATLAB: put its interface, https://github.com/sergeyk/"
                f"{_SEARCH}, on Python's path, or give windows of your own to detect_windows",
                name=_SEARCH,
            ) from None
        files = [os.path.abspath(name) for name in image_fnames]  # MATLAB runs in a folder of its own
        return self.detect_windows(zip(files, search.get_windows(files, cmd="selective_search_rcnn"), strict=True))

    def crop(self, im: np.ndarray, window: Sequence[float]) -> np.ndarray:
        """The part of an image (H, W, K) in a window (ymin, xmin, ymax, xmax), with context if configured.

        With context it has the size of the net's input, and the mean where the context leaves the image. Raises
        NetError, a ValueError, if the window has no part of the image.
        """
        box = np.asarray(window)
        y0, x0, y1, x1 = box.astype(int)
        inside = im[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)]
        if inside.size == 0:
            raise NetError(f"window {box.tolist()} (ymin, xmin, ymax, xmax) has no part of an image of {im.shape[:2]}")
        return self._crop_with_context(im, box) if self.context_pad else inside

    def _crop_with_context(self, im: np.ndarray, window: np.ndarray) -> np.ndarray:
        """As in R-CNN: what is around the window is as much larger as the input is larger than without its border."""
        size = int(self.crop_dims[1])
        half = (window[2:] - window[:2] + 1) / 2
        centre = window[:2] + half
        half = half * size / (size - 2 * self.context_pad)
        first, last = np.round(centre - half), np.round(centre + half)
        scale = size / (last - first + 1)
        pad = np.round(np.maximum(-first, 0) * scale).astype(int)  # beyond the image's top and left
        limits = np.array(im.shape[:2])
        first, last = np.clip(first, 0, limits).astype(int), np.clip(last, 0, limits).astype(int)
        dims = np.minimum(np.round((last - first + 1) * scale).astype(int), size - pad)
        crop = np.empty(self.crop_dims, dtype=np.float32)
        crop[...] = self.crop_mean
        if (dims > 0).all():
            context = resize_image(im[first[0] : last[0], first[1] : last[1]], dims)
            crop[pad[0] : pad[0] + dims[0], pad[1] : pad[1] + dims[1]] = context
        return crop

    def configure_crop(self, context_pad: int | None) -> None:
        """Set how much context crops have, `context_pad` pixels of the net's input on each side; None or 0 for none.

        Raises NetError if that leaves nothing for the window, or the input is not square.
        """
        name, (_, *shape) = image_input(self)
        self.crop_dims = np.array([*shape[1:], shape[0]])
        self.context_pad = context_pad or 0
        if self.context_pad and shape[1] != shape[2]:
            raise NetError(f"context_pad: expected a square input, got {shape[1]} x {shape[2]}")
        if not 0 <= 2 * self.context_pad < shape[2]:
            raise NetError(f"context_pad: expected less than half of the input's {shape[2]} pixels, got {context_pad}")
        # the mean as an image, so that preprocessing leaves nothing of it
        mean = np.zeros(1)
        if name in self.transformer.mean:
            shown = np.broadcast_to(self.transformer.mean[name], shape)
            mean = shown[np.argsort(self.transformer.channel_swap.get(name, range(shape[0])))].transpose(1, 2, 0)
        self.crop_mean = mean / self.transformer.raw_scale.get(name, 1)
