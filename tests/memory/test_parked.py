"""Bytes that leave a device for the host and come back: never lost, whoever is late, and read as ever meanwhile."""

import gc
import random
import weakref

import numpy as np
import pytest
from device_tools import NBYTES, fill, on_device

from blobmem import Blob, SimulatedDevice
from blobmem.errors import DeviceError
from blobmem.memory import Intent, Side, SyncedMemory
from blobmem.memory.parked import Block, Parked, copy_stream
from blobmem.memory.slot import Slot


def made(**options):
    device = SimulatedDevice(**options)
    return SyncedMemory(0, device, name="arena"), Parked(NBYTES, device, "x (evicted)")


def test_who_reads_or_overwrites_comes_after_the_copies():
    """They are made when somebody waits for them, and not before."""
    arena, home = made()
    out, back = (copy_stream(arena.device, each) for each in (True, False))
    assert out is copy_stream(arena.device, True) is not back
    fill(arena, 7)
    home.take(arena.view(0, NBYTES), out)
    assert out.pending
    fill(arena, 9)  # waits
    assert not out.pending
    home.give(arena.view(NBYTES, NBYTES), back)
    assert back.pending
    assert (on_device(arena, NBYTES) == 7).all() and (on_device(arena) == 9).all()
    assert (home.cpu_data() == 7).all() and home.gpu_capacity == 0


def test_a_copy_out_comes_after_one_that_came_in():
    arena, home = made()
    out, back = (copy_stream(arena.device, each) for each in (True, False))
    fill(arena, 1)
    home.take(arena.view(0, NBYTES), out)
    home.give(arena.view(2 * NBYTES, NBYTES), back)
    fill(arena, 2)
    home.take(arena.view(0, NBYTES), out)  # does not overwrite what is still on its way back
    assert (on_device(arena, 2 * NBYTES) == 1).all()
    assert (home.cpu_data() == 2).all()


def test_what_is_written_on_the_host_comes_back():
    arena, home = made()
    out, back = (copy_stream(arena.device, each) for each in (True, False))
    fill(arena, 1)
    home.take(arena.view(0, NBYTES), out)
    home.mutable_cpu_data()[3] = 5
    home.give(arena.view(0, NBYTES), back)
    assert on_device(arena)[2:5].tolist() == [1, 5, 1]
    arena.access(Side.HOST, 0, NBYTES, Intent.WRITE)
    arena.host_array(0, (NBYTES,), np.uint8)[:] = 8  # the truth is on the host then, and is taken along
    home.take(arena.view(0, NBYTES), out)
    assert (home.cpu_data() == 8).all()


def test_a_copy_that_fails_holds_nothing():
    arena, home = made()
    out = copy_stream(arena.device, True)
    fill(arena, 1)
    home.take(arena.view(0, NBYTES), out)
    assert home.holds
    arena.device.fail_at = lambda name, ordinal: name == "memcpy_dtoh"
    with pytest.raises(DeviceError):
        home.take(arena.view(0, NBYTES), out)
    assert not home.holds and (on_device(arena) == 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_uses_loses_no_byte(seed):
    """Places that overlap, on the compute stream's side, on both copy streams and on the host, against plain arrays."""
    rng = random.Random(seed)
    arena, _ = made()
    device, size = arena.device, 8 * 512
    homes = [Parked(NBYTES, device, str(index)) for index in range(3)]
    streams = [copy_stream(device, True), copy_stream(device, False)]
    model, parked = np.zeros(size, np.uint8), [np.zeros(NBYTES, np.uint8) for _ in homes]
    fill(arena, 0, 0, size)
    for turn in range(400):
        at, index = 512 * rng.randrange(7), rng.randrange(3)
        here = slice(at, at + NBYTES)
        match rng.randrange(7):
            case 0:
                fill(arena, turn % 250 + 1, at)
                model[here] = turn % 250 + 1
            case 1 | 2:
                homes[index].take(arena.view(at, NBYTES), streams[0])
                parked[index] = model[here].copy()
            case 3 | 4:
                homes[index].give(arena.view(at, NBYTES), streams[1])
                model[here] = parked[index]
            case 5:
                np.testing.assert_array_equal(homes[index].cpu_data(), parked[index])
            case _:
                homes[index].mutable_cpu_data()[:100] = turn % 250 + 1
                parked[index][:100] = turn % 250 + 1
    np.testing.assert_array_equal(on_device(arena, 0, size), model)
    for home, values in zip(homes, parked, strict=True):
        np.testing.assert_array_equal(home.cpu_data(), values)


def test_who_uses_what_is_lent_to_a_stream_waits_for_it():
    """Graphs that the stream runs copy the bytes whenever they want to."""
    arena, home = made()
    device = arena.device
    fill(arena, 7, 0, 4 * NBYTES)
    address, stream = arena.gpu_data(), device.create_stream()
    out = copy_stream(device, True)
    home.take(arena.view(0, NBYTES), out)
    home.lend(stream, True)
    assert (home.cpu_data() == 7).all() and not out.pending
    for value in (1, 2):
        before = home.epoch
        home.lend(stream, True)
        assert home.epoch > before, "who has looked since looks again"
        before = home.epoch
        for _ in range(2):  # nobody has used the bytes, so that nobody need lend them again
            home.lend(stream, True)
            assert home.epoch == before
            device.memset(address, value, NBYTES, stream)
            device.memcpy_dtoh(home.bytes(), address, stream)
        assert (home.cpu_data() == value).all() and not stream.pending and home.epoch > before
    home.lend(stream, False)
    device.memset(address, 3, NBYTES, stream)
    device.memcpy_dtoh(home.bytes(), address, stream)
    home.give(arena.view(NBYTES, NBYTES), copy_stream(device, False))
    assert (on_device(arena, NBYTES) == 3).all() and not stream.pending
    other = device.create_stream()
    device.memcpy_htod(address, home.bytes(), stream)
    home.lend(other, True)
    other.synchronize()
    assert not stream.pending


def test_the_place_is_written_while_graphs_have_the_bytes():
    arena, home = made()
    slot = Slot(arena, 512, NBYTES, "x")
    slot.home, home.source = home, slot
    fill(slot, 1)
    home.take(slot.view(0, NBYTES), copy_stream(arena.device, True))
    home.lend(None, False)
    before = home.epoch, slot.epoch
    fill(slot, 2)
    assert home.epoch > before[0] and slot.epoch > before[1]
    home.lend(None, False)  # as those do that see the epoch
    assert (home.cpu_data() == 2).all()


class Locking(SimulatedDevice):
    """Page-locks memory of the host, or does not."""

    locks = True

    def __init__(self):
        super().__init__()
        self.pinned = []

    def pin(self, address, nbytes):
        self.pinned.append((address, nbytes))
        return self.locks

    def unpin(self, address):
        assert all(not stream.pending for stream in self._busy)
        self.pinned = [each for each in self.pinned if each[0] != address]


@pytest.mark.parametrize("locks", [True, False])
def test_those_of_a_plan_are_page_locked_as_one(locks):
    device = Locking()
    device.locks = locks
    arena, block = SyncedMemory(0, device, name="arena"), Block(device)
    homes = [Parked(nbytes, device, "", block) for nbytes in (100, 512, 4000)]
    fill(arena, 5, 0, 4096)
    for _ in range(2):
        for home in homes:
            home.take(arena.view(0, home.size), copy_stream(device, True))
    ((address, nbytes),) = device.pinned
    assert nbytes == 8192 and block.locked == locks, "whole pages"
    starts = [home.bytes().ctypes.data - address for home in homes]
    assert starts == [0, 512, 1024] and [home.cpu_capacity for home in homes] == [100, 512, 4000]
    assert all((home.cpu_data() == 5).all() for home in homes)


def test_a_block_stays_page_locked_until_streams_have_copied():
    device = Locking()
    arena, home = SyncedMemory(0, device, name="arena"), Parked(NBYTES, device, "x")
    fill(arena, 1)
    stream = device.create_stream()
    home.lend(stream, True)
    device.memcpy_dtoh(home.bytes(), arena.gpu_data(), stream)
    assert device.pinned
    del home
    gc.collect()
    assert not device.pinned


def test_a_slot_that_is_away_is_its_home():
    arena, home = made()
    slot = Slot(arena, 512, NBYTES, "x")
    slot.home = home
    blob = Blob(NBYTES // 4, device=arena.device, name="x")
    blob.bind_data(slot)
    blob.data[:] = 3
    here = blob.data
    home.take(slot.view(0, NBYTES), copy_stream(arena.device, True))
    slot.away = True
    fill(arena, 0xFF, 0, 4096)  # others have the place
    assert (blob.cpu_data() == 3).all() and (blob.data == 3).all() and not np.shares_memory(blob.data, here)
    blob.data[:] = 4
    assert (home.cpu_data().view(np.float32) == 4).all()
    array = arena.device.as_array(blob.mutable_gpu_data(), (NBYTES // 4,), np.float32)
    array[:] = 5
    assert (blob.data == 5).all() and slot.resident_side(0, NBYTES) is Side.HOST
    slot.clear(0, NBYTES)
    assert slot.is_zero(0, NBYTES) and (blob.data == 0).all()
    slot.away = False
    assert np.isnan(blob.cpu_data()).all()


def test_it_lasts_as_long_as_its_copies():
    """A net may go, or be planned anew, while they are under way."""
    arena, home = made()
    fill(arena, 1)
    home.take(arena.view(0, NBYTES), copy_stream(arena.device, True))
    gone = weakref.ref(home)
    del home
    gc.collect()
    assert gone() is not None
    fill(arena, 2)
    gc.collect()
    assert gone() is None
