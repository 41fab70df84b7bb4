"""What a device is: the calls by which everything above allocates, copies, orders and counts."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from blobmem.errors import DeviceError, OutOfDeviceMemory


@dataclasses.dataclass
class Statistics:
    """What a device holds and has been asked to do since it was made. Bytes are exact, before any rounding.

    Calls that failed are not counted; copies given to a stream are counted when they are queued.
    """

    bytes_held: int = 0
    peak_bytes: int = 0
    allocations: int = 0
    grows: int = 0
    shrinks: int = 0
    frees: int = 0
    moves: int = 0
    htod_copies: int = 0
    htod_bytes: int = 0
    dtoh_copies: int = 0
    dtoh_bytes: int = 0
    dtod_copies: int = 0
    dtod_bytes: int = 0
    memsets: int = 0

    @property
    def allocator_calls(self) -> int:
        """Calls that reached the allocator: allocations, grows, shrinks and frees."""
        return self.allocations + self.grows + self.shrinks + self.frees

    def snapshot(self) -> Statistics:
        """A copy as of now."""
        return dataclasses.replace(self)

    def add(self, counts: Mapping[str, int]) -> None:
        """Count so many more in these fields."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        self.peak_bytes = self.bytes_held

    def __sub__(self, earlier: Statistics) -> Statistics:
        """What happened since the snapshot `earlier`, field by field (differences of the two byte levels, too)."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return Statistics(*(a - b for a, b in zip(mine, theirs, strict=True)))


class Event(ABC):
    """A point in a stream's work."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all work queued before the point has finished; never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(ABC):
    """A queue of device work that runs in order."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work queued so far."""

    @abstractmethod
    def record(self) -> Event:
        """An event at the present end of the queue."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let work queued here from now on run only after `event`. Returns at once."""


class Captures:
    """The captures under way on what one or more devices queue their work on.

    Attributes:
        count: how many.
        postponed: how many calls that may wait for a stream are under way: no capture begins meanwhile.
        changed: held to change these; a finalizer may run while its thread holds it.
        waiting: what is to be called once there is no capture.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.postponed = 0
        self.waiting: deque[Callable[[], None]] = deque()


class Device(ABC):
    """A place where device-side bytes live and layers compute.

    Addresses are plain integers, never 0; sizes are in bytes. A call given a stream is queued on it and may run at any
    later time up to the stream's next wait; without one it has finished when it returns.

    Attributes:
        name: how messages call the device.
        is_host: True when there is no device side at all.
        compute: False when the device only counts, and no arithmetic may be asked of it.
        family: whose ops compute on it (`blobmem.ops.registry.FAMILIES`).
        statistics: what it holds and has done.
        of_thread: what others keep for each thread that uses the device.
        graphs: whether work can be captured and queued again as one (`capture`).
        streams: how many a thread's ops can be queued on, beside each other.
        prefetches: whether `prefetch` is to be called before each op.
        faults: where kernels that have not finished when they return put bad values; None where all have.
    """

    name: str = "device"
    is_host: bool = False
    compute: bool = True
    family: str = "host"
    graphs: bool = False
    streams: int = 1
    prefetches: bool = False
    faults: Any = None

    def __init__(self) -> None:
        self.statistics = Statistics()
        self.of_thread = threading.local()
        self._lock = threading.Lock()  # held during calls that a finalizer must not enter
        self._postponed: deque[Callable[[], None]] = deque()
        self._captures = Captures()

    @abstractmethod
    def allocate(self, nbytes: int, label: str = "") -> int:
        """The address of `nbytes` > 0 fresh bytes of undefined contents; OutOfDeviceMemory when there is no room."""

    @abstractmethod
    def grow(self, address: int, old: int, new: int) -> int:
        """Make an allocation of `old` bytes `new` bytes large, contents kept; the address it then has.

        In place where `grows_in_place` says so; else it moves, which needs room for both, and the old address is
        freed. OutOfDeviceMemory when there is no room; then nothing has changed.
        """

    @abstractmethod
    def shrink(self, address: int, old: int, new: int) -> None:
        """Give back all but the first `new` > 0 of an allocation's `old` bytes; it does not move."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give an allocation back."""

    @abstractmethod
    def grows_in_place(self, address: int, new: int) -> bool:
        """Whether growing the allocation to `new` bytes would leave it where it is."""

    @abstractmethod
    def relabel(self, address: int, label: str) -> None:
        """Change the name under which `holders` and messages list an allocation."""

    @abstractmethod
    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        """Copy a contiguous host array to `address`."""

    @abstractmethod
    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        """Copy `array.nbytes` bytes at `address` into a contiguous, writable host array."""

    @abstractmethod
    def memcpy_dtod(self, dst: int, src: int, nbytes: int, stream: Stream | None = None) -> None:
        """Copy `nbytes` bytes within the device; the two ranges do not overlap."""

    @abstractmethod
    def memset(self, address: int, value: int, nbytes: int, stream: Stream | None = None) -> None:
        """Set `nbytes` bytes to `value` (0 to 255)."""

    @abstractmethod
    def create_stream(self) -> Stream:
        """A new stream."""

    def create_copy_stream(self) -> Stream:
        """A stream that nothing orders but events: for copies beside the computing."""
        return self.create_stream()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything on every stream."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""

    @abstractmethod
    def holders(self) -> list[tuple[str, int]]:
        """(label, bytes) of every live allocation, largest first."""

    @abstractmethod
    def as_array(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An array object over device bytes that this device's ops compute on; DeviceError if `compute` is False."""

    @property
    def lost(self) -> bool:
        """Whether it has failed for good, with all that was on it."""
        return False

    @property
    def most_bytes(self) -> int | None:
        """How many bytes it may hold, if that is known ahead."""
        return None

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock pages of the host, so that copies of them run at the link's speed; whether that was done.

        Bytes whose pages are partly locked, or locked in two calls, cannot be copied in one.
        """
        return False

    def unpin(self, address: int) -> None:
        """Undo a `pin` that started there."""
        raise DeviceError(f"{self.name} device: nothing is pinned at {address:#x}")

    def compute_stream(self) -> Stream | None:
        """The stream that this thread's ops are queued on; None where they have finished when they return."""
        return None

    def side_stream(self) -> Stream | None:
        """A second stream of this thread's, beside `compute_stream`; None where there is none."""
        return None

    def queue_on(self, stream: Stream) -> None:
        """Queue this thread's ops on that one of its two streams from now on; it is its `compute_stream` then."""
        raise DeviceError(f"{self.name} has no other stream to queue on than its own")

    def prefetch(self, arrays: Sequence[Any]) -> None:
        """Queue on this thread's compute stream that arrays' bytes come to the device; None among them are none."""
        raise DeviceError(f"{self.name} prefetches nothing")

    def running(self) -> AbstractContextManager[object]:
        """To be held during a run of ops."""
        return _NOTHING

    def capture(self, queue: Callable[[Any], None]) -> Any:
        """What `queue` queues on this thread's compute stream, captured instead: a `devices.cuda.graph.Graph`.

        DeviceError where that cannot be.
        """
        raise DeviceError(f"{self.name} captures nothing")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """To be held during a capture: what `when_idle` is given waits, as it may wait for a stream."""
        captures = self._captures
        with captures.changed:
            captures.count += 1
        try:
            with captures.changed:
                captures.changed.wait_for(lambda: not captures.postponed)
            yield
        finally:
            with captures.changed:
                captures.count -= 1
            with suppress(IndexError):  # another thread took it
                for _ in range(len(captures.waiting)):  # which wait on if others still capture
                    captures.waiting.popleft()()

    def describe(self) -> dict[str, Any]:
        """What the device is, fact by fact, for people: what ends with _bytes is bytes, None is not known."""
        free, total = self.memory_info()
        return {"device": self.name, "memory_bytes": total, "free_bytes": free}

    def when_idle(self, call: Callable[[], None]) -> None:
        """Run `call`, which may use the device, as soon as no call to the device is under way in this thread.

        For finalizers: the garbage collector may run one in the middle of a device call, which it must not enter.
        """
        self._postponed.append(call)
        self._run_when_free()

    def _run_when_free(self) -> None:
        if self._lock.acquire(blocking=False):  # if not, this thread may be the holder: its next call will do it
            self._lock.release()
            self._run_postponed()

    def _run_postponed(self) -> None:
        captures = self._captures
        while self._postponed:
            with captures.changed:
                if captures.count:
                    captures.waiting.append(self._run_when_free)
                    return
                captures.postponed += 1
            try:
                self._run_next_postponed()
            finally:
                with captures.changed:
                    captures.postponed -= 1
                    captures.changed.notify_all()

    def _run_next_postponed(self) -> None:
        try:
            call = self._postponed.popleft()
        except IndexError:  # another thread took it
            return
        try:
            with nullcontext() if self.faults is None else self.faults.left():
                call()
        except DeviceError:
            if not self.lost:  # else there is nothing to give back, and nobody to be told
                raise


_NOTHING: AbstractContextManager[object] = nullcontext()


def readable_bytes(nbytes: int) -> str:
    """`nbytes` for people: in MiB, or in bytes where that would round to nothing."""
    return f"{nbytes / 2**20:.1f} MiB" if abs(nbytes) >= 2**20 // 10 else f"{nbytes} bytes"


def out_of_memory(device: Device, requested: int, label: str, what: str, why: str = "") -> OutOfDeviceMemory:
    """The OutOfDeviceMemory to raise for `requested` bytes that `device` has no room for.

    `what` continues "... asked for LABEL", `why` adds a remark at the end.
    """
    free, total = device.memory_info()
    holders = device.holders()
    largest = ", ".join(f"{name or 'unnamed'} {readable_bytes(nbytes)}" for name, nbytes in holders[:5]) or "none"
    message = (
        f"{device.name} device: {readable_bytes(requested)} asked for {label or 'unnamed'!r}{what}, "
        f"{readable_bytes(free)} of {readable_bytes(total)} free; largest holders: {largest}"
        f"{why}. Use smaller batches, share blobs between nets, or trim what is no longer needed"
    )
    return OutOfDeviceMemory(message, requested, free, total, holders)


def host_bytes(array: Any, device: str) -> np.ndarray:
    """The bytes of a contiguous host array, or of anything with a buffer, as uint8, in place.

    DeviceError naming the device if they are not contiguous.
    """
    if not isinstance(array, np.ndarray):
        return np.frombuffer(array, np.uint8)
    if array.ndim == 1 and array.itemsize == 1 and array.strides == (1,) and array.dtype == np.uint8:
        return array  # at once, as memories have theirs
    if not array.flags.c_contiguous:
        if not array.flags.f_contiguous:
            raise DeviceError(
                f"{device} device: cannot copy an array of shape {array.shape} and strides {array.strides} as it is "
                f"not contiguous; copy through np.ascontiguousarray(array)"
            )
        array = array.T
    return array.reshape(-1).view(np.uint8)
