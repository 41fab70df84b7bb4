"""A memory's bytes go from its own host side to places on the device and back: never lost, whoever is late."""

import gc
import random
import weakref

import numpy as np
import pytest
from device_tools import NBYTES, fill, on_device

from blobmem import Blob, SimulatedDevice
from blobmem.errors import DeviceError
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.parked import copy_stream
from blobmem.memory.slot import Slot


@pytest.fixture
def device():
    return SimulatedDevice()


@pytest.fixture
def arena(device):
    return SyncedMemory(0, device, name="arena")


@pytest.fixture
def home(device):
    memory = SyncedMemory(NBYTES, device, name="w")
    memory.mutable_cpu_data()[:] = 1
    return memory


def test_who_uses_either_place_comes_after_the_copies(device, arena, home):
    out, back = (copy_stream(device, each) for each in (True, False))
    home.give(arena.view(0, NBYTES), back)
    assert back.pending
    home.mutable_cpu_data()[:] = 2  # waits
    assert not back.pending and (on_device(arena) == 1).all()
    fill(arena, 3)
    home.take(arena.view(0, NBYTES), out)
    assert out.pending
    fill(arena, 4)  # waits, too
    assert not out.pending and (home.cpu_data() == 3).all()
    assert home.gpu_capacity == 0 and device.statistics.htod_copies == device.statistics.dtoh_copies == 1


def test_copies_follow_one_another_with_nobody_waiting(device, arena, home):
    out, back = (copy_stream(device, each) for each in (True, False))
    fill(arena, 3)
    home.give(arena.view(2 * NBYTES, NBYTES), back)
    home.take(arena.view(0, NBYTES), out)
    home.give(arena.view(4 * NBYTES, NBYTES), back)
    assert out.pending or back.pending
    assert (on_device(arena, 4 * NBYTES) == 3).all() and (on_device(arena, 2 * NBYTES) == 1).all()


def test_who_uses_what_is_lent_to_a_stream_waits_for_it(device, arena, home):
    """Graphs that the stream runs copy the bytes whenever they want to."""
    fill(arena, 7)
    address, stream, out = arena.gpu_data(), device.create_stream(), copy_stream(device, True)
    home.take(arena.view(0, NBYTES), out)
    home.lend(stream, True)
    for value in (1, 2):
        before = home.epoch
        home.lend(stream, True)
        assert (home.epoch > before) == (value == 2), "who has looked since looks again"
        for _ in range(2):
            device.memset(address, value, NBYTES, stream)
            device.memcpy_dtoh(home.bytes(), address, stream)
        assert (home.cpu_data() == value).all() and not stream.pending and not out.pending
    home.lend(stream, True)
    device.memset(address, 3, NBYTES, stream)
    device.memcpy_dtoh(home.bytes(), address, stream)
    home.give(arena.view(NBYTES, NBYTES), copy_stream(device, False))
    assert (on_device(arena, NBYTES) == 3).all() and not stream.pending
    home.clear(0, NBYTES)
    device.memcpy_dtoh(home.bytes(), address, stream)
    home.lend(stream, False)  # waits before it writes zeros there
    assert not stream.pending and (home.bytes() == 0).all()


def test_what_was_lent_lasts_as_long_as_its_stream_s_work(device, arena):
    fill(arena, 7)
    stream, home = device.create_stream(), SyncedMemory(NBYTES, device)
    home.lend(stream, True)
    pages = home.bytes()
    device.memcpy_dtoh(pages, arena.gpu_data(), stream)
    del home
    gc.collect()
    assert not stream.pending and (pages == 7).all()


def test_zeros_are_not_copied(device, arena):
    home = SyncedMemory(NBYTES, device)
    fill(arena, 7)
    slot = Slot(arena, 0, NBYTES, "g")
    home.give(slot.view(0, NBYTES), copy_stream(device, False))
    assert slot.is_zero(0, NBYTES) and home.is_zero(0, NBYTES) and home.cpu_capacity == 0
    assert not on_device(slot).any() and device.statistics.htod_copies == 0


def test_what_is_written_anywhere_comes(device, arena, home):
    """On the host, through an array that was asked for again; on the device side that somebody has given it."""
    back = copy_stream(device, False)
    blob = Blob(NBYTES, dtype=np.uint8, device=device)
    blob.bind_data(home)
    for value in (5, 6):
        blob.data[:] = value
        home.give(arena.view(0, NBYTES), back)
        assert (on_device(arena) == value).all()
    fill(home, 8)
    home.give(arena.view(0, NBYTES), back)
    assert (on_device(arena) == 8).all()
    fill(arena, 9)
    home.take(arena.view(0, NBYTES), copy_stream(device, True))
    assert (on_device(home) == 9).all()


def test_it_leaves_the_device_unless_somebody_is_there(device, home):
    fill(home, 5)
    hold = home.hold_device()
    assert not home.leave_device() and home.gpu_capacity == NBYTES
    del hold
    assert home.leave_device() and home.gpu_capacity == device.statistics.bytes_held == 0
    assert (home.cpu_data() == 5).all()
    assert home.leave_device()  # once more
    fill(home, 6)
    assert (home.cpu_data() == 6).all()
    device.fail_at = lambda name, ordinal: name == "memcpy_dtoh"
    fill(home, 7)
    with pytest.raises(DeviceError):
        home.leave_device()
    assert (on_device(home) == 7).all()


def test_a_copy_that_fails_loses_nothing(device, arena, home):
    fill(arena, 2)
    device.fail_at = lambda name, ordinal: name.startswith("memcpy")
    for way, out in ((home.take, True), (home.give, False)):
        with pytest.raises(DeviceError):
            way(arena.view(0, NBYTES), copy_stream(device, out))
    assert (home.cpu_data() == 1).all() and (on_device(arena) == 2).all()


def leave(memory):
    memory.move_to(SimulatedDevice())


def shrink(memory):
    memory.set_size(512)
    memory.trim()


def adopt(memory):
    memory.set_host_array(np.full(NBYTES, 4, np.uint8))


DOORS = {
    "clear": (lambda memory: memory.clear(0, NBYTES), 0), "move": (leave, 3), "trim": (shrink, 3), "adopt": (adopt, 4),
    "pin": (SyncedMemory.pin, 3), "push": (lambda memory: memory.async_gpu_push(memory.device.create_stream()), 3),
    "grow": (lambda memory: memory.reserve(Side.HOST, 1 << 30), 3),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_no_other_door_is_quicker_than_a_copy(device, arena, home, door):
    fill(arena, 3)
    home.take(arena.view(0, NBYTES), copy_stream(device, True))
    use, value = DOORS[door]
    use(home)
    assert (home.cpu_data() == value).all()
    device.synchronize()
    assert (home.cpu_data() == value).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_uses_loses_no_byte(device, arena, seed):
    """Against plain arrays."""
    rng, size = random.Random(seed), 8 * 512
    homes = [SyncedMemory(NBYTES, device, str(index)) for index in range(3)]
    streams = [copy_stream(device, True), copy_stream(device, False)]
    model, own = np.zeros(size, np.uint8), [np.zeros(NBYTES, np.uint8) for _ in homes]
    fill(arena, 0, 0, size)
    for turn in range(400):
        at, index, value = 512 * rng.randrange(7), rng.randrange(3), turn % 250 + 1
        home, here = homes[index], slice(at, at + NBYTES)
        match rng.randrange(9):
            case 0:
                fill(arena, value, at)
                model[here] = value
            case 1 | 2:
                home.take(arena.view(at, NBYTES), streams[0])
                own[index] = model[here].copy()
            case 3 | 4:
                home.give(arena.view(at, NBYTES), streams[1])
                model[here] = own[index]
            case 5:
                np.testing.assert_array_equal(home.cpu_data(), own[index])
            case 6:
                home.mutable_cpu_data()[:100] = value
                own[index][:100] = value
            case 7:
                fill(home, value, 512, 512)
                own[index][512:] = value
            case _:
                home.clear(0, 512)
                own[index][:512] = 0
                assert home.leave_device()
    np.testing.assert_array_equal(on_device(arena, 0, size), model)
    for home, values in zip(homes, own, strict=True):
        np.testing.assert_array_equal(home.cpu_data(), values)


def test_it_lasts_as_long_as_its_copies(device, arena):
    home = SyncedMemory(NBYTES, device)
    home.mutable_cpu_data()[:] = 1
    home.give(arena.view(0, NBYTES), copy_stream(device, False))
    gone = weakref.ref(home)
    del home
    gc.collect()
    assert gone() is not None and (on_device(arena) == 1).all()
    fill(arena, 2)
    gc.collect()
    assert gone() is None
