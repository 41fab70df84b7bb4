"""A memory whose bytes a schedule keeps in another order, against a plain array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem import OutOfDeviceMemory, SimulatedDevice, SyncedMemory
from blobmem.memory import Intent, Side
from blobmem.memory.reordered import Reordered

CHANNELS, POSITIONS, MOST = 3, 5, 4
ITEM = CHANNELS * POSITIONS


def turn(device, source, target, form, back):
    images, channels, positions, dtype = form
    first, last = (images, channels, positions), (images, positions, channels)
    if back:
        device.as_array(target, first, dtype)[...] = device.as_array(source, last, dtype).transpose(0, 2, 1)
    else:
        device.as_array(target, last, dtype)[...] = device.as_array(source, first, dtype).transpose(0, 2, 1)


def form_of(images):
    return images, CHANNELS, POSITIONS, np.dtype(np.float32)


class Pair:
    """The memory, the array beside it, and what they must read."""

    def __init__(self, device=None):
        self.device = SimulatedDevice() if device is None else device
        self.memory = SyncedMemory(0, self.device, name="x")
        self.memory.reordered = Reordered(self.memory, turn, SyncedMemory(device=self.memory.device))
        self.model = np.zeros(MOST * ITEM, np.float32)
        self.views = {n: self.memory.view(0, 4 * n * ITEM) for n in range(1, MOST + 1)}

    def last(self, images, intent):
        """The reordered array of the first images."""
        address = self.memory.reordered.access(self.views[images], form_of(images), intent, None)
        return self.device.as_array(address, (images, POSITIONS, CHANNELS), np.float32)

    def expected(self, images):
        return self.model[: images * ITEM].reshape(images, CHANNELS, POSITIONS).transpose(0, 2, 1)

    def plain(self, side, images, intent):
        view = self.views[images]
        address = self.memory.access(side, 0, view.nbytes, intent)
        if side is Side.HOST:
            return self.memory.host_array(0, (images * ITEM,), np.float32)
        return self.device.as_array(address, (images * ITEM,), np.float32)

    def step(self, kind, images, value):
        if kind == "read last":
            np.testing.assert_array_equal(self.last(images, Intent.READ), self.expected(images))
        elif kind == "write last":
            self.last(images, Intent.WRITE)[0, 1, 2] = value
            self.expected(images)[0, 1, 2] = value
        elif kind == "overwrite last":
            # an array that was kept for more images is given up with them: nobody may read the rest afterwards
            rest = self.model[images * ITEM :].copy()
            self.plain(Side.DEVICE, MOST, Intent.READ)
            values = np.arange(images * ITEM, dtype=np.float32).reshape(images, POSITIONS, CHANNELS) + value
            self.last(images, Intent.OVERWRITE)[...] = values
            self.expected(images)[...] = values
            self.model[images * ITEM :] = rest
        elif kind == "clear":
            self.memory.clear(0, 4 * images * ITEM)
            self.model[: images * ITEM] = 0
        else:
            word, side = kind.split()
            side = Side.HOST if side == "host" else Side.DEVICE
            if word == "read":
                np.testing.assert_array_equal(self.plain(side, images, Intent.READ), self.model[: images * ITEM])
            elif word == "write":
                self.plain(side, images, Intent.WRITE)[-1] = value
                self.model[images * ITEM - 1] = value
            else:
                self.plain(side, images, Intent.OVERWRITE)[...] = value
                self.model[: images * ITEM] = value


KINDS = [
    "read last", "write last", "overwrite last", "clear", "read host", "write host", "overwrite host", "read device",
    "write device", "overwrite device",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, MOST), st.integers(1, 1000)), max_size=25))
def test_nobody_reads_anything_else(steps):
    pair = Pair()
    for kind, images, value in steps:
        pair.step(kind, images, value)
    np.testing.assert_array_equal(pair.plain(Side.HOST, MOST, Intent.READ), pair.model)


def test_the_memory_itself_is_not_touched_until_somebody_asks():
    pair = Pair()
    pair.last(2, Intent.OVERWRITE)[...] = 1
    assert pair.memory.gpu_capacity == pair.memory.cpu_capacity == 0
    assert not pair.memory.is_zero(0, 4)
    before = pair.memory.reordered.epoch, pair.memory.epoch
    pair.last(2, Intent.OVERWRITE)[...] = 2
    pair.last(2, Intent.READ)
    assert (pair.memory.reordered.epoch, pair.memory.epoch) == before
    assert (pair.plain(Side.HOST, 2, Intent.READ) == 2).all()
    assert pair.memory.gpu_capacity == 4 * 2 * ITEM


def test_no_room_to_turn_back_loses_nothing():
    pair = Pair(SimulatedDevice(capacity=4 * 3 * ITEM))
    pair.last(2, Intent.OVERWRITE)[...] = 7
    with pytest.raises(OutOfDeviceMemory):
        pair.plain(Side.HOST, 2, Intent.READ)
    pair.device.capacity *= 2
    assert (pair.plain(Side.HOST, 2, Intent.READ) == 7).all()
    assert (pair.last(2, Intent.READ) == 7).all()


def test_moving_to_another_device_takes_them_along():
    pair = Pair()
    pair.last(2, Intent.OVERWRITE)[...] = 3
    pair.memory.move_to(SimulatedDevice())
    assert (pair.plain(Side.HOST, 2, Intent.READ) == 3).all()
    assert pair.device.statistics.bytes_held == 0
