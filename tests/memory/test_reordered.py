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


ALIGNED = 128  # positions, so that an image begins at a multiple of 512 bytes


def images_at(pair, turns, start, count, intent):
    """The reordered array of some images of 128 positions, through a view of their own."""

    def counting(*arguments):
        turns.append(arguments[-1])
        turn(*arguments)

    pair.memory.reordered._turn = counting
    item = 4 * CHANNELS * ALIGNED
    view = pair.memory.view(start * item, count * item)
    form = (count, CHANNELS, ALIGNED, np.dtype(np.float32))
    address = pair.memory.reordered.access(view, form, intent, None)
    return pair.device.as_array(address, (count, ALIGNED, CHANNELS), np.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_images_written_part_by_part_are_read_as_one_array_without_being_turned(shared):
    pair, turns = Pair(), []
    pair.memory.shared = shared
    for first in (1, 7):  # two passes
        for start in (0, 2):
            images_at(pair, turns, start, 2, Intent.OVERWRITE)[...] = first + start
            part = images_at(pair, turns, start, 2, Intent.READ)
            part = images_at(pair, turns, start, 2, Intent.OVERWRITE)  # in place
            part[...] += 1
        np.testing.assert_array_equal(
            images_at(pair, turns, 0, 4, Intent.READ)[:, 0, 0], np.repeat([2, 4], 2) + first - 1
        )
        np.testing.assert_array_equal(images_at(pair, turns, 2, 2, Intent.READ), first + 3)
    assert turns == []
    plain = pair.memory.view(0, 16 * CHANNELS * ALIGNED).cpu_data().view(np.float32)
    np.testing.assert_array_equal(plain.reshape(4, -1)[:, 0], [8, 8, 10, 10])
    assert turns == [True]


def test_images_apart_from_those_that_are_here_leave_these_to_the_memory():
    pair, turns = Pair(), []
    pair.memory.view(0, 16 * CHANNELS * ALIGNED).cpu_data("overwrite").view(np.float32)[...] = 5
    images_at(pair, turns, 0, 1, Intent.OVERWRITE)[...] = 1
    np.testing.assert_array_equal(images_at(pair, turns, 3, 1, Intent.READ), 5)
    images_at(pair, turns, 1, 1, Intent.OVERWRITE)[...] = 2
    plain = pair.memory.view(0, 16 * CHANNELS * ALIGNED).cpu_data().view(np.float32)
    np.testing.assert_array_equal(plain.reshape(4, -1)[:, 0], [1, 2, 5, 5])


def test_parts_that_are_only_read_take_the_bytes_of_one():
    pair, turns = Pair(), []
    item = 4 * CHANNELS * ALIGNED
    pair.memory.view(0, 4 * item).cpu_data("overwrite").view(np.float32)[...] = 5
    for start in (0, 2, 0, 2):
        np.testing.assert_array_equal(images_at(pair, turns, start, 2, Intent.READ), 5)
    assert pair.memory.reordered.array.gpu_capacity == 2 * item and turns == [False] * 4
