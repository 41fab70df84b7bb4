"""What transform_param asks for: crop, mirror, mean and scale, from a record's values into its place in the batch.

    out = (values - mean) * scale, cropped and mirrored

Crops are random in training and central in testing; mirroring, where asked for, is by chance in both phases, as in
Caffe. Chance is a function of the seed, the layer's name and the item's position in the stream of records.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np

from blobmem.data.datum import Misfit, Shape, dims
from blobmem.data.images import Color
from blobmem.errors import NetError
from blobmem.proto.arrays import blob_array
from blobmem.proto.caffe_pb2 import BlobProto
from blobmem.proto.text import read_binary

Fail = Callable[..., NetError]
"""Makes the error for (field, what is expected, what there is): `Layer.error`."""

Choice = tuple[int, ...]
"""Four random numbers below 2^64, those of one item."""

Cut = tuple[int, int, int]
"""Where an item was cut out of its record, top and left, and 1 if its rows are to be turned round, else 0."""


def random_words(seed: int, name: str, position: int, count: int) -> list[Choice]:
    """Four random numbers below 2^64 for each of `count` items from `position` on, whatever the batches.

    Philox4x64-10 (Salmon et al. 2011), whose key is a digest of seed and name and whose counter is the position.
    """
    return [tuple(four) for four in random_array(seed, name, position, count).tolist()]


def random_array(seed: int, name: str, position: int, count: int) -> np.ndarray:
    """`random_words` as a uint64 array (count, 4)."""
    return random_stream(seed, name, position).random_raw(4 * count).reshape(count, 4)


def random_stream(seed: int, name: str, low: int, high: int = 0) -> np.random.Philox:
    """The generator of seed and name, from a counter of the two words `low` and `high` on."""
    key = np.frombuffer(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest(), dtype="<u8")
    return np.random.Philox(key=key, counter=np.array([low, high, 0, 0], dtype=np.uint64))


class Transformer:
    """The transformation of one layer.

    Args:
        param: a TransformationParameter.
        train: whether crops are random.
        dtype: of the batch, float32 or float64.
        fail: makes the errors about options.

    Raises NetError for options that contradict each other. The mean file is read when it is first needed.
    """

    def __init__(self, param: Any, train: bool, dtype: Any, fail: Fail) -> None:
        self.dtype = np.dtype(dtype)
        self.crop: int = param.crop_size
        self.mirror: bool = param.mirror
        self.scale = self.dtype.type(param.scale)
        self.random = self.mirror or (train and self.crop > 0)
        self.color: Color = "color" if param.force_color else "gray" if param.force_gray else None
        self.random_crop = train
        self._mean_file: str = param.mean_file
        self._mean_values = np.array(param.mean_value, dtype=self.dtype).reshape(-1, 1, 1)
        self._mean: np.ndarray | None = None
        # not kept as it is: a layer that its own transformer keeps would outlive its net
        self._fail = weakref.WeakMethod(fail) if isinstance(fail, MethodType) else lambda: fail
        if param.force_color and param.force_gray:
            raise fail("force_gray", "only one of force_color and force_gray", "both")
        if self._mean_file and len(self._mean_values):
            raise fail("mean_file", "either a mean_file or mean_value", "both")

    def output_shape(self, shape: Shape) -> Shape:
        """The shape of an item made of a record of that shape. Raises Misfit if it can be made of none such."""
        mean = self.mean_image()
        if mean is not None and mean.shape != shape:
            raise Misfit(f"it is {dims(shape)}, and the mean in {self._mean_file} is {dims(mean.shape)}")
        return self.crop_of(shape)

    def crop_of(self, shape: Shape) -> Shape:
        """`output_shape`, but for the mean file, which may be absent."""
        channels, height, width = shape
        values = len(self._mean_values)
        if values not in (0, 1, channels):
            raise Misfit(f"it has {channels} channels, and mean_value {values} values: give 1 or {channels}")
        if not self.crop:
            return shape
        if min(height, width) < self.crop:
            raise Misfit(f"it is {dims(shape)}, too small for crop_size {self.crop}")
        return (channels, self.crop, self.crop)

    def place(self, values: np.ndarray, out: np.ndarray, choice: Choice = (0, 0, 0, 0)) -> None:
        """Put a record's values (channels, height, width) into `out`, of their `output_shape`; `finish` is yet to come.

        `choice` are the item's random numbers.
        """
        source, mean = values, self._mean
        if self.crop:
            window = self._window(values.shape, choice)
            source = values[window]
            mean = None if mean is None else mean[window]
        if self.mirror and choice[0] & 1:
            source = source[:, :, ::-1]
            mean = None if mean is None else mean[:, :, ::-1]
            if source.dtype == np.uint8:
                # conversion is slow over a reversed axis, so turn round the bytes first
                source = np.ascontiguousarray(source)
        np.copyto(out, source, casting="same_kind")
        if mean is not None:
            np.subtract(out, mean, out=out)

    def finish(self, out: np.ndarray) -> None:
        """Do what is the same for all items to those (items, channels, height, width) that were placed."""
        if len(self._mean_values):
            np.subtract(out, self._mean_values, out=out)
        if self.scale != 1:
            np.multiply(out, self.scale, out=out)

    def cut(self, values: np.ndarray, out: np.ndarray, choice: Choice = (0, 0, 0, 0)) -> Cut:
        """Put into `out` those of a record's bytes that `place` uses, as they are; a device does the rest.

        What is left to do: turn each row round if so said, subtract `mean`, multiply by `scale`.
        """
        window = self._window(values.shape, choice)
        np.copyto(out, values[window])
        return window[1].start, window[2].start, int(self.mirror) & choice[0]

    def mean(self) -> np.ndarray | None:
        """What is subtracted: the mean file's array, or mean_value's as (channels or 1, 1, 1); None for nothing."""
        return self._mean_values if len(self._mean_values) else self.mean_image()

    def mean_shape(self, record: Shape) -> Shape | None:
        """The shape of `mean` for records of a shape, though its file be absent."""
        if self._mean_file:
            return record
        return (len(self._mean_values), 1, 1) if len(self._mean_values) else None

    def _window(self, shape: tuple[int, ...], choice: Choice) -> tuple[slice, slice, slice]:
        if not self.crop:
            return (slice(None), slice(0, shape[1]), slice(0, shape[2]))
        spare = [length - self.crop for length in shape[1:]]
        if self.random_crop:
            top, left = (word % (room + 1) for word, room in zip(choice[1:3], spare, strict=True))
        else:
            top, left = (room // 2 for room in spare)
        return (slice(None), slice(top, top + self.crop), slice(left, left + self.crop))

    def mean_image(self) -> np.ndarray | None:
        """The mean file's array (channels, height, width), or None. Raises NetError if the file is no mean."""
        if self._mean is None and self._mean_file:
            try:
                values = blob_array(read_binary(self._mean_file, BlobProto))
            except NetError as error:
                raise self._error("mean_file", f"an array in a binaryproto file ({error})") from None
            shape: tuple[int, ...] = () if values is None else values.shape
            if len(shape) == 4 and shape[0] == 1:
                shape = shape[1:]
            if values is None or len(shape) != 3:
                raise self._error(
                    "mean_file",
                    "one array of channels x height x width",
                    f"{dims(shape) or 'no values'} in {self._mean_file}",
                )
            self._mean = values.reshape(shape).astype(self.dtype)
        return self._mean

    def _error(self, *parts: str) -> NetError:
        fail = self._fail()
        assert fail is not None, "the layer is there while its transformer is used"
        return fail(*parts)
