"""What all layers that read batches from somewhere share: the position, making batches ahead, damaged items."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from blobmem.data.prefetch import Prefetcher
from blobmem.data.prefetch_batch import Shape
from blobmem.data.prefetch_line import Load, Shapes
from blobmem.dtypes import is_half
from blobmem.errors import NetError
from blobmem.layers.source import Source
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite

log = logging.getLogger("blobmem")

PREFETCH = 4
"""Batches made ahead where the layer's message has no such field; data_param's default."""


class Batched(Source):
    """A layer whose tops are batches of a stream of items, in which position p is the item that comes p-th.

    A subclass calls `start` in its `setup`, and writes `load` (and `shapes`, where batches differ in shape).

    Attributes:
        batch: items of a batch.
        position: items taken so far, or skipped; the next batch begins there.
    """

    divisible: ClassVar[bool] = True
    """Whether `load` makes any part of a batch; if not, it gets whole ones."""

    def start(
        self,
        batch: int,
        top_shapes: Sequence[Shape],
        *,
        position: int = 0,
        prefetch: int = PREFETCH,
        varies: bool = False,
    ) -> None:
        """Begin the stream at `position`, in batches for tops of these shapes (`shapes` says others, if it varies).

        At most `prefetch` batches are made ahead; with 0 none is. Reads nothing. Raises NetError for a batch below 1.
        """
        if batch < 1:
            raise self.error("batch_size", "1 or more", batch)
        self.batch = batch
        self.position = position
        self.top_shapes = list(top_shapes)
        self.varies = varies
        self._prefetch = prefetch
        self._batches = self._prefetcher(self.load, self.shapes)

    def _prefetcher(self, load: Load, shapes: Shapes, together: int = 1) -> Prefetcher:
        """What makes batches ahead, so many of them at once; of such units four are enough."""
        known = shapes if self.varies else None
        divisible, name = self.divisible, self.name
        step, depth = self.batch * together, self._prefetch if together == 1 else min(self._prefetch, 4)
        return Prefetcher(load, step, depth, shapes=known, divisible=divisible, name=name)

    # ---------------------------------------------------------------- for subclasses to write

    def load(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        """Fill the arrays, one for each top, with the items from `position` on, as many as they are long.

        Must depend on nothing but its arguments and what does not change, not on the pass: it is called ahead of
        time, for parts of batches, in several threads at once. Raises NetError for an item that cannot be used.
        """
        raise NotImplementedError(f"layer type {self.type} does not make its items")

    def shapes(self, position: int, seed: int) -> Sequence[Shape]:
        """The tops' shapes for the batch at `position`, where they vary; as `load`, a function of its arguments."""
        raise NotImplementedError(f"layer type {self.type} varies and does not say its shapes")

    # ---------------------------------------------------------------- the layer

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob, shape in zip(top, self.top_shapes, strict=True):
            blob.reshape(tuple(shape))

    def prepare(self, top: Sequence[Blob]) -> None:
        """Give the tops the shapes of the next batch, which stays where it is."""
        if self.varies:
            self.top_shapes = list(self._next_shapes())
            self.reshape((), top)

    def _next_shapes(self) -> Sequence[Shape]:
        return self._batches.next_shapes(self.position, self.context.state.seed)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(self._take, *map(overwrite, top))

    def _take(self, *arrays: np.ndarray) -> None:
        # of numbers that can be reckoned with; a half is rounded once, at the end
        batch = [np.empty(array.shape, self.context.exact) if is_half(array.dtype) else array for array in arrays]
        self._batches.take(self.position, self.context.state.seed, batch)
        for array, values in zip(arrays, batch, strict=True):
            if values is not array:
                array[...] = values
        self.position += self.batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = state["position"]
        if not isinstance(position, int) or position < 0:
            raise NetError(f"layer '{self.name}': a position in the data of {position!r}, expected 0 or more")
        self.position = position

    @property
    def waited(self) -> float:
        """Seconds that passes have waited for this layer's batches, or spent making them."""
        return self._batches.waited

    @property
    def buffered(self) -> int:
        """Bytes on the host that batches made ahead take up now."""
        return self._batches.nbytes


def waiting_time(net: Any) -> float:
    """Seconds that the passes of a net have waited for data."""
    return sum(layer.waited for layer in net.layers if isinstance(layer, Batched))


class Damaged:
    """The damaged items of one source: told once each, with their number so far.

    Args:
        where: how the warnings begin: the net's file, the layer and the field.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def skip(self, key: Any, what: str) -> None:
        """Warn, if it is the first time, that the item `key` is left out; `what` names it and says what is wrong."""
        with self._lock:
            if key in self._known:
                return
            self._known.add(key)
            count = len(self._known)
        log.warning("%s: %s; it is skipped (%d so far)", self._where, what, count)
