"""Batches of images, which a CUDA device gets as bytes and transforms itself; others get them ready.

Small batches are made and sent in units of several, so that what each unit costs is shared by the steps that use it. A
device has room for two: the next one is sent while the first is used, which then waits for no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.data.batches import NotBytes
from blobmem.data.datum import Shape
from blobmem.data.feed_unit import Taken, Unit
from blobmem.data.prefetch_batch import Batch, LockableBuffer, Spec, places
from blobmem.data.source import PREFETCH, Batched
from blobmem.data.transform import Transformer
from blobmem.devices import Device, Event
from blobmem.layers.base import EXACT, NET
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, read, write

_UNIT_BYTES = 2**21
_MOST_TOGETHER = 32  # more batches in a unit save nothing worth having
_UNITS = 2  # on a device, where they have several batches


class ImageBatches(Batched):
    """A layer whose tops are images, made by a Transformer of records, and labels.

    A subclass calls `start_images` in its `setup`, and writes `load_images` (and `shapes`, where images differ).

    Attributes:
        transformer: the transformation.
        sends_bytes: the batches now travel as bytes, and the device transforms them.
    """

    input_buffers = ("bytes", "mean")
    top_kinds = (NET, EXACT)

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
        self._together = 1  # batches of a unit
        # of a unit: bytes, cuts and labels, and where they lie
        self._specs: list[Spec] = []
        self._places: list[int] = []
        self._unit: Unit | None = None  # on the device, with batches that may be asked for
        self._following: Unit | None = None  # there, too, in the other place: what is likely to come next
        self._broken: tuple[int, int] | None = None  # position and seed of a unit that cannot be made as a whole
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
        self.internal.clear()
        self._unit = self._following = self._broken = None
        if wanted:
            self._together = self._most_together()
            self._fit()
        load, shapes = (self._load_bytes, self._byte_shapes) if wanted else (self.load, self.shapes)
        waited = self._batches.waited
        self._batches = self._prefetcher(load, shapes, self._together if wanted else 1)
        self._batches.waited = waited

    def _most_together(self) -> int:
        """How many batches make a unit: a function of the options and shapes alone."""
        if self.varies or not self._prefetch:
            return 1
        return max(1, min(_MOST_TOGETHER, _UNIT_BYTES // places(self._specs_of(1))[-1]))

    def _specs_of(self, batches: int) -> list[Spec]:
        """The arrays of so many batches in bytes."""
        (items, *item), *labels = self.top_shapes
        shapes = [(batches * items, *item), (batches * items, 3), *((batches * items,) for _ in labels)]
        types = np.dtype(np.uint8), np.dtype(np.int32), self.context.exact
        return list(zip(shapes, types, strict=False))

    def _fit(self) -> None:
        self._specs = self._specs_of(self._together)
        self._places = places(self._specs)
        units = 1 if self._together == 1 else _UNITS
        self.internal_blob("bytes", (units * self._places[-1],), np.uint8)
        mean = self.transformer.mean_shape(self._record)
        if mean is not None:
            self.internal_blob("mean", mean, self.context.exact)

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
        packed, mean = self.internal["bytes"], self.internal.get("mean")
        if mean is not None:
            yield call(self._write_mean, overwrite(mean), once=True)
        operands = [
            overwrite(packed) if self._together == 1 else write(packed),  # what other batches need must stay there
            None if mean is None else read(mean),
            overwrite(top[0]),
            overwrite(top[1]) if len(top) > 1 else None,
        ]
        op, options = "feed_images", dict[str, Any](scale=float(self.transformer.scale), mirror=self.transformer.mirror)
        if self._together > 1:
            op, options["together"] = "feed_images_of_unit", self._together
        yield call(op, *operands, take=self._take_bytes, places=tuple(self._places), **options)

    def _write_mean(self, array: np.ndarray) -> None:
        array[...] = self.transformer.mean()

    def _take_bytes(self, device: Device) -> Taken:
        """The next batch, for the op that feeds."""
        position, seed, unit = self.position, self.context.state.seed, self._unit
        if unit is None or (number := unit.find(position, seed, device)) < 0:
            taken = self._turn(position, seed, device)
        else:
            if number == 1:
                self._batches.make_ahead()
            wants = self._following is None and 2 * number >= unit.count
            taken = Taken(unit.place * self._together + number, self._ahead(unit, seed, device) if wants else ())
        self.position = position + self.batch
        return taken

    def _turn(self, position: int, seed: int, device: Device) -> Taken:
        """Go to another unit: what was sent ahead if the next batch is in it, else a new one, or that batch itself."""
        left = None if self._unit is None else self._unit.place
        unit, self._following = self._following, None
        if unit is not None and (number := unit.find(position, seed, device)) >= 0:
            self._unit = unit
            return Taken(unit.place * self._together + number, (), left)
        if not self.varies:
            self._batches.lock(device, self._specs)
        try:
            batch, count = self._lend(position, seed)
        except NotBytes:
            arrays = [np.empty(shape, self.context.exact) for shape in self.top_shapes]
            self.load(position, seed, arrays)
            arrays[0] = arrays[0].astype(self.context.dtype, copy=False)
            self._batches.pass_over(position, seed, self._specs, self._broken_end(position, seed))
            return Taken(-1, ready=arrays)
        unit = self._unit_of(self._sent, batch, count, device)
        return Taken(unit.place * self._together, [unit], left)

    def _ahead(self, unit: Unit, seed: int, device: Device) -> list[Unit]:
        """What follows on a unit, if it is made by now."""
        if not self._batches.is_made(unit.end, seed):
            return []
        batch = self._batches.lend(unit.end, seed, self._specs)
        return [self._unit_of(self._sent_ahead, batch, self._together, device)]

    def _unit_of(self, sent: Callable[[Unit, Event], None], batch: Batch, count: int, device: Device) -> Unit:
        """The unit of what was lent, for the place where the present one is not."""
        assert isinstance(batch.buffer, LockableBuffer)
        batch.buffer.lock(device)  # in case that it has grown
        place = 0 if self._unit is None else 1 - self._unit.place
        return Unit(sent, batch, self._places[-1], place, count, self.batch, device)

    def _lend(self, position: int, seed: int) -> tuple[Batch, int]:
        """The unit that begins there, and how many of its batches are in it: 1 where not all can be made."""
        if self._together == 1:
            return self._batches.lend(position, seed, self._specs), 1
        if self._broken_end(position, seed) is None:
            try:
                return self._batches.lend(position, seed, self._specs), self._together
            except Exception:  # raised again when the batch that it concerns is taken
                self._broken = position, seed
        return self._batches.make(position, seed, self._specs, self.batch), 1

    def _broken_end(self, position: int, seed: int) -> int | None:
        """Where the unit ends that could not be made, if this position is in it."""
        if self._broken is None or self._broken[1] != seed:
            return None
        end = self._broken[0] + self._together * self.batch
        return end if self._broken[0] <= position < end else None

    def _sent(self, unit: Unit, event: Event) -> None:
        self._take_back(unit, event)
        if self._together > 1:  # else other nets may use the array, too
            self._unit = unit

    def _sent_ahead(self, unit: Unit, event: Event) -> None:
        self._take_back(unit, event)
        self._following = unit

    def _take_back(self, unit: Unit, event: Event) -> None:
        batch = unit.batch
        self._batches.take_back(batch, event, self._broken_end(batch.position, batch.seed))
