"""A CUDA driver whose GPU is host memory, and which can be made to fail for good: cuda-bindings' calls, as far as used.

What is queued is done at once. `lose` is what a wild kernel does: from then on all calls fail but those that only ask.
"""

import ctypes
import enum
import itertools
import types

import numpy as np


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


ALWAYS = {
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetDevice", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName",
    "cuDeviceGetAttribute",
}  # fmt: skip


class _AnyName:
    def __getattr__(self, name):
        return name


class _Failed(Exception):
    """A call's own failure, with its code."""


class FakeCuda:
    """See the module. GPU 0 is the only one, its context current in every thread.

    Attributes:
        lost: whether it fails.
        held: the arrays that stand for its allocations, by address.
        kinds: of each which call it came from.
        capacity: bytes there are.
        unready: addresses that no work may use yet, with the stream that has them once it is waited for.
        prefetched: (address, bytes, stream) of what was brought to the GPU.
    """

    CUresult = CUresult
    CUdevice_attribute = CUevent_flags = CUstream_flags = CUmemLocationType = CUmemAttach_flags = _AnyName()
    CUmemLocation = types.SimpleNamespace
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CONTEXTS = itertools.count(0xC0)

    def __init__(self):
        self.lost = False
        self.context = next(self.CONTEXTS)
        self.held, self.kinds, self.unready, self.prefetched = {}, {}, {}, []
        self.capacity = 1 << 36
        self._numbers = 0

    def lose(self):
        self.lost = True

    def install(self, monkeypatch):
        """Be the driver that blobmem finds, until the test ends."""
        from blobmem.devices.cuda import calls, context, device, driver

        for module in (calls, context, device, driver):
            monkeypatch.setattr(module, "bindings", lambda: self)
        monkeypatch.setattr(context, "_contexts", {})
        monkeypatch.setattr(calls, "losses", losses := {})
        monkeypatch.setattr(context, "losses", losses)

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(type(self), f"_{name}", None)

        def call(*arguments):
            if self.lost and name not in ALWAYS:
                return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None)
            try:
                return (CUresult.CUDA_SUCCESS, function(self, *arguments) if function else self._number())
            except _Failed as failed:
                return (failed.args[0], None)

        call.__name__ = name  # messages have it
        return call

    def _number(self):
        """What stands for a stream or an event."""
        self._numbers += 1
        return self._numbers

    def _cuCtxGetCurrent(self):
        return self.context

    def _cuCtxGetDevice(self):
        return 0

    _cuDeviceGet = _cuMemHostGetDevicePointer = lambda self, first, *_: first

    def _cuDeviceGetCount(self):
        return 1

    def _cuDeviceGetName(self, length, device):
        return b"Fake\0"

    def _cuDeviceGetAttribute(self, name, device):
        return 0 if "VIRTUAL" in name else 9  # no mapping: an allocation is the driver's own

    def _new(self, nbytes, kind):
        if nbytes > self._cuMemGetInfo()[0]:
            raise _Failed(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        array = np.zeros(nbytes, np.uint8)
        self.held[array.ctypes.data], self.kinds[array.ctypes.data] = array, kind
        return array.ctypes.data

    def _cuMemGetInfo(self):
        return self.capacity - sum(array.nbytes for array in self.held.values()), self.capacity

    def _cuMemAlloc(self, nbytes, *_):
        return self._new(nbytes, "plain")

    _cuMemHostAlloc = _cuMemAlloc

    def _cuMemAllocManaged(self, nbytes, flags):
        return self._new(nbytes, "managed")

    def _cuMemAllocAsync(self, nbytes, stream):
        address = self._new(nbytes, "async")
        self.unready[address] = stream
        return address

    def _cuMemFree(self, address):
        assert self.kinds.pop(address) != "async"
        del self.held[address]

    def _cuMemFreeAsync(self, address, stream):
        assert self.kinds.pop(address) == "async" and address not in self.unready
        del self.held[address]

    def _cuStreamSynchronize(self, stream):
        self.unready = {address: other for address, other in self.unready.items() if other != stream}

    def _cuMemPrefetchAsync(self, address, nbytes, location, flags, stream):
        assert (location.type, location.id, flags) == ("CU_MEM_LOCATION_TYPE_DEVICE", 0, 0)
        whole = ((start, array.nbytes) for start, array in self.held.items() if self.kinds[start] == "managed")
        if not any(start <= address and address + nbytes <= start + size for start, size in whole):
            raise _Failed(CUresult.CUDA_ERROR_INVALID_VALUE)
        self.prefetched.append((address, nbytes, stream))

    def _cuMemcpyDtoD(self, target, source, nbytes, *_):
        assert not {target, source} & self.unready.keys(), "the stream has not come there yet"
        ctypes.memmove(target, source, nbytes)

    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _cuMemcpyDtoD

    def _cuMemsetD8Async(self, address, value, nbytes, *_):
        ctypes.memset(address, value, nbytes)
