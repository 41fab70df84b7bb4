"""The WindowData layer: batches of regions of images, a share of them objects, to train a detector as R-CNN's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blobmem.data.datum import RecordError, dims, unusable
from blobmem.data.image_list import decode, pixels_of, read_image_file
from blobmem.data.images import Color
from blobmem.data.options import place_of
from blobmem.data.source import Batched, Damaged
from blobmem.data.transform import Choice, Transformer, random_words
from blobmem.data.window_cut import Cut, cut_of, cut_out
from blobmem.data.window_file import Window, Windows
from blobmem.errors import NetError
from blobmem.layers.base import EXACT, NET, TRAIN, register_layer
from blobmem.memory.blob import Blob


@register_layer
class WindowData(Batched):
    """Windows (batch, channels, crop_size, crop_size) and their classes (batch,), drawn at random with replacement.

    Each batch has background first, then fg_fraction of it objects, rounded down. crop_size is the size to which a
    window is warped. What a window shows of the outside of its image is 0 after the mean is taken off.
    """

    type = "WindowData"
    tops = (1, 2)
    top_kinds = (NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.window_data_param
        self.transformer = Transformer(self.param.transform_param, self.phase == TRAIN, self.context.exact, self.error)
        batch, self.size = options.batch_size, self.transformer.crop
        if self.size < 1:
            raise self.error("crop_size", "the size of the windows that the net sees, 1 or more", self.size)
        if self.size <= 2 * options.context_pad:
            raise self.error("context_pad", f"less than half of crop_size {self.size}", options.context_pad)
        if options.crop_mode not in ("warp", "square"):
            raise self.error("crop_mode", "'warp' or 'square'", repr(options.crop_mode))
        if not 0 <= options.fg_fraction <= 1:
            raise self.error("fg_fraction", "0 to 1", options.fg_fraction)
        self.objects = int(np.float32(batch) * np.float32(options.fg_fraction))
        self.damaged = Damaged(place_of(self, "source"))
        self._files: dict[str, bytes] = {}
        self._read: Windows | None = None
        stated = self.context.input_shapes.get(self.param.top[0])
        channels = self._windows().channels if stated is None else int(stated[0])
        self._check_mean(channels)
        shapes = [(batch, channels, self.size, self.size), (batch,)][: len(top)]
        self.start(batch, shapes, prefetch=self.param.data_param.prefetch)

    def load(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        data = arrays[0]
        for index, choice in enumerate(random_words(seed, self.name, position, len(data))):
            is_object = (position + index) % self.batch >= self.batch - self.objects
            label = self._place(is_object, choice, data[index])
            if len(arrays) > 1:
                arrays[1][index] = label

    # ---------------------------------------------------------------- the parts

    def _check_mean(self, channels: int) -> None:
        try:
            self.transformer.crop_of((channels, self.size, self.size))
        except RecordError as error:
            raise self.error("mean_value", f"one that fits {channels} channels", error) from None

    def _place(self, is_object: bool, choice: Choice, out: np.ndarray) -> int:
        """Fill one item with a window that `choice` draws, or with the first good one after it; its class."""
        windows = self._windows()
        count = len(windows.foreground if is_object else windows.background)
        for step in range(count if self.context.skip_damaged else 1):
            window = windows.window(is_object, (choice[1] + step) % count)
            try:
                self._fill(windows.images[window.image], window, bool(choice[0] & 1), out)
                return window.label
            except RecordError as error:
                what = f"{windows.describe(window)} cannot be used: {error}"
                if not self.context.skip_damaged:
                    raise unusable(place_of(self, "source"), what, error) from None
            self.damaged.skip(window.line, what)
        kind = "objects" if is_object else "background"
        raise NetError(f"{place_of(self, 'source')}: no window of {kind} in {windows.path} can be used")

    def _fill(self, path: str, window: Window, chance: bool, out: np.ndarray) -> None:
        options = self.param.window_data_param
        mirrored = chance and self.transformer.mirror
        color: Color = "color" if len(out) == 3 else "gray"
        pixels = pixels_of(decode(self._bytes(path), color))
        square = options.crop_mode == "square"
        cut = cut_of(window.box, pixels.shape[1:], self.size, options.context_pad, square, mirrored)
        out[...] = 0
        if cut.height and cut.width:
            place = (slice(cut.down, cut.down + cut.height), slice(cut.along, cut.along + cut.width))
            region = out[:, *place]
            region[...] = cut_out(pixels, cut, mirrored)
            self._take_off_mean(region, cut)

    def _take_off_mean(self, region: np.ndarray, cut: Cut) -> None:
        """(values - mean) * scale, with the part of the mean image that lies behind the region."""
        mean = self.transformer.mean_image()
        if mean is not None:
            # by its width along both axes, as Caffe
            spare = (mean.shape[2] - self.size) // 2
            top, left = spare + cut.down, spare + cut.along
            part = mean[:, top : top + cut.height, left : left + cut.width]
            if len(mean) != len(region) or spare < 0 or part.shape != region.shape:
                raise self.error(
                    "mean_file", f"a mean of {len(region)} x {self.size} x {self.size} or larger", dims(mean.shape)
                )
            np.subtract(region, part, out=region)
        self.transformer.finish(region[np.newaxis])

    def _bytes(self, path: str) -> bytes:
        """An image's file, from memory if they are kept there."""
        if not self.param.window_data_param.cache_images:
            return read_image_file(path)
        data = self._files.get(path)
        if data is None:
            data = self._files[path] = read_image_file(path)
        return data

    def _windows(self) -> Windows:
        """The window file, read at first use. Raises NetError naming the layer."""
        if self._read is None:
            options = self.param.window_data_param
            if not options.source:
                raise self.error("source", "a window file", "nothing")
            try:
                read = Windows(options.source, options.root_folder, options.fg_threshold, options.bg_threshold)
            except NetError as error:
                raise NetError(f"{place_of(self, 'source')}: {error}") from None
            self._check_kinds(read)
            self._read = read
        return self._read

    def _check_kinds(self, windows: Windows) -> None:
        """Raise NetError if batches need windows of a kind that is not there."""
        options = self.param.window_data_param
        if self.objects and not len(windows.foreground):
            raise self.error(
                "fg_threshold", f"objects in {windows.path}", f"no overlap of {options.fg_threshold} or more"
            )
        if self.objects < options.batch_size and not len(windows.background):
            raise self.error(
                "bg_threshold", f"background in {windows.path}", f"no overlap below {options.bg_threshold}"
            )
