"""Layers without bottoms that need no file: Input, DummyData, MemoryData, Parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from blobmem.errors import BlobmemError
from blobmem.layers.base import EXACT, NET, WANTED, Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, accumulate_diff, call, overwrite, read, read_diff, write


class Source(Layer):
    """No bottoms; tops whose shapes may change from batch to batch."""

    rewinds = True
    bottoms: ClassVar[tuple[int, int | None]] = (0, 0)
    tops: ClassVar[tuple[int, int | None]] = (1, None)


@register_layer
class Input(Source):
    """Blobs that the user fills."""

    type = "Input"
    top_kinds = (WANTED,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise self.error("shape", f"none, 1 or {len(top)}, one for each top", len(shapes))
        for index, blob in enumerate(top):
            if shapes:
                blob.reshape(tuple(shapes[index if len(shapes) > 1 else 0].dim))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        pass


@register_layer
class DummyData(Source):
    """Blobs filled by fillers: constants once, random ones anew in every pass."""

    type = "DummyData"
    top_kinds = (WANTED,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.dummy_data_param
        count = len(top)
        if len(options.data_filler) not in (0, 1, count):
            raise self.error("data_filler", f"none, 1 or {count}, one for each top", len(options.data_filler))
        fillers = list(options.data_filler) or [None]
        self.data_fillers = [self.filler(fillers[i if len(fillers) > 1 else 0]) for i in range(count)]
        for blob, shape in zip(top, self._shapes(count), strict=True):
            blob.reshape(shape)

    def _shapes(self, count: int) -> list[tuple[int, ...]]:
        options = self.param.dummy_data_param
        old = {name: list(getattr(options, name)) for name in ("num", "channels", "height", "width")}
        if not any(old.values()):
            return self._for_each_top("shape", [tuple(shape.dim) for shape in options.shape], count)
        if options.shape:
            raise self.error("shape", "either shape, or the older num, channels, height and width", "both")
        return list(zip(*(self._for_each_top(name, sizes, count) for name, sizes in old.items()), strict=True))

    def _for_each_top(self, name: str, values: list[Any], count: int) -> list[Any]:
        if len(values) not in (1, count):
            raise self.error(name, f"1 or {count}, one for each top", len(values))
        return values * count if len(values) == 1 else values

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        pass

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        for index, (blob, filler) in enumerate(zip(top, self.data_fillers, strict=True)):
            if filler.kind == "constant":
                # it stays as a script may since have changed it
                yield call("fill", overwrite(blob), once=True, value=filler.value)
            else:
                yield call("fill_random", overwrite(blob), filler=filler, draws=self.draws(str(index)))


@register_layer
class MemoryData(Source):
    """Batches of arrays that the user hands over with `reset` (pycaffe's `Net.set_input_arrays`)."""

    type = "MemoryData"
    tops = (2, 2)
    top_kinds = (NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.memory_data_param
        self.item = (options.channels, options.height, options.width)
        if min(self.item) < 1 or options.batch_size < 1:
            raise self.error("batch_size", "batch_size, channels, height and width of 1 or more")
        self.position = 0
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None
        self._top = top

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        batch = self.param.memory_data_param.batch_size
        top[0].reshape(batch, *self.item)
        top[1].reshape(batch)

    def reset(self, data: np.ndarray, labels: np.ndarray) -> None:
        """Serve these from their start on: data (items, channels, height, width), labels (items,).

        Arrays of the tops' dtypes (of labels float32, if the net's is a half) that are C-contiguous and writable become
        the memory of the tops, a batch at a time; others are copied once. Raises ValueError unless the number of items
        is the same and a multiple of the batch.
        """
        batch = self.param.memory_data_param.batch_size
        if data.shape[1:] != self.item or not len(data) or len(data) % batch:
            dims = " x ".join(map(str, self.item))
            raise ValueError(
                f"layer '{self.name}' takes a multiple of {batch} items of {dims}, got an array of shape {data.shape}"
            )
        if np.size(labels) != len(data):
            raise ValueError(f"layer '{self.name}' takes as many labels as items, {len(data)}; got {np.size(labels)}")
        kept = np.require(data, self.context.dtype, ("C", "W"))
        self._arrays, self.position = (kept, np.require(np.reshape(labels, -1), self.context.exact, ("C", "W"))), 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])

    def _next(self, *_: np.ndarray) -> None:
        assert self._arrays is not None
        start, stop = self.position, self.position + self._top[0].shape[0]
        for blob, array in zip(self._top, self._arrays, strict=True):
            blob.data_view.memory.set_host_array(array[start:stop])
        self.position = stop % len(self._arrays[0])

    def prepare(self, top: Sequence[Blob]) -> None:
        if self._arrays is None and self.context.device.compute:
            raise BlobmemError(f"layer '{self.name}' has no data yet: call net.set_input_arrays(data, labels) first")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        # `write`, so that nobody shares memory that is the user's
        yield call(self._next, *map(write, top))


@register_layer
class Parameter(Layer):
    """A parameter as a blob, for layers that take as a bottom what they learn."""

    type = "Parameter"
    bottoms = (0, 0)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.add_param(tuple(self.param.parameter_param.shape.dim))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape_like(self.blobs[0])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        # a copy: a layer may work in place on the top, and a parameter may come to live in another net's memory
        yield call("copy", read(self.blobs[0]), overwrite(top[0]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if self.param_grads[0]:
            # the gradient of a bias that is added to one row
            dy, total = read_diff(top[0], (1, top[0].count)), accumulate_diff(self.blobs[0], (top[0].count,))
            yield call("inner_product_backward_bias", dy, total)
