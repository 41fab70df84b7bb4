"""A CUDA driver whose GPU is host memory, and which can be made to fail for good: cuda-bindings' calls, as far as used.

What is queued is done at once. `lose` is what a wild kernel does: from then on all calls fail but those that only ask.
"""

import ctypes
import enum
import itertools

import numpy as np


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
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


class FakeCuda:
    """See the module. GPU 0 is the only one, its context current in every thread.

    Attributes:
        lost: whether it fails.
        held: the arrays that stand for its allocations, by address.
    """

    CUresult = CUresult
    CUdevice_attribute = CUevent_flags = CUstream_flags = _AnyName()
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CONTEXTS = itertools.count(0xC0)

    def __init__(self):
        self.lost = False
        self.context = next(self.CONTEXTS)
        self.held = {}
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
            return (CUresult.CUDA_SUCCESS, function(self, *arguments) if function else self._number())

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

    def _cuMemAlloc(self, nbytes, *_):
        array = np.zeros(nbytes, np.uint8)
        self.held[array.ctypes.data] = array
        return array.ctypes.data

    _cuMemHostAlloc = _cuMemAlloc

    def _cuMemFree(self, address):
        del self.held[address]

    def _cuMemcpyDtoD(self, target, source, nbytes, *_):
        ctypes.memmove(target, source, nbytes)

    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _cuMemcpyDtoD

    def _cuMemsetD8Async(self, address, value, nbytes, *_):
        ctypes.memset(address, value, nbytes)
