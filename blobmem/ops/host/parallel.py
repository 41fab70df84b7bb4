"""A few threads of our own, for compiled kernels that release the interpreter's lock.

Not numba's `parallel=True`: its default layer ends the process when two Python threads enter it at once, and a data
source's prefetch thread may run ops while a net does.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_PIECES_PER_THREAD = 4  # so that a thread whose core is taken away by another process does not hold up the rest

Scratch = tuple[int, Any]

_local = threading.local()
_lock = threading.Lock()
_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
_workers = 0
_threads = 0


class _Task:
    """One `parallel_for`: pieces that threads take until none is left."""

    __slots__ = ("args", "done", "error", "kernel", "lock", "pending", "pieces", "scratch")

    def __init__(self, kernel: Callable[..., Any], pieces: list[tuple[int, int]], args: tuple, scratch: Scratch | None):
        self.kernel = kernel
        self.pieces = pieces
        self.args = args
        self.scratch = scratch
        self.pending = len(pieces)
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        while True:
            try:
                start, stop = self.pieces.pop()
            except IndexError:
                return
            try:
                self.kernel(start, stop, *(self.args if self.scratch is None else (scratch(*self.scratch), *self.args)))
            except BaseException as error:
                self.error = error
            with self.lock:
                self.pending -= 1
                if not self.pending:
                    self.done.release()


def _work() -> None:
    _local.is_worker = True
    while True:
        task = _tasks.get()
        task.run()
        del task  # an idle worker must not keep a caller's arrays alive


def _forget_threads() -> None:
    """In a forked child: the threads stayed behind in the parent."""
    global _tasks, _workers, _lock
    _tasks, _workers, _lock = queue.SimpleQueue(), 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def num_threads() -> int:
    """Threads that a parallel op uses: `BLOBMEM_NUM_THREADS`, else the processors that this process may run on.

    Raises ValueError when the variable is set to anything but a positive number.
    """
    return _threads or set_num_threads(0)


def set_num_threads(count: int) -> int:
    """Use `count` threads from now on (0: what the environment says); returns the number in use."""
    global _threads
    if count < 0:
        raise ValueError(f"the number of threads is {count}; give 1 or more, or 0 for the default")
    _threads = count or _threads_of_environment()
    return _threads


def _threads_of_environment() -> int:
    text = os.environ.get("BLOBMEM_NUM_THREADS", "")
    if text:
        if not text.isdecimal() or int(text) == 0:
            raise ValueError(f"BLOBMEM_NUM_THREADS is {text!r}; set it to a positive number, or unset it")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def scratch(count: int, dtype: Any) -> np.ndarray:
    """The calling thread's private scratch: `count` elements or more, aligned to 64 bytes, contents undefined.

    Like the buffers inside a matrix library it belongs to the process, one per thread, and is in no net's footprint.
    It grows to the most that was asked for (kernels cut their work to a second-level cache, one or two MiB) and stays.
    """
    nbytes = count * np.dtype(dtype).itemsize
    held = getattr(_local, "scratch", None)
    if held is None or held.size < nbytes:
        _local.scratch = None
        nbytes = -(-nbytes // 65536) * 65536
        raw = np.empty(nbytes + 64, np.uint8)
        first = -raw.ctypes.data % 64
        held = _local.scratch = raw[first : first + nbytes]
    return held.view(dtype)


class _Writable:
    """The memory of a read-only array, for kernels that only read it."""

    def __init__(self, array: np.ndarray):
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _one_type(argument: Any) -> Any:
    """Compiled code is made per type, and a read-only array has another type than a writable one."""
    if type(argument) is np.ndarray and not argument.flags.writeable:
        return np.asarray(_Writable(argument))
    return argument


def parallel_for(
    kernel: Callable[..., Any], n: int, *args: Any, grain: int = 1, scratch_of: Scratch | None = None
) -> None:
    """Run `kernel(start, stop, *args)` over pieces that together cover range(n), in several threads.

    The kernel should release the interpreter's lock, and what it writes for index i must depend on i alone, so that the
    cut makes no difference. No piece is smaller than `grain` indices (save when n is): give the number below which a
    thread is not worth waking (about 20 microseconds of work). With `scratch_of` (a count and a dtype) the third
    argument is the running thread's `scratch`. An exception of the kernel is raised here, after all pieces have ended.
    """
    if n <= 0:
        return
    args = tuple([_one_type(a) for a in args])
    count = num_threads()
    limit = min(n // max(1, grain), count * _PIECES_PER_THREAD)
    if limit < 2 or count == 1 or getattr(_local, "is_worker", False):
        kernel(0, n, *(args if scratch_of is None else (scratch(*scratch_of), *args)))
        return
    cuts = [n * i // limit for i in range(limit + 1)]
    task = _Task(kernel, [*itertools.pairwise(cuts)][::-1], args, scratch_of)
    del args
    helpers = min(count, limit) - 1
    if _workers < helpers:
        _start_workers(helpers)
    for _ in range(helpers):
        _tasks.put(task)
    task.run()
    task.done.acquire()
    task.args = ()
    if task.error is not None:
        raise task.error


def _start_workers(wanted: int) -> None:
    global _workers
    with _lock:
        while _workers < wanted:
            threading.Thread(target=_work, name=f"blobmem-op-{_workers}", daemon=True).start()
            _workers += 1
