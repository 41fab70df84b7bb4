"""The line in which batches wait, between the pass that takes them and the threads that make them.

How far to work ahead is found out, not guessed: there is one buffer and one thread at first, and one more of what is
lacking whenever passes keep waiting, within the limits.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from blobmem.data.prefetch_batch import Batch, Buffer, Shape, Spec, spec_bytes, specs
from blobmem.ops.host.parallel import num_threads

Load = Callable[[int, int, Sequence[np.ndarray]], None]
"""load(position, seed, arrays): fill the arrays, of as many items each, with those from `position` on."""

Shapes = Callable[[int, int], Sequence[Shape]]
"""shapes(position, seed): the shapes of the arrays of the batch at `position`."""

MOST_BYTES = 256 * 2**20
"""The most that one source keeps in buffers, unless one batch is more."""

_EXIT_SECONDS = 2.0  # that the end of the process waits for batches in the making, all sources together


class Line:
    """Batches in the order in which they will be taken.

    `load` and `shapes` give the functions of those names, or None when the source is no more: threads must not keep
    it alive. The other arguments are Prefetcher's.
    """

    def __init__(
        self,
        load: Callable[[], Load | None],
        shapes: Callable[[], Shapes | None] | None,
        step: int,
        depth: int,
        divisible: bool,
        threads: int | None,
        name: str,
    ) -> None:
        self._load, self._shapes = load, shapes
        self._step, self._depth = step, depth
        self._divisible = divisible and shapes is None
        self._most_threads, self._name = threads, name
        self._specs: list[Spec] = []  # of the batch taken last
        self._buffers = 1
        self._stopped = False
        self._begin()
        _lines.add(self)

    def _begin(self) -> None:
        # reentrant: `stop` may run in a garbage collection of the thread that holds it
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._queue: deque[Batch] = deque()
        self._free: list[Buffer] = []
        self._next: tuple[int, int] | None = None  # position and seed that follow on what was taken last
        self._running = 0  # parts being made
        self._idle = False  # a thread has lately found nothing to do
        self._late = 0  # takes in succession that had to wait

    @property
    def nbytes(self) -> int:
        """Bytes in buffers."""
        with self._changed:
            return sum(buffer.raw.nbytes for buffer in (*self._free, *(batch.buffer for batch in self._queue)))

    # ---------------------------------------------------------------- the taking side

    def get(self, position: int, seed: int, arrays: Sequence[np.ndarray]) -> Batch | None:
        """The batch for these arrays, finished; None where there is none, and the taker has to make it."""
        with self._changed:
            batch = self.peek(position, seed)
            if batch is not None and batch.error is None and specs(batch.arrays) == specs(arrays):
                return self._queue.popleft()
            self._flush()
        if batch is not None and batch.error is not None:
            raise batch.error[1]
        return None

    def peek(self, position: int, seed: int) -> Batch | None:
        """The batch, finished or failed, which stays in line; None where it is not the next one."""
        with self._changed:
            batch = self._queue[0] if self._queue else None
            if batch is None or (batch.position, batch.seed) != (position, seed):
                return None
            if batch.pending:
                batch.late = True
                self._changed.wait_for(lambda: not batch.pending or self._stopped)
            return None if batch.pending else batch

    def go_on(self, batch: Batch | None, position: int, seed: int, arrays: Sequence[np.ndarray]) -> None:
        """Take `batch` back; what comes next will be that of `position`, so make ahead from there."""
        with self._changed:
            # one take alone does not make a stream
            streaming = self._next == (position - self._step, seed)
            self._next, self._specs = (position, seed), specs(arrays)
            if batch is not None:
                self._free.append(batch.buffer)
                self._late = self._late + 1 if batch.late else 0
                if self._late > 1:
                    self._grow()
            if streaming and not self._stopped and self._have_threads(1):
                self._open()

    def _grow(self) -> None:
        """Work ahead further: in one more buffer if threads lacked that, else in one more thread."""
        if self._idle and self._buffers < self._most_buffers():
            self._buffers += 1
        elif self._divisible or len(self._threads) < self._buffers:
            self._have_threads(len(self._threads) + 1)
        self._idle = False

    def _most_buffers(self) -> int:
        nbytes = sum(map(spec_bytes, self._specs))
        return min(self._depth, max(1, MOST_BYTES // max(nbytes, 1)))

    def _open(self) -> None:
        """Put batches in line until they have all the buffers."""
        assert self._next is not None, "batches follow on one that was taken"
        position, seed = self._next
        items = self._specs[0][0][0]
        parts = max(1, min(len(self._threads), items)) if self._divisible else 1
        while len(self._queue) < self._buffers:
            buffer = self._free.pop() if self._free else Buffer()
            batch = Batch(position + self._step * len(self._queue), seed, buffer, items, parts)
            if self._shapes is None:
                batch.arrays = buffer.arrays(self._specs)
            self._queue.append(batch)
        self._changed.notify_all()

    def _flush(self) -> None:
        """Drop all that is in line, once nobody works on it any more."""
        for batch in self._queue:
            batch.parts.clear()
        self._changed.wait_for(lambda: not self._running)
        self._free += [batch.buffer for batch in self._queue]
        self._queue.clear()
        self._late = 0

    # ---------------------------------------------------------------- the threads

    def _have_threads(self, count: int) -> bool:
        """Start threads until there are so many, as far as that is allowed; whether there are any."""
        most = num_threads() if self._most_threads is None else self._most_threads
        while self._depth and len(self._threads) < min(count, most):
            name = f"blobmem-{self._name or 'batches'}-{len(self._threads)}"
            thread = threading.Thread(target=_make_batches, args=(self,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more: those that there are have to do
                break
            self._threads.append(thread)
        return bool(self._threads)

    def next_part(self) -> tuple[Batch, slice] | None:
        """The first part that nobody has taken yet, as soon as there is one; None when it is time to end."""
        with self._changed:
            while not self._stopped:
                for batch in self._queue:
                    if batch.parts:
                        self._running += 1
                        return batch, batch.parts.pop()
                self._idle = True
                self._changed.wait()
        return None

    def make(self, batch: Batch, part: slice) -> bool:
        """Make that part; whether the source still exists."""
        load = self._load()
        error: BaseException | None = None
        try:
            if load is not None:
                self._fill(load, batch, part)
        except BaseException as caught:  # raised where the batch is taken
            error = caught
            _let_go(error)
        exists = load is not None
        del load  # the error knows this frame
        with self._changed:
            self._running -= 1
            batch.pending -= 1
            if error is not None and (batch.error is None or part.start < batch.error[0]):
                batch.error = (part.start, error)
            self._changed.notify_all()
        return exists

    def _fill(self, load: Load, batch: Batch, part: slice) -> None:
        shapes = None if self._shapes is None else self._shapes()
        if shapes is not None:
            found = shapes(batch.position, batch.seed)
            batch.arrays = batch.buffer.arrays([(s, d) for s, (_, d) in zip(found, self._specs, strict=True)])
        load(batch.position + part.start, batch.seed, [array[part] for array in batch.arrays])

    def stop(self) -> None:
        """Let the threads end, when they have finished what they are at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Wait for the threads' end until that time."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def forget_threads(self) -> None:
        """In a forked child: they stayed behind in the parent, and so did whoever held the lock."""
        self._begin()


def _make_batches(line: Line) -> None:
    going = True
    while going:
        part = line.next_part()
        going = part is not None and line.make(*part)
        del part  # an idle thread keeps nothing


def _let_go(error: BaseException | None) -> None:
    """Empty the frames that an error knows: what they hold, the source too, must not live as long as it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# ---------------------------------------------------------------- the process


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _after_fork() -> None:
    for line in _lines:
        line.forget_threads()


@atexit.register
def _at_exit() -> None:
    """Let threads finish what they are at: cut off within a library's call they may take the process along."""
    lines = list(_lines)
    for line in lines:
        line.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for line in lines:
        line.join(deadline)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
