"""What runs need of memories: capacity on one side, had all at once or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from blobmem.devices import HOST
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.synced import shrinks


class Need(NamedTuple):
    """Capacity that a run will use: bytes from the start of one side of a memory."""

    memory: SyncedMemory
    side: Side
    nbytes: int

    @property
    def capacity(self) -> int:
        """What there is of it."""
        return self.memory.gpu_capacity if self.side is _DEVICE else self.memory.cpu_capacity


_HOST, _DEVICE = Side.HOST, Side.DEVICE  # found faster so, by what every pass does hundreds of times
_LITTLE = 1 << 30  # bytes on the host that are had without asking


def secure(needs: Iterable[Need]) -> None:
    """Allocate all of it or nothing.

    Raises OutOfDeviceMemory (or MemoryError, where the host lacks address space) with every capacity as it was before.
    """
    grown: list[Need] = []
    on_host: list[tuple[str, int]] = []
    try:
        for memory, side, nbytes in needs:
            before = memory.gpu_capacity if side is _DEVICE else memory.cpu_capacity
            if nbytes > before:
                if side is Side.HOST and memory.device.compute:
                    on_host.append((memory.name, nbytes - before))
                memory.reserve(side, nbytes)
                grown.append(Need(memory, side, before))
        _check_host(on_host)
    except MemoryError:
        for memory, side, before in reversed(grown):
            memory.unreserve(side, before)
        raise


def _check_host(wanted: list[tuple[str, int]]) -> None:
    """Raise OutOfDeviceMemory if the machine has not got what these memories will take.

    Its pages are only had when they are touched, and the system then ends some process.
    """
    nbytes = sum(more for _, more in wanted)
    if nbytes < _LITTLE:
        return
    free, total = HOST.memory_info()
    if nbytes > free > 0:
        name, most = max(wanted, key=lambda item: item[1])
        raise OutOfDeviceMemory(
            f"asked for {nbytes / 2**20:.0f} MB more of the host's memory, most of it ({most / 2**20:.0f} MB) for "
            f"'{name}'; {free / 2**20:.0f} MB of {total / 2**20:.0f} MB are free: take a smaller batch or net",
            nbytes, free, total,
        )  # fmt: skip


class Constant:
    """Needs that are the same in every run."""

    __slots__ = ("_met", "needs")

    def __init__(self, needs: list[Need]) -> None:
        self.needs = needs
        self._met = -1  # `shrinks` when all of them were

    def missing(self) -> list[Need]:
        """Those that are not met. Once all are, nothing is looked at until some memory shrinks."""
        now = shrinks()
        if self._met == now:
            return []
        missing = [need for need in self.needs if need.nbytes > need.capacity]
        if not missing:
            self._met = now
        return missing
