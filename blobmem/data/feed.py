"""Batches of images, which a CUDA device gets as bytes and transforms itself; others get them ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.data.batches import NotBytes
from blobmem.data.datum import Shape
from blobmem.data.prefetch_batch import Batch, LockableBuffer, Spec, places
from blobmem.data.source import PREFETCH, Batched
from blobmem.data.transform import Transformer
from blobmem.devices import Device, Event
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, read


class ImageBatches(Batched):
    """A layer whose tops are images, made by a Transformer of records, and labels.

    A subclass calls `start_images` in its `setup`, and writes `load_images` (and `shapes`, where images differ).

    Attributes:
        transformer: the transformation.
        sends_bytes: the batches now travel as bytes, and the device transforms them.
    """

    input_buffers = ("bytes", "mean")

    transformer: Transformer

    def start_images(
        self,
        batch: int,
        item: Shape,
        record: Shape,
        *,
        holds_bytes: bool = True,
        position: int = 0,
        prefetch: int = PREFETCH,
        varies: bool = False,
    ) -> None:
        """`start`, for items of a shape that are made of records of a shape, whose values are bytes or are not."""
        self.sends_bytes = False
        # of a batch in bytes: bytes, cuts and labels, and where they lie
        self._specs: list[Spec] = []
        self._places: list[int] = []
        self._record, self._holds_bytes = record, holds_bytes
        shapes = [(batch, *item), (batch,)][: len(self.param.top)]
        self.start(batch, shapes, position=position, prefetch=prefetch, varies=varies)

    def load_images(
        self, position: int, seed: int, data: np.ndarray, labels: np.ndarray | None, cuts: np.ndarray | None
    ) -> None:
        """`load`; with `cuts`, bytes instead of items, as `BatchLoader.load` has it, or NotBytes."""
        raise NotImplementedError(f"layer type {self.type} does not make its items")

    def load(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        self.load_images(position, seed, arrays[0], arrays[1] if len(arrays) > 1 else None, None)

    # ---------------------------------------------------------------- as bytes

    def _load_bytes(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        self.load_images(position, seed, arrays[0], arrays[2] if len(arrays) > 2 else None, arrays[1])

    def _byte_shapes(self, position: int, seed: int) -> Sequence[tuple[int, ...]]:
        data, *labels = self.shapes(position, seed)
        return [data, (data[0], 3), *labels]

    def _adapt(self) -> None:
        """Make batches for the device as it is now."""
        wanted = self._holds_bytes and self.context.device.family == "cuda"
        if wanted == self.sends_bytes:
            return
        self.sends_bytes = wanted
        waited = self._batches.waited
        load, shapes = (self._load_bytes, self._byte_shapes) if wanted else (self.load, self.shapes)
        self._batches = self._prefetcher(load, shapes)
        self._batches.waited = waited
        self.internal.clear()
        if wanted:
            self._fit()

    def _fit(self) -> None:
        data, *labels = self.top_shapes
        types = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(self.context.dtype)
        self._specs = list(zip([tuple(data), (data[0], 3), *map(tuple, labels)], types, strict=False))
        self._places = places(self._specs)
        self.internal_blob("bytes", (self._places[-1],), np.uint8)
        mean = self.transformer.mean_shape(self._record)
        if mean is not None:
            self.internal_blob("mean", mean)

    # ---------------------------------------------------------------- the layer

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self._adapt()
        if self.sends_bytes:
            self._fit()

    def prepare(self, top: Sequence[Blob]) -> None:
        self._adapt()
        super().prepare(top)

    def _next_shapes(self) -> Sequence[tuple[int, ...]]:
        shapes = super()._next_shapes()
        return [shapes[0], *shapes[2:]] if self.sends_bytes else shapes

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        self._adapt()
        if not self.sends_bytes:
            yield from super().forward(bottom, top)
            return
        mean = self.internal.get("mean")
        if mean is not None:
            yield call(self._write_mean, overwrite(mean), once=True)
        operands = [
            overwrite(self.internal["bytes"]),
            None if mean is None else read(mean),
            overwrite(top[0]),
            overwrite(top[1]) if len(top) > 1 else None,
        ]
        scale = float(self.transformer.scale)
        yield call("feed_images", *operands, take=self._take_bytes, places=tuple(self._places), scale=scale)

    def _write_mean(self, array: np.ndarray) -> None:
        array[...] = self.transformer.mean()

    def _take_bytes(self, device: Device) -> Any:
        """The next batch, locked, for the op `feed_images`."""
        try:
            batch = self._batches.lend(self.position, self.context.state.seed, self._specs)
        except NotBytes:
            arrays = [np.empty(shape, self.context.dtype) for shape in self.top_shapes]
            self.load(self.position, self.context.state.seed, arrays)
            return _Unpacked(self, arrays)
        assert isinstance(batch.buffer, LockableBuffer)
        batch.buffer.lock(device)
        return _Packed(self, batch, self._places[-1])


class _Packed:
    """A batch of bytes. See blobmem.ops.cuda.feed.Taken."""

    arrays = ()

    def __init__(self, layer: ImageBatches, batch: Batch, nbytes: int) -> None:
        self._layer, self._batch = layer, batch
        self.packed = batch.buffer.raw[:nbytes]

    def sent(self, event: Event) -> None:
        self._layer._batches.take_back(self._batch, event)
        self._layer.position += self._layer.batch


class _Unpacked:
    """A batch that has no bytes, ready for the tops. See blobmem.ops.cuda.feed.Taken."""

    packed = None

    def __init__(self, layer: ImageBatches, arrays: Sequence[np.ndarray]) -> None:
        self._layer, self.arrays = layer, arrays

    def sent(self, event: Event) -> None:
        layer = self._layer
        layer._batches.pass_over(layer.position, layer.context.state.seed, layer._specs)
        layer.position += layer.batch
