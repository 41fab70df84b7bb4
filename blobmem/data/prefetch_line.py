"""The line in which batches wait, between the pass that takes them and the threads that make them.

How far to work ahead is found out, not guessed: there is one buffer and one thread at first, and one more of what is
lacking whenever passes keep waiting, within the limits. Only buffers that a device locks are all there from the start.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from blobmem.data.prefetch_batch import Batch, Buffer, LockableBuffer, Shape, Spec, spec_bytes, specs
from blobmem.data.prefetch_exit import end_with_process
from blobmem.devices import Device, Event
from blobmem.ops.host.parallel import num_threads

Load = Callable[[int, int, Sequence[np.ndarray]], None]
"""load(position, seed, arrays): fill the arrays, of as many items each, with those from `position` on."""

Shapes = Callable[[int, int], Sequence[Shape]]
"""shapes(position, seed): the shapes of the arrays of the batch at `position`."""

MOST_BYTES = 256 * 2**20
"""The most that one source keeps in buffers, unless one batch is more."""


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
        self._new_buffer: type[Buffer] = Buffer
        self._stopped = False
        self._begin()
        end_with_process(self)

    def _begin(self) -> None:
        # reentrant: `stop` may run in a garbage collection of the thread that holds it
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._queue: deque[Batch] = deque()
        self._free: list[Buffer] = []
        self._lent: deque[tuple[Event, Buffer]] = deque()  # that a device reads until the event, the oldest first
        self._next: tuple[int, int] | None = None  # position and seed that follow on what was taken last
        self._running = 0  # parts being made
        self._idle = False  # a thread has lately found nothing to do
        self._late = 0  # takes in succession that had to wait

    @property
    def nbytes(self) -> int:
        """Bytes in buffers."""
        with self._changed:
            return sum(buffer.raw.nbytes for buffer in self._all_buffers())

    def _all_buffers(self) -> list[Buffer]:
        return [*self._free, *(batch.buffer for batch in self._queue), *(buffer for _, buffer in list(self._lent))]

    # ---------------------------------------------------------------- the taking side

    def lend_pages(self) -> None:
        """Make batches, from now on, in memory that a device may lock and read after they are taken back."""
        with self._changed:
            if self._new_buffer is not LockableBuffer:
                self._flush()
                self._free.clear()
                self._new_buffer = LockableBuffer

    def lock_pages(self, device: Device, wanted: Sequence[Spec]) -> None:
        """`lend_pages`, with all the buffers that there may be, for batches like these, made and locked for a device.

        Locking takes long, and would hold up some later step.
        """
        self.lend_pages()
        with self._changed:
            self._flush()
            self._specs = list(wanted)
            self._buffers = max(1, self._most_buffers())
            missing = self._buffers + self._most_lent() - len(self._all_buffers())
            self._free += [LockableBuffer() for _ in range(missing)]
            for buffer in self._free:
                buffer.arrays(wanted)
                if isinstance(buffer, LockableBuffer):
                    buffer.lock(device)

    def spare(self, position: int, seed: int, wanted: Sequence[Spec]) -> Batch:
        """A batch for the taker to make, outside the line."""
        batch = Batch(position, seed, self._buffer(), wanted[0][0][0], 0)
        batch.arrays = batch.buffer.arrays(wanted)
        return batch

    def put_back(self, buffer: Buffer) -> None:
        """Take back a buffer whose batch came to nothing."""
        with self._changed:
            self._free.append(buffer)

    def _buffer(self) -> Buffer:
        return self._free.pop() if self._free else self._new_buffer()

    def get(self, position: int, seed: int, wanted: Sequence[Spec]) -> Batch | None:
        """The batch of arrays like these, finished; None where there is none, and the taker has to make it."""
        with self._changed:
            batch = self.peek(position, seed)
            if batch is not None and batch.error is None and specs(batch.arrays) == list(wanted):
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

    def is_made(self, position: int, seed: int) -> bool:
        """Whether the next batch is that one, and finished."""
        with self._changed:
            batch = self._queue[0] if self._queue else None
            if batch is None or batch.pending or batch.error is not None:
                return False
            return (batch.position, batch.seed) == (position, seed)

    def go_on(
        self, batch: Batch | None, position: int, seed: int, wanted: Sequence[Spec], busy: Event | None = None
    ) -> None:
        """Take `batch` back; what comes next will be that of `position`, so make ahead from there.

        Until the event `busy`, a device still reads the batch.
        """
        self._specs = list(wanted)
        self._reclaim(self._most_lent() - 1)
        with self._changed:
            # one take alone does not make a stream
            streaming = self._next == (position - self._step, seed)
            self._next = position, seed
            if batch is not None:
                if busy is None:
                    self._free.append(batch.buffer)
                else:
                    self._lent.append((busy, batch.buffer))
                self._late = self._late + 1 if batch.late else 0
                if self._late > 1:
                    self._grow()
            if streaming:
                self.begin()

    def begin(self) -> None:
        """Make ahead from where the last take ended, if there was one."""
        with self._changed:
            if self._next is not None and not self._stopped and self._have_threads(1):
                self._open()

    def _grow(self) -> None:
        """Work ahead further: in one more buffer if threads lacked that, else in one more thread."""
        if self._idle and self._buffers < self._most_buffers():
            self._buffers += 1
        elif self._divisible or len(self._threads) < self._buffers:
            self._have_threads(len(self._threads) + 1)
        self._idle = False

    def _reclaim(self, most: int) -> None:
        """Take back the buffers that no device reads any more; if more than `most` are still read, wait for some."""
        while self._lent and (len(self._lent) > most or self._lent[0][0].done):
            # outside the lock, so that nobody else waits
            self._lent[0][0].synchronize()
            with self._changed:
                self._free.append(self._lent.popleft()[1])

    def _fitting(self) -> int:
        """The number of batches that may take up memory."""
        return max(1, MOST_BYTES // max(sum(map(spec_bytes, self._specs)), 1))

    def _most_lent(self) -> int:
        # in two, the copy of one batch may wait for the device while the next one is handed over
        return 2 if self._fitting() > 2 else 1

    def _most_buffers(self) -> int:
        lent = self._most_lent() if self._new_buffer is LockableBuffer else 0
        return min(self._depth, max(1, self._fitting() - lent))

    def _open(self) -> None:
        """Put batches in line until they have all the buffers."""
        assert self._next is not None, "batches follow on one that was taken"
        position, seed = self._next
        items = self._specs[0][0][0]
        parts = max(1, min(len(self._threads), items)) if self._divisible else 1
        while len(self._queue) < self._buffers:
            buffer = self._buffer()
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
        self._left = self._all_buffers()  # kept: what a device has locked there must not be unlocked here
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
