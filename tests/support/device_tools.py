"""What tests of the memory core do with a device: read and write its bytes, and count what it does."""

import numpy as np


def read(device, address, nbytes, stream=None):
    got = np.zeros(nbytes, np.uint8)
    device.memcpy_dtoh(got, address, stream)
    return got


def write(device, address, value, nbytes, stream=None):
    device.memcpy_htod(address, np.full(nbytes, value, np.uint8), stream)


class Counts:
    """What a device did since the last look: (htod copies, bytes, dtoh copies, bytes, memsets, allocator calls)."""

    def __init__(self, device):
        self.device, self.last = device, device.statistics.snapshot()

    def __call__(self):
        now = self.device.statistics.snapshot()
        d, self.last = now - self.last, now
        return d.htod_copies, d.htod_bytes, d.dtoh_copies, d.dtoh_bytes, d.memsets, d.allocator_calls
