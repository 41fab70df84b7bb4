"""What comes after what when bytes of the host travel beside the computing."""

import numpy as np
import pytest
from cuda_devices import GPU

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.link import Link


class Stream:
    def __init__(self, name, log):
        self.name, self.log, self.count = name, log, 0

    def record(self):
        self.count += 1
        return f"{self.name}{self.count}"

    def wait(self, event):
        self.log.append(f"{self.name} waits for {event}")


class Device:
    """Says in `log` what is queued on its streams, whose events are numbered."""

    def __init__(self):
        self.log, self.last_uses = [], {}
        self.compute = Stream("compute", self.log)

    def compute_stream(self):
        return self.compute

    def create_copy_stream(self):
        return Stream("copy", self.log)

    def memcpy_htod(self, address, source, stream):
        self.log.append(f"{stream.name} {source.nbytes} bytes to {address}")


def test_the_order_of_copies_and_uses():
    device = Device()
    link, source = Link(device), np.zeros(8, np.uint8)
    first, second = (CudaArray(address, (8,), np.uint8, device) for address in (512, 1024))

    def queued(call, *arguments):
        device.log.clear()
        result = call(*arguments)
        return result, list(device.log)

    # before it is known who used it: after all
    assert queued(link.send, first, source) == (
        "copy1", ["copy waits for compute1", "copy 8 bytes to 512", "compute waits for copy1"]
    )  # fmt: skip
    assert queued(link.used, first) == (None, [])  # compute2
    assert queued(link.send, second, source)[1][0] == "copy waits for compute3"
    link.used(second)  # compute4
    assert queued(link.send, first, source)[1][0] == "copy waits for compute2"
    # a use that was not told of (an op that failed)
    assert queued(link.send, first, source)[1][0] == "copy waits for compute5"
    # another thread's link knows it too
    assert queued(Link(device).send, second, source)[1][0] == "copy waits for compute4"


@pytest.mark.parametrize("make", [GPU])
def test_copies_do_not_pass_what_uses_the_bytes(make):
    device = make()
    link, count = device.link(), 1 << 22
    address, kept = device.allocate(count, "bytes"), device.allocate(16 * count, "kept")
    array = device.as_array(address, (count,), np.uint8)
    sources = [np.full(count, number + 1, np.uint8) for number in range(16)]
    events = []
    for number, source in enumerate(sources):
        events.append(link.send(array, source))
        for _ in range(4):
            device.copy_bytes(kept + number * count, address, count)
        link.used(array)
    for event, source in zip(events, sources, strict=True):
        event.synchronize()
        source[...] = 0
    device.synchronize()
    result = np.empty((16, count), np.uint8)
    device.memcpy_dtoh(result, kept)
    assert np.array_equal(result[:, ::4096], np.repeat(np.arange(1, 17), count // 4096).reshape(16, -1))
    device.free(address)
    device.free(kept)
