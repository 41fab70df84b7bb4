"""The CUDA device: memory by an allocator, streams, copies, kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from blobmem.devices.base import Device, Event, Stream, host_bytes, out_of_memory, readable_bytes
from blobmem.devices.cuda import allocators
from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.calls import bindings, check, failure
from blobmem.devices.cuda.context import Context, CudaStream, Launcher
from blobmem.devices.cuda.driver import NoRoom, Overrun, PlainMemory
from blobmem.devices.cuda.graph import Graph
from blobmem.devices.cuda.link import Link
from blobmem.devices.cuda.marks import Marks
from blobmem.devices.cuda.turns import Turns
from blobmem.dtypes import is_half
from blobmem.errors import DeviceError

MATHS = ("fp32", "tf32")

_LARGE = 64 << 20  # bytes, of which it is found out first whether the card has them


def takes_tensor_cores(dtype: np.dtype, math: str) -> bool:
    """Whether tensor cores multiply numbers of a dtype with a device's `math`."""
    return is_half(dtype) or (dtype == np.float32 and math == "tf32")


class CudaDevice(Device):
    """A GPU, through the CUDA context that is current when this is made, or the GPU's primary one.

    Args:
        ordinal: which GPU, from 0.
        limit: most bytes to hold, before rounding; None is what there is.
        reserve: bytes to leave free for others.
        math: "fp32", or "tf32" for products and convolutions of float32 whose factors are rounded to 10 bits.
        deterministic: only use algorithms whose result is the same in every run.
        graphs: capture what nets run again and again; None is what BLOBMEM_CUDA_GRAPHS says, 1 unless it is 0.
        red_zones: for debugging: give every memory its own allocation between guard bytes, which freeing it and
            `synchronize` look at; growth then moves. "before" keeps none after it: checkers of the driver's allocations
            then see every byte that is read or written beyond.
        allocator: where memory comes from: "pool", chunks that are mapped, so that growth leaves it where it is;
            "direct", allocations of the driver; "async", the driver's stream-ordered pool; "rmm", RMM's current device
            resource; "managed", unified memory that is brought to the GPU before each op, and nothing is captured.
            Growth moves with all but the first, which takes room for both.

    Raises DeviceError, which says what to do, without a driver, a GPU of that number, or the packages.
    """

    family = "cuda"
    streams = 2
    predicts = False
    workspace_limit: int | None = None  # bytes that a convolution may take; None is the ops' own

    def __init__(
        self,
        ordinal: int = 0,
        limit: int | None = None,
        reserve: int = 0,
        math: str = "fp32",
        deterministic: bool = False,
        graphs: bool | None = None,
        red_zones: bool | str = False,
        allocator: str = "pool",
    ) -> None:
        super().__init__()
        if math not in MATHS:
            raise DeviceError(f"math '{math}' is not one of {', '.join(MATHS)}")
        self.context = Context.of(ordinal)
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.limit, self.reserve = limit, reserve
        self.math, self.deterministic = math, deterministic
        self.graphs = os.environ.get("BLOBMEM_CUDA_GRAPHS", "1") != "0" if graphs is None else graphs
        self.model = self.context.name
        self.faults, self._captures = self.context.faults, self.context.captures
        self._space = allocators.make(allocator, self.context, red_zones)
        self.allocator = allocator
        self.prefetches = isinstance(self._space, allocators.ManagedMemory)
        if self.prefetches:
            if graphs:
                raise DeviceError("allocator 'managed' prefetches before each op, as no graph can: leave graphs out")
            self.graphs = False
        self._held: dict[int, tuple[int, str]] = {}
        self.last_uses: dict[int, Event] = {}  # of arrays that links send to, by address

    @property
    def channels_last(self) -> bool | None:
        """Whether nets keep images channels last here, as tensor cores want them; None where that is to be measured."""
        return True if self.math == "tf32" else None

    @property
    def clusters(self) -> bool:
        """Whether blocks of a kernel can run in clusters (source/cluster.cuh)."""
        return self.context.capability >= (9, 0)

    def on_tensor_cores(self, dtype: np.dtype) -> bool:
        """Whether products of a dtype run on tensor cores here; those of float32 only if of ten bits of each factor."""
        return self.context.capability >= (8, 0) and takes_tensor_cores(dtype, self.math)

    def in_warpgroups(self, dtype: np.dtype) -> bool:
        """Whether four warps at a time multiply matrices of a dtype here, as one generation of GPUs has it."""
        return self.context.capability == (9, 0) and is_half(dtype)

    @property
    def lost(self) -> bool:
        return self.context.lost

    # Allocation

    def allocate(self, nbytes: int, label: str = "") -> int:
        self._run_postponed()
        if nbytes <= 0:
            raise DeviceError(f"{self.name}: cannot allocate {nbytes} bytes for {label!r}; ask for at least one")
        with self._lock:
            address = self._take(nbytes, nbytes, lambda: self._space.allocate(nbytes))
            if address:
                self._held[address] = nbytes, label
                self.statistics.allocations += 1
                return address
        raise out_of_memory(self, nbytes, label, "", self._others())

    def grow(self, address: int, old: int, new: int) -> int:
        self._run_postponed()
        with self._lock:
            label = self._whole(address, old)[1]
            needed = new - old
            if self.allocator != "pool":  # where all that moves is less than a chunk
                needed = 0 if self._space.grows_in_place(address, new) else new
            moved = self._take(new - old, needed, lambda: self._space.grow(address, old, new))
            if moved:
                self.statistics.grows += 1
                del self._held[address]
                self._held[moved] = new, label
                if moved != address:
                    self.statistics.moves += 1
                    self.statistics.dtod_copies += 1
                    self.statistics.dtod_bytes += old
                return moved
        what = f" to grow from {readable_bytes(old)} to {readable_bytes(new)}"
        raise out_of_memory(self, needed, label, what, self._others())

    def _take(self, nbytes: int, needed: int, call: Callable[[], int]) -> int:
        """What `call` gives, with so many more bytes held after it, `needed` during it; 0 where there is no room."""
        self.context.bind()
        statistics = self.statistics
        if self.limit is not None and self._committed + needed > self.limit:
            return 0
        if self.reserve or needed >= _LARGE:
            free, total = self.context.memory_info()
            # asked for more than it has, a driver takes all there is before it refuses, with others at work on the card
            if needed > (free - self.reserve if self.reserve or self.allocator == "pool" else total):
                return 0
        try:
            address = call()
        except NoRoom:
            return 0
        statistics.peak_bytes = max(statistics.peak_bytes, statistics.bytes_held + max(nbytes, needed))
        statistics.bytes_held += nbytes
        return address

    @property
    def _committed(self) -> int:
        """Bytes of the limit that are used up: those of `shrink` too, where the allocator cannot give back a part."""
        return self.statistics.bytes_held if self.allocator == "pool" else self.physical_bytes

    def shrink(self, address: int, old: int, new: int) -> None:
        self._run_postponed()
        with self._lock:
            _, label = self._whole(address, old)
            self._space.shrink(address, old, new)
            self._held[address] = new, label
            self.statistics.bytes_held += new - old
            self.statistics.shrinks += 1

    def free(self, address: int) -> None:
        self._run_postponed()
        with self._lock:
            nbytes, label = self._whole(address)
            try:
                self._space.free(address)
            except Overrun as error:
                raise _labelled(error, label) from None
            finally:
                del self._held[address]
                self.statistics.bytes_held -= nbytes
                self.statistics.frees += 1

    def _whole(self, address: int, nbytes: int | None = None) -> tuple[int, str]:
        held = self._held.get(address)
        if held is None or nbytes not in (None, held[0]):
            raise DeviceError(f"{self.name}: no allocation of {nbytes} bytes starts at {address:#x}")
        return held

    def grows_in_place(self, address: int, new: int) -> bool:
        return bool(self._space.grows_in_place(address, new))

    def relabel(self, address: int, label: str) -> None:
        with self._lock:
            self._held[address] = self._whole(address)[0], label

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts no other thread runs a net of ours on the GPU."""
        return self.context.turns.alone()

    @contextlib.contextmanager
    def scratch(self, nbytes: int) -> Iterator[int]:
        """The address of bytes for a short while, in which no net of ours runs on the GPU.

        OutOfDeviceMemory where there is no room.
        """
        with self.alone():
            address = self.allocate(nbytes, "scratch")
            try:
                self.context.settle()  # and leaves what kernels found wrong to whoever queued them
                yield address
            finally:
                try:
                    self.context.settle()
                finally:
                    self.free(address)

    # Copies. Without a stream they take the thread's own, and wait for it.

    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        self._run_postponed()
        source = host_bytes(array, self.name)
        if source.nbytes:
            queue = self._stream(stream)
            code = bindings().cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, queue.native)[0]
            if code:
                raise failure(code, f"copying {source.nbytes} bytes to the device")
            self.statistics.htod_copies += 1
            self.statistics.htod_bytes += source.nbytes
            if stream is None:
                queue.synchronize()

    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        self._run_postponed()
        target = host_bytes(array, self.name)
        if not target.flags.writeable:
            raise DeviceError(f"{self.name}: cannot copy into a read-only host array; give one that is writable")
        if target.nbytes:
            queue = self._stream(stream)
            code = bindings().cuMemcpyDtoHAsync(target.ctypes.data, address, target.nbytes, queue.native)[0]
            if code:
                raise failure(code, f"copying {target.nbytes} bytes from the device")
            self.statistics.dtoh_copies += 1
            self.statistics.dtoh_bytes += target.nbytes
            if stream is None:
                queue.synchronize()

    def memcpy_dtod(self, dst: int, src: int, nbytes: int, stream: Stream | None = None) -> None:
        self._run_postponed()
        if nbytes:
            queue = self._stream(stream)
            code = bindings().cuMemcpyDtoDAsync(dst, src, nbytes, queue.native)[0]
            if code:
                raise failure(code, f"copying {nbytes} bytes on the device")
            self.statistics.dtod_copies += 1
            self.statistics.dtod_bytes += nbytes
            if stream is None:
                queue.synchronize()

    def memset(self, address: int, value: int, nbytes: int, stream: Stream | None = None) -> None:
        self._run_postponed()
        if nbytes:
            queue = self._stream(stream)
            code = bindings().cuMemsetD8Async(address, value, nbytes, queue.native)[0]
            if code:
                raise failure(code, f"setting {nbytes} bytes")
            self.statistics.memsets += 1
            if stream is None:
                queue.synchronize()

    def _stream(self, stream: Stream | None) -> CudaStream:
        self.context.bind()
        if stream is None:
            return self.context.compute_stream()
        if isinstance(stream, CudaStream) and stream.context is self.context:
            return stream
        raise DeviceError(f"{self.name}: {stream!r} is not one of its streams; make one with create_stream()")

    # Page-locked host memory

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host pages, so that copies of them run at the link's speed; whether the system allows it."""
        self.context.bind()
        return not bindings().cuMemHostRegister(address, nbytes, 0)[0]

    def unpin(self, address: int) -> None:
        """Undo `pin` of the pages that start there."""
        self.context.bind()
        check(bindings().cuMemHostUnregister(address), "cuMemHostUnregister")

    # Computing

    def as_array(self, address: int, shape: Sequence[int], dtype: Any) -> CudaArray:  # type: ignore[override]
        return CudaArray(address, shape, dtype, self)

    def compute_stream(self) -> CudaStream:
        return self.context.compute_stream()

    def side_stream(self) -> CudaStream:
        return self.context.side_stream()

    def queue_on(self, stream: Stream) -> None:
        self.context.queue_on(self._stream(stream))

    def running(self) -> Turns:
        self.context.bind()
        return self.context.turns

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy within the device on the thread's stream."""
        code = bindings().cuMemcpyDtoDAsync(target, source, nbytes, self.context.compute_stream().native)[0]
        if code:
            raise failure(code, f"copying {nbytes} bytes on the device")

    def set_bytes(self, target: int, value: int, nbytes: int) -> None:
        """Queue setting bytes on the thread's stream."""
        code = bindings().cuMemsetD8Async(target, value, nbytes, self.context.compute_stream().native)[0]
        if code:
            raise failure(code, f"setting {nbytes} bytes")

    def prefetch(self, arrays: Sequence[Any]) -> None:
        if isinstance(self._space, allocators.ManagedMemory):
            stream = self.context.compute_stream()
            for array in arrays:
                if array is not None and array.nbytes:
                    self._space.prefetch(array.address, array.nbytes, stream)

    def capture(self, queue: Callable[[Graph], None]) -> Graph:
        """What `queue` queues on the thread's stream, captured instead. DeviceError where that cannot be."""
        self.context.bind()
        with self.capturing():
            return Graph(self, queue)

    def marks(self) -> Marks:
        """Moments in what this thread's stream is going to capture, for the time between them."""
        return Marks(self.context)

    def timed(self, run: Callable[[], object]) -> float:
        """Milliseconds that the GPU takes for what `run` queues on this thread's stream; waits for it.

        What kernels found wrong is left to whoever waits next.
        """
        driver, stream = bindings(), self.context.compute_stream().native
        self.context.bind()
        start, stop = (check(driver.cuEventCreate(0), "cuEventCreate") for _ in range(2))
        try:
            check(driver.cuEventRecord(start, stream), "cuEventRecord")
            run()
            check(driver.cuEventRecord(stop, stream), "cuEventRecord")
            check(driver.cuEventSynchronize(stop), "cuEventSynchronize")
            return float(check(driver.cuEventElapsedTime(start, stop), "cuEventElapsedTime"))
        finally:
            for event in (start, stop):
                check(driver.cuEventDestroy(event), "cuEventDestroy")

    def kernel(self, source: str, name: str, dtype: np.dtype) -> Launcher:
        """The kernel of that name in a source, with T = dtype, for this thread."""
        table = self._table()
        key = source, name, dtype
        launcher: Launcher | None = table.get(key)
        if launcher is None:
            launcher = table[key] = Launcher(self.context, source, name, dtype)
        return launcher

    def library(self, name: str, make: Callable[[Any], Any]) -> Any:
        """What `make(device)` made of a library for this thread, under that name."""
        table = self._table()
        if name not in table:
            self.context.bind()
            table[name] = make(self)
        return table[name]

    def link(self) -> Link:
        """This thread's way for bytes of the host that travel while the device computes."""
        link: Link = self.library("link", Link)
        return link

    def _table(self) -> dict[Any, Any]:
        try:
            table: dict[Any, Any] = self.of_thread.table
        except AttributeError:
            table = self.of_thread.table = {}
        return table

    # Streams

    def create_stream(self) -> CudaStream:
        return CudaStream(self.context)

    def create_copy_stream(self) -> CudaStream:
        """A stream that nothing orders but events: for copies beside the computing."""
        return CudaStream(self.context, apart=True)

    def synchronize(self) -> None:
        self._run_postponed()
        self.context.settle()
        self.faults.check()
        if isinstance(self._space, PlainMemory):
            with self._lock:
                try:
                    self._space.check()
                except Overrun as error:
                    raise _labelled(error, self._held[error.address][1]) from None

    # Accounting

    @property
    def most_bytes(self) -> int | None:
        return self.limit

    def memory_info(self) -> tuple[int, int]:
        free, total = self.context.memory_info()
        free = max(0, free - self.reserve)
        if self.limit is not None:
            free, total = min(free, self.limit - self._committed), min(total, self.limit)
        return free, total

    @property
    def physical_bytes(self) -> int:
        """Bytes of the card's memory that are mapped for us, in whole chunks; what other allocators were asked for."""
        return int(self._space.physical_bytes)

    def other_bytes(self) -> int:
        """Bytes of the card's memory in use that are not ours: other processes, CUDA's context, its libraries."""
        free, total = self.context.memory_info()
        return total - free - self.physical_bytes

    def _others(self) -> str:
        limit = "" if self.limit is None else f", limited to {readable_bytes(self.limit)}"
        kept = "" if not self.reserve else f", {readable_bytes(self.reserve)} reserved for others"
        source = "" if self.allocator == "pool" else f", allocator {self.allocator}"
        others = readable_bytes(self.other_bytes())
        return f"; {others} held by other processes, CUDA and its libraries{limit}{kept}{source}"

    def holders(self) -> list[tuple[str, int]]:
        with self._lock:
            held = [(label, nbytes) for nbytes, label in self._held.values()]
        return sorted(held, key=lambda holder: -holder[1])

    def describe(self) -> dict[str, Any]:
        """The GPU: name, compute capability, memory, driver."""
        free, total = self.context.memory_info()
        driver = bindings()
        version = int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion"))
        attribute = self.context.attribute
        return {
            "device": self.name,
            "model": self.context.name,
            "compute_capability": ".".join(map(str, self.context.capability)),
            "multiprocessors": attribute("MULTIPROCESSOR_COUNT"),
            "clock_mhz": attribute("CLOCK_RATE") // 1000,
            "memory_bytes": total,
            "free_bytes": free,
            "l2_cache_bytes": attribute("L2_CACHE_SIZE"),
            "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        }


def _labelled(error: Overrun, label: str) -> DeviceError:
    return DeviceError(f"{error}, {label or 'unnamed'!r}")
