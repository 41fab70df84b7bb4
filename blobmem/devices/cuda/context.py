"""A CUDA context: the one that is current, or the device's primary one, with what is loaded into it.

Driver calls go through cuda-bindings: PyCUDA's own streams, events and modules may only be dropped by the thread that
made them, and nets run in any. PyCUDA's context is the one they all share.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.devices.base import Captures, Event, Stream
from blobmem.devices.cuda import sources
from blobmem.devices.cuda.calls import bindings, check, failure, losses
from blobmem.devices.cuda.compiler import compile_source
from blobmem.devices.cuda.faults import Faults
from blobmem.devices.cuda.turns import Turns
from blobmem.errors import DeviceError

LEAST_CAPABILITY = (7, 5)

_contexts: dict[int, Context] = {}
_lock = threading.RLock()


def count() -> int:
    """Number of GPUs."""
    return int(check(bindings().cuDeviceGetCount(), "cuDeviceGetCount"))


class CudaEvent(Event):
    """See Event. Its driver object goes back to a pool."""

    __slots__ = ("context", "handle")

    def __init__(self, context: Context, handle: Any) -> None:
        self.context, self.handle = context, handle

    @property
    def done(self) -> bool:
        driver = bindings()
        self.context.bind()
        code = driver.cuEventQuery(self.handle)[0]
        if code and code != driver.CUresult.CUDA_ERROR_NOT_READY:
            raise failure(code, "cuEventQuery")
        return not code

    def synchronize(self) -> None:
        self.context.call(bindings().cuEventSynchronize, self.handle)
        self.context.faults.check()

    def __del__(self) -> None:
        self.context.events.append(self.handle)


class CudaStream(Stream):
    """See Stream. Ordered with the legacy default stream, unless `apart`. Its driver object goes back to a pool.

    Attributes:
        handle: the CUstream, as an integer.
    """

    def __init__(self, context: Context, apart: bool = False) -> None:
        self.context = context
        self.apart = apart
        self.native = context.take_stream(apart)
        self.handle = int(self.native)

    def synchronize(self) -> None:
        self.context.bind()
        check(bindings().cuStreamSynchronize(self.native), "cuStreamSynchronize")
        self.context.faults.check()

    def record(self) -> CudaEvent:
        event = CudaEvent(self.context, self.context.take_event())
        self.context.call(bindings().cuEventRecord, event.handle, self.native)
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent) or event.context is not self.context:
            raise DeviceError(f"{event!r} is not an event of this CUDA device")
        self.context.call(bindings().cuStreamWaitEvent, self.native, event.handle, 0)

    def __cuda_stream__(self) -> tuple[int, int]:
        """What other libraries take for a stream: the protocol's version, and the handle."""
        return 0, self.handle

    def __del__(self) -> None:
        self.context.streams[self.apart].append(self.native)


class Context:
    """See the module. One for each CUDA context in the process; `of` finds it.

    Attributes:
        ordinal, name, capability: of the GPU.
        native: the CUcontext.
        faults: what kernels found wrong.
    """

    def __init__(self, ordinal: int, native: Any) -> None:
        driver = bindings()
        self.ordinal, self.native, self._key = ordinal, native, int(native)
        self._entered = False
        device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        attribute = driver.CUdevice_attribute
        self._attribute = lambda name: int(
            check(driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device), name)
        )
        self.capability = (
            self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.name = check(driver.cuDeviceGetName(256, device), "cuDeviceGetName").split(b"\0")[0].decode()
        if self.capability < LEAST_CAPABILITY:
            raise DeviceError(
                f"GPU {ordinal} ({self.name}) has compute capability {'.'.join(map(str, self.capability))}; "
                f"CUDA 13 and blobmem need {'.'.join(map(str, LEAST_CAPABILITY))} or more: use device cpu"
            )
        own = "a" if self.capability == (9, 0) else ""  # instructions that no later one has
        self.architecture = "sm_{}{}{}".format(*self.capability, own)
        self.streams: tuple[list[Any], list[Any]] = ([], [])
        self.events: list[Any] = []
        self._local = threading.local()
        self._functions: dict[tuple[str, str, str], Any] = {}
        self._modules: dict[tuple[str, str], Any] = {}
        self._load_lock = threading.Lock()
        self.turns = Turns()
        self.captures = Captures()  # of all devices: a thread has the same stream for each
        self.bind()
        pointer = check(driver.cuMemHostAlloc(4096, driver.CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc")
        words = np.ctypeslib.as_array((ctypes.c_int64 * 4).from_address(int(pointer)))
        flag = int(check(driver.cuMemAlloc(8), "cuMemAlloc"))
        words[:] = 0, 0, 0, flag
        address = int(check(driver.cuMemHostGetDevicePointer(pointer, 0), "cuMemHostGetDevicePointer"))
        self.faults = Faults(words, address, self.settle, lambda: driver.cuMemsetD8(flag, 0, 8))
        check(driver.cuMemsetD8(flag, 0, 8), "cuMemsetD8")

    @staticmethod
    def of(ordinal: int) -> Context:
        """The context to use on a GPU: the current one if it is there, else the primary one. DeviceError if neither."""
        driver = bindings()
        with _lock:
            if not 0 <= ordinal < count():
                raise DeviceError(f"there is no GPU {ordinal}: this machine has {count()}, counted from 0")
            native = driver.cuCtxGetCurrent()[1]
            if not int(native) or int(check(driver.cuCtxGetDevice(), "cuCtxGetDevice")) != ordinal:
                native = _primary(ordinal)
            context = _contexts.get(int(native))
            if context is None:
                losses.pop(int(native), None)  # another one's, which was there before
                context = _contexts[int(native)] = Context(ordinal, native)
            return context

    def enter_pycuda(self) -> None:
        """Let PyCUDA's own objects find this context in the main thread, if it is the primary one.

        PyCUDA keeps its own stack of contexts in each thread, and ends the process if a thread leaves one on it.
        """
        import pycuda.driver as pycuda

        if self._entered or threading.current_thread() is not threading.main_thread():
            return
        pycuda.init()
        if int(self.native) == int(_primary(self.ordinal)):
            owner = pycuda.Device(self.ordinal).retain_primary_context()
            owner.push()
            atexit.register(_leave, owner)
        self._entered = True

    @property
    def lost(self) -> bool:
        """Whether it has failed for good: then all that needs it is a DeviceError that says so."""
        return self._key in losses

    def bind(self) -> None:
        """Make the context current in this thread. DeviceError if it is lost."""
        if self._key in losses:
            raise DeviceError(losses[self._key])
        check(bindings().cuCtxSetCurrent(self.native), "cuCtxSetCurrent")

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function of the driver that finds the context by its arguments, whichever is current: mostly this one.

        Only where it fails the context is made current first, which would take as long as the call.
        """
        if function(*arguments)[0]:
            self.bind()
            check(function(*arguments), function.__name__)

    def settle(self) -> None:
        """Wait for all that is queued."""
        self.bind()
        check(bindings().cuCtxSynchronize(), "cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU's memory."""
        self.bind()
        free, total = check(bindings().cuMemGetInfo(), "cuMemGetInfo")
        return int(free), int(total)

    def bus_id(self) -> str:
        """Where the GPU is on the PCI bus, as other tools name it."""
        driver = bindings()
        device = check(driver.cuDeviceGet(self.ordinal), "cuDeviceGet")
        text: bytes = check(driver.cuDeviceGetPCIBusId(32, device), "cuDeviceGetPCIBusId")
        return text.split(b"\0")[0].decode()

    def attribute(self, name: str) -> int:
        """A device attribute by the driver's name without its prefix."""
        return self._attribute(name)

    def take_event(self) -> Any:
        """An event of the driver, without timing."""
        try:
            return self.events.pop()
        except IndexError:
            self.bind()
            return check(bindings().cuEventCreate(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")

    def take_stream(self, apart: bool) -> Any:
        """A stream of the driver."""
        try:
            return self.streams[apart].pop()
        except IndexError:
            self.bind()
            flags = bindings().CUstream_flags
            flag = flags.CU_STREAM_NON_BLOCKING if apart else flags.CU_STREAM_DEFAULT
            return check(bindings().cuStreamCreate(flag), "cuStreamCreate")

    def compute_stream(self) -> CudaStream:
        """The one of this thread's streams on which it queues work now."""
        local = self._local
        try:
            stream: CudaStream = local.stream
        except AttributeError:
            stream = local.stream = CudaStream(self)
        return stream

    def side_stream(self) -> CudaStream:
        """This thread's second stream."""
        local = self._local
        try:
            stream: CudaStream = local.side
        except AttributeError:
            stream = local.side = CudaStream(self)
        return stream

    def queue_on(self, stream: CudaStream) -> None:
        """Let this thread queue work on that one of its streams from now on."""
        self._local.stream = stream

    def function(self, source: str, name: str, dtype: np.dtype) -> Any:
        """The CUfunction of a kernel, compiled and loaded if it was not."""
        key = source, name, dtype.char
        function = self._functions.get(key)
        if function is None:
            with self._load_lock:
                driver = bindings()
                self.bind()
                module = self._modules.get((source, dtype.char))
                if module is None:
                    code = compile_source(source, dtype, self.architecture)
                    module = check(driver.cuModuleLoadData(code), f"loading kernels '{source}'")
                    self._modules[source, dtype.char] = module
                function = check(driver.cuModuleGetFunction(module, name.encode()), f"finding kernel {name}")
                shared = sources.signatures(source)[name].shared
                if shared:
                    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    check(driver.cuFuncSetAttribute(function, most, shared), f"shared memory for kernel {name}")
                self._functions[key] = function
        return function


@functools.cache
def _primary(ordinal: int) -> Any:
    """The device's primary context, kept for good."""
    driver = bindings()
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal), "cuDeviceGet")), "its context")


def _leave(owner: Any) -> None:
    """Take a context off PyCUDA's stack, at the end of the process, which PyCUDA aborts if one is left there."""
    import pycuda.driver as pycuda

    try:
        owner.pop()
    except pycuda.Error:  # it is lost
        owner.detach()


class Launcher:
    """A kernel ready to be queued: called with grid, block and arguments.

    One for each thread and kernel, since it packs arguments into a buffer of its own.
    """

    __slots__ = ("_buffer", "_call", "_extra", "_flat", "_function", "_pack", "_plain", "_shared", "_stream", "name")

    def __init__(self, context: Context, source: str, name: str, dtype: np.dtype) -> None:
        signature = sources.signatures(source)[name]
        driver = bindings()
        self.name = name
        self._function = context.function(source, name, dtype)
        packer = signature.packer(dtype)
        self._pack = packer.pack_into
        self._flat = signature.flat
        self._shared = signature.shared
        self._buffer = ctypes.create_string_buffer(max(packer.size, 1))
        self._stream = context.compute_stream
        self._call = driver.cuLaunchKernel
        size = ctypes.c_size_t(packer.size)
        # the driver's list of pairs that says "arguments are in this buffer, of this size"
        words = (ctypes.c_void_p * 5)(1, ctypes.addressof(self._buffer), 2, ctypes.addressof(size), 0)
        self._extra = words, size
        self._plain = ctypes.addressof(words)

    def pack(self, arguments: Sequence[Any]) -> bytes:
        """Put arguments where `parameters` says, until the next launch; as `put` takes them."""
        self._pack(self._buffer, 0, *self._flat(arguments))
        return self._buffer.raw

    def put(self, packed: bytes) -> None:
        """`pack` what that gave before."""
        self._buffer.raw = packed

    def parameters(self, grid: tuple[int, ...], block: int | tuple[int, ...]) -> Any:
        """A launch as a node of a graph has it, with the arguments that were packed last."""
        result = bindings().CUDA_KERNEL_NODE_PARAMS()
        result.func, result.extra = self._function, self._plain
        result.gridDimX, result.gridDimY, result.gridDimZ = (*grid, 1, 1)[:3]
        result.blockDimX, result.blockDimY, result.blockDimZ = (*np.atleast_1d(block).tolist(), 1, 1)[:3]
        result.sharedMemBytes = self._shared
        return result

    def __call__(self, grid: tuple[int, ...], block: int | tuple[int, ...], arguments: Sequence[Any]) -> None:
        self._pack(self._buffer, 0, *self._flat(arguments))
        gx, gy, gz = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        bx, by, bz = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
        result = self._call(self._function, gx, gy, gz, bx, by, bz, self._shared, self._stream().native, 0, self._plain)
        if result[0]:
            raise failure(result[0], f"launching {self.name} on {grid} blocks of {block}")
