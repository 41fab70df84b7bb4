"""What is in use on a GPU, by three counts: ours, the driver's and NVML's."""

from __future__ import annotations

from typing import NamedTuple

from blobmem.devices.cuda.device import CudaDevice


class Card(NamedTuple):
    """Bytes in use on a GPU at one moment.

    Attributes:
        held: what a device of ours holds, exactly.
        mapped: the same in whole chunks.
        driver: in use by everybody, as the driver says.
        nvml: the same as NVML says, with what it keeps for itself; None where it cannot be asked.
    """

    held: int
    mapped: int
    driver: int
    nvml: int | None

    @property
    def others(self) -> int:
        """What is not ours: CUDA's context, its libraries, other processes."""
        return self.driver - self.mapped


def card(device: CudaDevice) -> Card:
    """What is in use now, once all queued work is done."""
    device.synchronize()
    free, total = device.context.memory_info()
    return Card(device.statistics.bytes_held, device.physical_bytes, total - free, _nvml(device))


def _nvml(device: CudaDevice) -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no NVML in this container: pynvml has an exception for each reason
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(device.context.bus_id())
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
