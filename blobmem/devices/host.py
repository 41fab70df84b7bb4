"""The host-only device: layers compute in host memory, and there is no other side."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from blobmem.devices import processor
from blobmem.devices.base import Device, Stream
from blobmem.errors import DeviceError


class HostDevice(Device):
    """No device side: every call that would need one raises DeviceError; `memory_info` is the machine's."""

    name = "cpu"
    is_host = True

    def _refuse(self, what: str) -> NoReturn:
        raise DeviceError(
            f"the host has no device side, so nothing can be {what} there; choose a device, for instance "
            f"blobmem.devices.set_default(blobmem.devices.get('simulated')) or device='simulated:8GiB'"
        )

    def allocate(self, nbytes: int, label: str = "") -> int:
        self._refuse("allocated")

    def grow(self, address: int, old: int, new: int) -> int:
        self._refuse("allocated")

    def shrink(self, address: int, old: int, new: int) -> None:
        self._refuse("freed")

    def free(self, address: int) -> None:
        self._refuse("freed")

    def grows_in_place(self, address: int, new: int) -> bool:
        self._refuse("allocated")

    def relabel(self, address: int, label: str) -> None:
        self._refuse("named")

    def memcpy_htod(self, address: int, array: Any, stream: Stream | None = None) -> None:
        self._refuse("copied")

    def memcpy_dtoh(self, array: Any, address: int, stream: Stream | None = None) -> None:
        self._refuse("copied")

    def memcpy_dtod(self, dst: int, src: int, nbytes: int, stream: Stream | None = None) -> None:
        self._refuse("copied")

    def memset(self, address: int, value: int, nbytes: int, stream: Stream | None = None) -> None:
        self._refuse("set")

    def create_stream(self) -> Stream:
        self._refuse("queued")

    def synchronize(self) -> None:
        """Nothing can be in flight."""

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes of the machine's memory, as the operating system tells."""
        total, free = _sysconf("SC_PHYS_PAGES"), _sysconf("SC_AVPHYS_PAGES")
        try:
            fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
            return int(fields["MemAvailable"].split()[0]) * 1024, int(fields["MemTotal"].split()[0]) * 1024
        except (OSError, KeyError, ValueError, IndexError):
            return free, total

    def describe(self) -> dict[str, Any]:
        """The machine: its processor, its memory, the size of a page."""
        available, total = self.memory_info()
        count, usable = processor.processors()
        return {
            "device": self.name,
            "model": processor.model(),
            "architecture": platform.machine() or None,
            "cores": processor.cores(),
            "processors": count,
            "usable_processors": usable,
            # 0 is how memory_info says that the system does not tell
            "memory_bytes": total or None,
            "available_bytes": available or None,
            "page_bytes": mmap.PAGESIZE,
        }

    def holders(self) -> list[tuple[str, int]]:
        return []

    def as_array(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self._refuse("computed")


def _sysconf(name: str) -> int:
    try:
        return max(0, os.sysconf(name) * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 0


HOST = HostDevice()
