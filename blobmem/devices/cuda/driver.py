"""GPU memory from the CUDA driver: mapped by hand where the platform can, else whole allocations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.devices.cuda.calls import bindings, check, failure
from blobmem.devices.cuda.chunks import NoRoom
from blobmem.devices.cuda.space import Space
from blobmem.errors import DeviceError

__all__ = ["NoRoom", "Overrun", "PlainMemory", "VirtualMemory", "make_space"]

RED_ZONE = 4096
_RED = 0xFD


class Overrun(DeviceError):
    """Something wrote beside an allocation."""

    def __init__(self, address: int, where: str) -> None:
        super().__init__(f"CUDA: something wrote {where} the allocation at {address:#x}")
        self.address = address


def make_space(ordinal: int, bind: Callable[[], None], red_zones: bool | str = False) -> Space | PlainMemory:
    """The allocator of a GPU. `bind` makes its context current in the calling thread; `red_zones` as for CudaDevice."""
    bind()
    driver = bindings()
    device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if red_zones or not check(driver.cuDeviceGetAttribute(attribute, device), "cuDeviceGetAttribute"):
        return PlainMemory(bind, RED_ZONE if red_zones else 0, RED_ZONE if red_zones is True else 0)
    return Space(VirtualMemory(ordinal, bind))


class _Calls:
    """Driver calls in a context that `bind` makes current."""

    def __init__(self, bind: Callable[[], None]) -> None:
        self._cu = bindings()
        self._bind = bind
        self._full = self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a driver function gives, if anything. NoRoom, or DeviceError with the names of function and error."""
        self._bind()
        result = function(*arguments)
        if result[0]:
            if result[0] == self._full:
                raise NoRoom(f"CUDA: {function.__name__} found no room")
            raise failure(result[0], function.__name__)
        return result[-1]

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU: after all work queued so far, and finished when it returns."""
        self.synchronize()  # the copy would only come after work on streams that follow the legacy default stream
        self.call(self._cu.cuMemcpyDtoD, target, source, nbytes)
        self.synchronize()  # and the call returns before the copy is done

    def synchronize(self) -> None:
        """Wait for all work queued on the GPU."""
        self.call(self._cu.cuCtxSynchronize)


class VirtualMemory(_Calls):
    """Physical memory and addresses of one GPU; see `chunks.Driver`, whose calls these are."""

    def __init__(self, ordinal: int, bind: Callable[[], None]) -> None:
        super().__init__(bind)
        cu = self._cu
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = cu.CUmemAccessDesc()
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._properties.location, self._access.location):
            location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = ordinal
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self.call(cu.cuMemGetAllocationGranularity, self._properties, minimum))

    def reserve(self, nbytes: int) -> int:
        return int(self.call(self._cu.cuMemAddressReserve, nbytes, self.granularity, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self.call(self._cu.cuMemAddressFree, address, nbytes)

    def create(self, nbytes: int) -> Any:
        return self.call(self._cu.cuMemCreate, nbytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        self.call(self._cu.cuMemRelease, handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self.call(self._cu.cuMemMap, address, nbytes, 0, handle, 0)
        try:
            self.call(self._cu.cuMemSetAccess, address, nbytes, [self._access], 1)
        except (NoRoom, DeviceError):
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self.call(self._cu.cuMemUnmap, address, nbytes)


class PlainMemory(_Calls):
    """The calls of `Space` over allocations of the driver's own: growth moves, and shrinking gives nothing back.

    `allocators` has others, which have and give back their bytes elsewhere.

    Args:
        bind: makes the context current.
        before, after: bytes to keep on either side of each allocation, which `free` and `check` look at. Where none
            are kept after it, its end is the driver's, so that the driver's checkers see what reads or writes beyond.
    """

    def __init__(self, bind: Callable[[], None], before: int = 0, after: int = 0) -> None:
        super().__init__(bind)
        self._before, self._after = before, after
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}

    @property
    def physical_bytes(self) -> int:
        """Bytes asked of the driver."""
        with self._lock:
            return sum(self._sizes.values()) + len(self._sizes) * (self._before + self._after)

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` > 0 new bytes, contents undefined. NoRoom changes nothing."""
        address = self._take(self._before + nbytes + self._after) + self._before
        zones = (address - self._before, self._before), (address + nbytes, self._after)
        for start, size in zones:
            if size:
                self.call(self._cu.cuMemsetD8, start, _RED, size)
        if self._before or self._after:
            self.synchronize()
        with self._lock:
            self._sizes[address] = nbytes
        return address

    def _take(self, nbytes: int) -> int:
        """The address of new bytes, which any stream may use. NoRoom changes nothing."""
        return int(self.call(self._cu.cuMemAlloc, nbytes))

    def _give(self, address: int, nbytes: int) -> None:
        """Give back what `_take` gave; the GPU has finished with it."""
        self.call(self._cu.cuMemFree, address)

    def check(self) -> None:
        """Overrun if a red zone was written."""
        if not self._before and not self._after:
            return
        with self._lock:
            sizes = dict(self._sizes)
        for address, nbytes in sizes.items():
            self._check(address, nbytes)

    def _check(self, address: int, nbytes: int) -> None:
        before, after = (
            self._written(address - self._before, self._before),
            self._written(address + nbytes, self._after),
        )
        if before.size:
            raise Overrun(address, f"{self._before - before[0]} bytes before")
        if after.size:
            raise Overrun(address, f"{after[-1] + 1} bytes beyond the end of")

    def _written(self, start: int, nbytes: int) -> np.ndarray:
        """Which bytes of a red zone are not what they were."""
        zone = np.empty(nbytes, np.uint8)
        if nbytes:
            self.call(self._cu.cuMemcpyDtoH, zone.ctypes.data, start, nbytes)
        return np.flatnonzero(zone != _RED)

    def grow(self, address: int, old: int, new: int) -> int:
        """Make an allocation `new` bytes large, contents kept; the address it then has. NoRoom changes nothing."""
        if self.grows_in_place(address, new):
            return address
        self._check(address, self._sizes[address])
        moved = self.allocate(new)
        self.copy(moved, address, old)
        self.free(address)
        return moved

    def shrink(self, address: int, old: int, new: int) -> None:
        """Nothing: the driver takes back whole allocations only. Growth to what it was needs no more."""

    def free(self, address: int) -> None:
        """Give an allocation back. Overrun if its red zones were written; it is given back all the same."""
        self.synchronize()
        with self._lock:
            nbytes = self._sizes.pop(address)
        try:
            self._check(address, nbytes)
        finally:
            self._give(address - self._before, self._before + nbytes + self._after)

    def grows_in_place(self, address: int, new: int) -> bool:
        """Whether there is as much room since the allocation was larger."""
        with self._lock:
            return new <= self._sizes[address]
