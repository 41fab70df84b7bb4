"""The ImageData layer: batches of image files that a list names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from blobmem.data.datum import Misfit, RecordError, Shape, dims, unusable
from blobmem.data.feed import ImageBatches
from blobmem.data.image_list import Entry, ImageList, open_image, pixels_of
from blobmem.data.images import Color, CompressedImage
from blobmem.data.options import first_position, place_of, stated_item
from blobmem.data.order import Orders
from blobmem.data.source import Damaged
from blobmem.data.transform import Choice, Transformer, random_words
from blobmem.errors import NetError
from blobmem.layers.base import TRAIN, register_layer
from blobmem.memory.blob import Blob

_T = TypeVar("_T")


@register_layer
class ImageData(ImageBatches):
    """Images (batch, channels, height, width) and, with a second top, labels (batch,), in the list's order or shuffled.

    A batch of 1 takes the size of each image, unless new_height and new_width or a crop give all one size.
    """

    type = "ImageData"
    tops = (1, 2)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.image_data_param
        self.size: tuple[int, int] = (options.new_height, options.new_width)
        if any(self.size) and not all(self.size):
            raise self.error(
                "new_height", "new_height and new_width both, or neither", f"{self.size[0]}, {self.size[1]}"
            )
        self.color: Color = "color" if options.is_color else "gray"
        self.shuffle: bool = options.shuffle
        self.transformer = Transformer(self.param.transform_param, self.phase == TRAIN, self.context.exact, self.error)
        self.damaged = Damaged(place_of(self, "source"))
        self._orders = Orders(self.name)
        self._list: ImageList | None = None
        position = first_position(self, options.rand_skip)
        stated = self.context.input_shapes.get(self.param.top[0])
        if stated is None:
            record = self._record_at(position, self.context.state.seed)
            item = self.transformer.crop_of(record)
        else:
            stated = (stated[0], *self.size) if self.size[0] and len(stated) == 3 else stated
            item = stated_item(self, self.transformer, stated)
            record = stated[0], stated[1], stated[2]
        batch: int = options.batch_size
        same = batch != 1 or stated is not None or bool(self.size[0] or self.transformer.crop)
        prefetch: int = self.param.data_param.prefetch
        self.start_images(batch, item, record, position=position, prefetch=prefetch, varies=not same)

    def load_images(
        self, position: int, seed: int, data: np.ndarray, labels: np.ndarray | None, cuts: np.ndarray | None
    ) -> None:
        transformer = self.transformer
        choices = random_words(seed, self.name, position, len(data)) if transformer.random else []
        for index, out in enumerate(data):
            cut = None if cuts is None else cuts[index]
            label = self._place(position + index, seed, out, cut, choices[index] if choices else (0, 0, 0, 0))
            if labels is not None:
                labels[index] = label

    def shapes(self, position: int, seed: int) -> Sequence[tuple[int, ...]]:
        item = self.transformer.crop_of(self._record_at(position, seed))
        return [(1, *item), (1,)][: len(self.param.top)]

    # ---------------------------------------------------------------- the parts

    def _place(self, position: int, seed: int, out: np.ndarray, cut: np.ndarray | None, choice: Choice) -> int:
        """Fill one item, or with `cut` its bytes; its label."""

        def place(image: CompressedImage, entry: Entry) -> int:
            made = self.transformer.output_shape(self._record_of(image))
            if made != out.shape:
                raise Misfit(
                    f"it makes an item of {dims(made)}, and the batch has {dims(out.shape)}: only images of one size "
                    "fit into a batch of more than 1 (new_height and new_width, or crop_size, make them so)"
                )
            pixels = pixels_of(image, *self.size)
            if cut is not None:
                cut[...] = self.transformer.cut(pixels, out, choice)
            else:
                self.transformer.place(pixels, out, choice)
                self.transformer.finish(out[np.newaxis])
            return entry.label

        return self._first_good(position, seed, place)

    def _record_at(self, position: int, seed: int) -> Shape:
        """The shape of the image at a position, resized if it will be, of which an item can be made."""

        def shape(image: CompressedImage, _: Entry) -> Shape:
            if self.context.skip_damaged:
                # damage beyond the header makes another image take its place
                pixels_of(image)
            record = self._record_of(image)
            self.transformer.output_shape(record)
            return record

        return self._first_good(position, seed, shape)

    def _first_good(self, position: int, seed: int, use: Callable[[CompressedImage, Entry], _T]) -> _T:
        """What `use` gives for the image at `position`; if damage is skipped, for the first good one from there on."""
        images = self._images()
        # with shuffle, all images come in the rest of one epoch and the whole of the next
        for place in range(position, position + (2 * len(images) if self.context.skip_damaged else 1)):
            entry = self._entry(images, place, seed)
            try:
                return use(open_image(entry.path, self.color), entry)
            except RecordError as error:
                what = f"{images.describe(entry)} cannot be used: {error}"
                if not self.context.skip_damaged or isinstance(error, Misfit):
                    raise unusable(place_of(self, "source"), what, error) from None
            self.damaged.skip(entry.line, what)
        raise NetError(f"{place_of(self, 'source')}: none of the {len(images)} images of {images.path} can be used")

    def _entry(self, images: ImageList, position: int, seed: int) -> Entry:
        epoch, index = divmod(position, len(images))
        return images[int(self._orders.order(seed, epoch, len(images))[index]) if self.shuffle else index]

    def _record_of(self, image: CompressedImage) -> Shape:
        """The shape of an image, resized if it will be."""
        channels, height, width = image.shape
        return (channels, *self.size) if self.size[0] else (channels, height, width)

    def _images(self) -> ImageList:
        """The list, read at first use. Raises NetError naming the layer."""
        if self._list is None:
            options = self.param.image_data_param
            if not options.source:
                raise self.error("source", "a list file with lines `path label`", "nothing")
            try:
                self._list = ImageList(options.source, options.root_folder)
            except NetError as error:
                raise NetError(f"{place_of(self, 'source')}: {error}") from None
        return self._list
