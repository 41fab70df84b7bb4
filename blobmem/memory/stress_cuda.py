"""A GPU for the stress test: little room, calls that fail on demand, and streams that are behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blobmem.devices.base import Stream, out_of_memory
from blobmem.devices.cuda.calls import bindings, check
from blobmem.devices.cuda.device import CudaDevice
from blobmem.errors import DeviceError
from blobmem.memory.stress_model import CAPACITY

BALLAST = 256 << 20
"""Bytes that are set before anything is queued on a stream: 0.1 ms of an H200's time, in which the host goes on."""


class StressedCuda(CudaDevice):
    """See the module.

    Attributes:
        fail_at: None, or a callable of (name of the call, 0) that is true for a call to fail, as SimulatedDevice's.
    """

    def __init__(self, ordinal: int = 0, **options: Any) -> None:
        super().__init__(ordinal, limit=CAPACITY, **options)
        self.fail_at: Callable[[str, int], bool] | None = None
        self.context.bind()
        self._ballast = check(bindings().cuMemAlloc(BALLAST), "cuMemAlloc")

    def close(self) -> None:
        """Free what slows the streams down."""
        self.synchronize()
        check(bindings().cuMemFree(self._ballast), "cuMemFree")

    def allocate(self, nbytes: int, label: str = "") -> int:
        if self._fails("allocate"):
            raise out_of_memory(self, nbytes, label, "", "; fail_at asked for this failure")
        return super().allocate(nbytes, label)

    def grow(self, address: int, old: int, new: int) -> int:
        if self._fails("grow"):
            raise out_of_memory(self, new - old, self._whole(address, old)[1], "", "; fail_at asked for this failure")
        return super().grow(address, old, new)

    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        self._begin("memcpy_htod", stream)
        super().memcpy_htod(address, array, stream)

    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        self._begin("memcpy_dtoh", stream)
        super().memcpy_dtoh(array, address, stream)

    def memset(self, address: int, value: int, nbytes: int, stream: Stream | None = None) -> None:
        self._begin("memset", stream)
        super().memset(address, value, nbytes, stream)

    def _begin(self, name: str, stream: Stream | None) -> None:
        if self._fails(name):
            raise DeviceError(f"{self.name}: {name} fails, as fail_at asked; nothing was copied")
        if stream is not None:
            queue = self._stream(stream)
            check(bindings().cuMemsetD8Async(self._ballast, 0, BALLAST, queue.native), "cuMemsetD8Async")

    def _fails(self, name: str) -> bool:
        return self.fail_at is not None and self.fail_at(name, 0)
