"""What tests of the memory core do with a device: read and write its bytes, and count what it does."""

import numpy as np

from blobmem.memory import Intent, Side

NBYTES = 1024  # of what tests of copies send to and fro


def read(device, address, nbytes, stream=None):
    got = np.zeros(nbytes, np.uint8)
    device.memcpy_dtoh(got, address, stream)
    return got


def write(device, address, value, nbytes, stream=None):
    device.memcpy_htod(address, np.full(nbytes, value, np.uint8), stream)


def fill(memory, value, offset=0, nbytes=NBYTES):
    """Write on the device, at once."""
    address = memory.access(Side.DEVICE, offset, nbytes, Intent.OVERWRITE)
    memory.device.as_array(address, (nbytes,), np.uint8)[...] = value


def on_device(memory, offset=0, nbytes=NBYTES):
    address = memory.access(Side.DEVICE, offset, nbytes, Intent.READ)
    return memory.device.as_array(address, (nbytes,), np.uint8).copy()


class Counts:
    """What a device did since the last look: (htod copies, bytes, dtoh copies, bytes, memsets, allocator calls)."""

    def __init__(self, device):
        self.device, self.last = device, device.statistics.snapshot()

    def __call__(self):
        now = self.device.statistics.snapshot()
        d, self.last = now - self.last, now
        return d.htod_copies, d.htod_bytes, d.dtoh_copies, d.dtoh_bytes, d.memsets, d.allocator_calls
