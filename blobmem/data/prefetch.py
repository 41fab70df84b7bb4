"""Batches made ahead of the passes that take them, in threads of their own.

A batch is a function of the seed and of its position in the stream of items, so that it is the same bits whichever
thread makes it, and when. Threads run `load` for parts of batches, outside the interpreter's lock where the libraries
that it calls release that; the pass copies the finished batch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.data.prefetch_batch import Batch, Shape, Spec, specs
from blobmem.data.prefetch_line import Line, Load, Shapes
from blobmem.devices import Device, Event


class Prefetcher:
    """The batches of one source, one after the other.

    Args:
        load: makes a batch, or the part of one that starts at its position. It is called from several threads at
            once. If it is a method, its object lives as long as its owner wants, not longer; so with `shapes`.
        step: items of a batch; the next one starts so many positions later.
        depth: the most batches that are ready or in the making; 0 makes each one when it is taken.
        shapes: where batches differ in shape, says their shapes; else all have that of the one taken before.
        divisible: whether `load` makes any part of a batch.
        threads: the most that make batches; as many as ops use when None.
        name: of the source, for the threads' names.

    Attributes:
        batches: number of batches taken.
        waited: seconds that passes waited for their batches, or spent making them.

    One thread at a time takes. The threads end with this object, and do not keep the process from ending.
    """

    def __init__(
        self,
        load: Load,
        step: int,
        depth: int,
        *,
        shapes: Shapes | None = None,
        divisible: bool = True,
        threads: int | None = None,
        name: str = "",
    ) -> None:
        self.batches = 0
        self.waited = 0.0
        self._step = step
        self._locked: tuple[Device, list[Spec]] | None = None  # for which device, for batches like what
        self._load = _reference(load)
        self._shapes = None if shapes is None else _reference(shapes)
        self._line = Line(self._load, self._shapes, step, depth, divisible, threads, name)
        weakref.finalize(self, self._line.stop).atexit = False

    def take(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        """Fill the arrays with the batch at `position`: the one made ahead, if it is that.

        Raises what `load` raised for this batch, which is made anew when it is asked for again.
        """
        start = time.perf_counter()
        wanted = specs(arrays)
        batch = self._line.get(position, seed, wanted)
        if batch is None:
            self._load()(position, seed, arrays)
        self.waited += time.perf_counter() - start
        if batch is not None:
            for array, made in zip(arrays, batch.arrays, strict=True):
                np.copyto(array, made)
        self.batches += 1
        self._line.go_on(batch, position + self._step, seed, wanted)

    def lend(self, position: int, seed: int, wanted: Sequence[Spec]) -> Batch:
        """The batch at `position`, of arrays like these, in place of a copy; `take_back` or `pass_over` comes next.

        Its buffer is a `LockableBuffer`. Raises what `load` raised, as `take` does.
        """
        start = time.perf_counter()
        self._line.lend_pages()
        batch = self._line.get(position, seed, wanted)
        self.waited += time.perf_counter() - start
        return self.make(position, seed, wanted, wanted[0][0][0]) if batch is None else batch

    def lock(self, device: Device, wanted: Sequence[Spec]) -> None:
        """Have all memory that lending such batches to a device will ever take, locked for it. Once: it takes long."""
        if self._locked != (device, wanted):
            self._line.lock_pages(device, wanted)
            self._locked = device, list(wanted)

    def make(self, position: int, seed: int, wanted: Sequence[Spec], items: int) -> Batch:
        """`lend` for the first `items` items alone, which are made here and now; the arrays' rest is not written."""
        start = time.perf_counter()
        self._line.lend_pages()
        batch = self._line.spare(position, seed, wanted)
        try:
            self._load()(position, seed, [array[:items] for array in batch.arrays])
        except BaseException:
            self._line.put_back(batch.buffer)
            raise
        finally:
            self.waited += time.perf_counter() - start
        return batch

    def take_back(self, batch: Batch, busy: Event, following: int | None = None) -> None:
        """The lent batch is behind; its memory is free from the event on.

        The next batch to be made ahead is the one at `following`; the next of the stream, when None.
        """
        self.batches += 1
        position = batch.position + self._step if following is None else following
        self._line.go_on(batch, position, batch.seed, specs(batch.arrays), busy)

    def pass_over(self, position: int, seed: int, wanted: Sequence[Spec], following: int | None = None) -> None:
        """The batch at `position`, which `lend` could not give, is behind: somebody else has made it."""
        self.batches += 1
        self._line.go_on(None, position + self._step if following is None else following, seed, wanted)

    def make_ahead(self) -> None:
        """Begin to make what follows on the batch that was taken last: there will be a stream of them."""
        self._line.begin()

    def is_made(self, position: int, seed: int) -> bool:
        """Whether the batch at `position` is ready, so that lending it takes no time."""
        return self._line.is_made(position, seed)

    def next_shapes(self, position: int, seed: int) -> Sequence[Shape]:
        """The shapes of the batch at `position`, which stays where it is. Raises what `shapes` and `load` raise."""
        if self._shapes is None:
            raise ValueError("all batches of this source have one shape")
        start = time.perf_counter()
        batch = self._line.peek(position, seed)
        if batch is None or batch.error is not None:
            shapes = self._shapes()(position, seed)
        else:
            shapes = [array.shape for array in batch.arrays]
        self.waited += time.perf_counter() - start
        return shapes

    @property
    def nbytes(self) -> int:
        """Bytes in buffers for batches made ahead."""
        return self._line.nbytes


def _reference(function: Any) -> Any:
    """What gives the function, and, if it is a method, does not keep its object."""
    return weakref.WeakMethod(function) if hasattr(function, "__self__") else lambda: function
