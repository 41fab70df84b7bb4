"""Allocators to choose from: where a CUDA device has its memory from, besides the mapped chunks of `space`.

All are `PlainMemory`, whose growth moves; each says only how bytes are had and given back. Counting, limits and errors
are the device's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from blobmem.devices.cuda.calls import failure
from blobmem.devices.cuda.chunks import NoRoom
from blobmem.devices.cuda.context import Context, CudaStream
from blobmem.devices.cuda.driver import PlainMemory, make_space
from blobmem.devices.cuda.space import Space
from blobmem.devices.pages import HUGE, round_up
from blobmem.errors import DeviceError

ALLOCATORS = ("pool", "direct", "async", "rmm", "managed")

SPARE = 512 << 20
"""Bytes of the card that managed memory leaves free: what kernels and libraries took there later would push it out."""


def make(name: str, context: Context, red_zones: bool | str = False) -> Space | PlainMemory:
    """The allocator of that name. DeviceError if there is none such, or this machine lacks what it needs."""
    if name not in ALLOCATORS:
        raise DeviceError(f"allocator '{name}' is not one of {', '.join(ALLOCATORS)}")
    if name == "pool":
        return make_space(context.ordinal, context.bind, red_zones)
    if red_zones:
        raise DeviceError(f"allocator '{name}' has no red zones: leave one of the two out")
    if name == "direct":
        return PlainMemory(context.bind)
    kinds: dict[str, type[_Ordered]] = {"async": AsyncMemory, "rmm": RmmMemory, "managed": ManagedMemory}
    return kinds[name](context)


class _Ordered(PlainMemory, ABC):
    """Memory that is had and given back in the order of a stream, here one of its own, which is waited for."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.bind)
        self._context = context
        self._stream = CudaStream(context, apart=True)

    @abstractmethod
    def _order(self, nbytes: int) -> int:
        """The address of bytes that are there once the stream has come so far. NoRoom changes nothing."""

    def _take(self, nbytes: int) -> int:
        address = self._order(nbytes)
        self.call(self._cu.cuStreamSynchronize, self._stream.native)
        return address


class AsyncMemory(_Ordered):
    """The driver's stream-ordered pool, the one that is current for the GPU; what it keeps is as that is set."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if not context.attribute("MEMORY_POOLS_SUPPORTED"):
            raise DeviceError("this GPU's driver has no stream-ordered pool: use another allocator than async")

    def _order(self, nbytes: int) -> int:
        return int(self.call(self._cu.cuMemAllocAsync, nbytes, self._stream.native))

    def _give(self, address: int, nbytes: int) -> None:
        self.call(self._cu.cuMemFreeAsync, address, self._stream.native)


class RmmMemory(_Ordered):
    """RMM's current device resource, so that one pool serves all libraries in the process that use RMM.

    The resource that is current is asked at each allocation, and gets back what it gave.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        try:
            from rmm.mr import get_current_device_resource
            from rmm.pylibrmm.stream import Stream
        except ImportError as error:
            raise DeviceError(f"allocator 'rmm' needs RMM ({error}): pip install 'blobmem[rmm]'") from error
        self._current, self._rmm_stream = get_current_device_resource, Stream(self._stream)
        self._owners: dict[int, Any] = {}

    def _order(self, nbytes: int) -> int:
        self._bind()
        resource = self._current()
        try:
            address = int(resource.allocate(nbytes, self._rmm_stream))
        except MemoryError as error:
            raise NoRoom(f"RMM: {error}") from None
        except RuntimeError as error:
            raise DeviceError(f"RMM: {error}") from error
        self._owners[address] = resource
        return address

    def _give(self, address: int, nbytes: int) -> None:
        self._bind()
        self._owners.pop(address).deallocate(address, nbytes, self._rmm_stream)


class ManagedMemory(_Ordered):
    """Unified memory, brought to the GPU when it is allocated and by `prefetch`.

    Never more than the card has free: pages that go to and fro are slow, and can hang a GPU that others use.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if not context.attribute("CONCURRENT_MANAGED_ACCESS"):
            raise DeviceError(
                "this GPU's driver brings no unified memory to it here: use another allocator than managed"
            )
        self._place = self._cu.CUmemLocation()
        self._place.type, self._place.id = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, context.ordinal

    def _order(self, nbytes: int) -> int:
        free, _ = self._context.memory_info()
        if round_up(nbytes, HUGE) + SPARE > free:
            raise NoRoom(f"{nbytes} bytes of unified memory would leave less than {SPARE} of the card's {free} free")
        address = int(self.call(self._cu.cuMemAllocManaged, nbytes, self._cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))
        try:
            self.call(self._cu.cuMemPrefetchAsync, address, nbytes, self._place, 0, self._stream.native)
        except (NoRoom, DeviceError):
            self.call(self._cu.cuMemFree, address)
            raise
        return address

    def prefetch(self, address: int, nbytes: int, stream: CudaStream) -> None:
        """Queue on a stream that bytes come to the GPU, if they have left it; those that are not ours stay."""
        code = self._cu.cuMemPrefetchAsync(address, nbytes, self._place, 0, stream.native)[0]
        if code and code != self._cu.CUresult.CUDA_ERROR_INVALID_VALUE:  # no unified memory: a user's array
            raise failure(code, "bringing unified memory to the GPU")
