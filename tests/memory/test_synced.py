import gc
import threading
import weakref

import numpy as np
import pytest
from device_tools import Counts, read, write

from blobmem import devices
from blobmem.devices import HOST, SimulatedDevice
from blobmem.devices.simulated import POISON
from blobmem.errors import BlobmemError, DeviceError, OutOfDeviceMemory
from blobmem.memory import Head, Intent, Side, SyncedMemory, View

# Size, capacity, head


def test_nothing_is_allocated_before_the_first_touch(device):
    memory = SyncedMemory(1000, device, "x")
    view = memory.view(0, 5000)
    memory.set_size(2000)
    memory.clear(0, 10)
    assert (memory.cpu_capacity, memory.gpu_capacity, memory.head) == (0, 0, Head.UNINITIALIZED)
    assert memory.is_zero(0, 5000)
    assert device.statistics.allocator_calls == 0
    view.gpu_data("overwrite")
    assert (memory.cpu_capacity, memory.gpu_capacity) == (0, 5000)
    memory.cpu_data()
    assert (memory.cpu_capacity, memory.gpu_capacity) == (2000, 5000)


def test_head_follows_the_newest_bytes(device):
    memory = SyncedMemory(100, device)
    assert memory.head == "uninitialized"
    memory.mutable_cpu_data()
    assert memory.head == "at_cpu"
    memory.gpu_data()
    assert memory.head == "synced"
    memory.mutable_gpu_data()
    assert memory.head == "at_gpu"
    memory.cpu_data()
    assert memory.head == "synced"
    memory.view(0, 50).cpu_data("write")
    assert memory.head == "mixed"
    memory.set_size(50)
    assert memory.head == "at_cpu"
    memory.set_size(0)
    assert memory.head == "uninitialized"


def test_size_moves_freely_and_capacity_only_grows(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = np.arange(100)
    memory.set_size(10)
    assert memory.cpu_data().size == 10 and memory.cpu_capacity == 100
    memory.set_size(200)
    assert np.array_equal(memory.cpu_data()[:100], np.arange(100))
    assert not memory.cpu_data()[100:].any()


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (None, TypeError)])
def test_size_is_an_integer_from_zero_on(size, error):
    memory = SyncedMemory(7)
    with pytest.raises(error):
        memory.set_size(size)
    with pytest.raises(error):
        SyncedMemory(size)
    assert memory.size == 7
    memory.set_size(np.int64(9))
    assert memory.size == 9


def test_nothing_of_nothing(device):
    memory = SyncedMemory(0, device)
    assert memory.cpu_data().size == memory.mutable_cpu_data().size == 0
    assert memory.gpu_data() == memory.mutable_gpu_data() == 0
    assert memory.view(512, 0).cpu_data("overwrite").size == 0
    memory.async_gpu_push(device.create_stream())
    assert memory.trim() == 0
    assert memory.is_zero(0, 0)
    assert device.statistics.allocator_calls == 0


def test_arrays_have_the_promised_kind(device):
    memory = SyncedMemory(10, device)
    array = memory.mutable_cpu_data()
    assert array.dtype == np.uint8 and array.shape == (10,) and array.flags.writeable
    frozen = memory.cpu_data()
    assert not frozen.flags.writeable and np.shares_memory(frozen, array)
    floats = memory.host_array(4, (1, 1), np.float32)
    assert floats.shape == (1, 1) and np.shares_memory(floats, array)


# Views


def test_views(device):
    memory = SyncedMemory(0, device)
    view = memory.view(512, 10)
    assert view == View(memory, 512, 10) and hash(view) == hash(memory.view(512, 10))
    assert view != memory.view(512, 11)
    with pytest.raises(AttributeError):
        view.offset = 0
    for offset in (1, 511, -512):
        with pytest.raises(ValueError, match="multiple of 512"):
            memory.view(offset, 10)
    with pytest.raises(ValueError, match="0 bytes or more"):
        memory.view(0, -1)
    with pytest.raises(TypeError):
        memory.view(0.0, 1)


@pytest.mark.parametrize("intent", ["reed", "", None, 3, []])
def test_an_unknown_intent(device, intent):
    view = SyncedMemory(0, device).view(0, 10)
    for call in (view.cpu_data, view.gpu_data, lambda i: view.memory.access(Side.HOST, 0, 10, i)):
        with pytest.raises(ValueError, match="not one of read, write, overwrite"):
            call(intent)
    assert device.statistics.allocator_calls == 0


def test_ranges_that_are_none(device):
    memory = SyncedMemory(10, device)
    for offset, nbytes in ((-1, 5), (5, -1)):
        for side in Side:
            with pytest.raises(ValueError, match="not a range"):
                memory.access(side, offset, nbytes, Intent.WRITE)


# The rule of each access, with what it costs


def test_exact_counts(device):
    memory = SyncedMemory(1000, device, "x")
    did = Counts(device)
    memory.mutable_cpu_data()[:] = 1
    assert did() == (0, 0, 0, 0, 0, 0)
    memory.gpu_data()
    assert did() == (1, 1000, 0, 0, 0, 1)
    memory.gpu_data()
    memory.cpu_data()
    memory.mutable_gpu_data()  # it is there already
    assert did() == (0, 0, 0, 0, 0, 0)
    memory.mutable_gpu_data()
    assert did() == (0, 0, 0, 0, 0, 0)
    memory.cpu_data()
    assert did() == (0, 0, 1, 1000, 0, 0)
    memory.mutable_cpu_data()
    assert did() == (0, 0, 0, 0, 0, 0)
    memory.view(0, 1000).gpu_data("overwrite")  # about to be overwritten: nothing to copy
    assert did() == (0, 0, 0, 0, 0, 0)
    memory.view(0, 1000).cpu_data("overwrite")
    assert did() == (0, 0, 0, 0, 0, 0)


def test_only_what_is_missing_is_copied(device):
    memory = SyncedMemory(4096, device)
    whole = memory.view(0, 4096)
    whole.cpu_data("overwrite")[:] = 1
    whole.gpu_data()
    did = Counts(device)
    memory.view(512, 512).cpu_data("write")[:] = 2
    memory.view(2048, 100).cpu_data("write")[:] = 3
    assert did() == (0, 0, 0, 0, 0, 0)
    assert (read(device, memory.view(0, 512).gpu_data(), 512) == 1).all()
    assert did() == (0, 0, 1, 512, 0, 0)  # the 1 is this test's own read
    got = read(device, whole.gpu_data(), 4096)
    assert did() == (2, 612, 1, 4096, 0, 0)
    assert (got[512:1024] == 2).all() and (got[2048:2148] == 3).all() and got[2148] == got[0] == 1


def test_adjacent_extents_are_one_copy(device):
    memory = SyncedMemory(0, device)
    for offset in range(0, 4096, 512):
        memory.view(offset, 512).cpu_data("overwrite")[:] = offset // 512
    did = Counts(device)
    memory.view(0, 4096).gpu_data()
    assert did() == (1, 4096, 0, 0, 0, 1)


def test_zero_bytes_are_set_and_not_copied(device):
    memory = SyncedMemory(1024, device)
    did = Counts(device)
    assert not read(device, memory.gpu_data(), 1024).any()
    assert did() == (0, 0, 1, 1024, 1, 1)
    assert memory.head == "at_gpu"


def test_a_write_brings_the_old_bytes_an_overwrite_does_not(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 1
    did = Counts(device)
    write(device, memory.mutable_gpu_data(), 2, 10)
    assert did()[:4] == (2, 110, 0, 0)
    assert memory.cpu_data().tolist() == [2] * 10 + [1] * 90
    did()
    array = memory.view(0, 100).cpu_data("overwrite")
    array[:] = 3
    address = memory.view(0, 100).gpu_data("overwrite")
    assert did() == (0, 0, 0, 0, 0, 0)
    assert read(device, address, 100).tolist() == [2] * 10 + [1] * 90  # what the device had


def test_a_hundred_and_fifty(device):
    """The reviewer's case: b of 50 bytes over a of 100; each order of who writes and reads where."""
    for b_side in Side:
        for a_side in Side:
            memory = SyncedMemory(0, device)
            a, b = memory.view(0, 100), memory.view(0, 50)
            put(device, a, a_side, 1)
            put(device, b, b_side, 2)
            for view, expected in ((b, [2] * 50), (a, [2] * 50 + [1] * 50)):
                for side in (a_side, b_side, Side.HOST, Side.DEVICE):
                    assert get(device, view, side) == expected
            put(device, a, b_side, 3)
            assert get(device, b, a_side) == [3] * 50


def put(device, view, side, value):
    if side is Side.HOST:
        view.cpu_data("overwrite")[:] = value
    else:
        write(device, view.gpu_data("overwrite"), value, view.nbytes)


def get(device, view, side):
    return (view.cpu_data() if side is Side.HOST else read(device, view.gpu_data(), view.nbytes)).tolist()


def test_a_small_sync_does_not_mark_the_rest(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 1
    memory.view(0, 50).gpu_data()
    assert memory.head == "mixed"
    assert (read(device, memory.gpu_data(), 100) == 1).all()


def test_bytes_never_written_read_zero_and_never_poison(device):
    memory = SyncedMemory(0, device)
    write(device, memory.view(0, 600).gpu_data("write"), 5, 10)
    assert memory.view(0, 600).cpu_data().tolist() == [5] * 10 + [0] * 590
    assert not read(device, memory.view(0, 5000).gpu_data(), 5000)[600:].any()


def test_an_overwrite_that_lied_shows_poison(device):
    """Fresh bytes that an overwrite promised to fill, and did not, are visible as what they are."""
    memory = SyncedMemory(0, device)
    write(device, memory.view(0, 100).gpu_data("overwrite"), 5, 50)
    assert memory.view(0, 100).cpu_data().tolist() == [5] * 50 + [POISON] * 50


# Growth


def test_growth_in_place_keeps_pointers_and_arrays(device):
    memory = SyncedMemory(100, device)
    small = memory.mutable_cpu_data()
    small[:] = 7
    address = memory.gpu_data()
    big = memory.view(0, 1 << 20)
    big.cpu_data("write")[100:] = 8
    version = memory.version
    assert big.gpu_data() == address
    assert memory.version == version == 0
    assert (device.statistics.allocations, device.statistics.grows, device.statistics.moves) == (1, 1, 0)
    again = memory.mutable_cpu_data()
    assert np.shares_memory(small, again) and small.ctypes.data == again.ctypes.data
    small[:] = 9
    assert (read(device, memory.gpu_data(), 100) == 9).all()
    assert (big.cpu_data()[100:] == 8).all()


def test_growth_beyond_the_device_reservation_moves(device):
    device.reservation = lambda nbytes: 2 << 20
    memory = SyncedMemory(100, device)
    write(device, memory.mutable_gpu_data(), 3, 100)
    address, version = memory.gpu_data(), memory.version
    reach = device.reservation(100)
    epoch = memory.epoch
    moved = memory.view(0, reach + 1).gpu_data()
    assert moved != address and memory.version == version + 1 and memory.epoch > epoch
    assert (memory.view(0, 100).cpu_data() == 3).all()
    assert device.statistics.bytes_held == reach + 1


class Cramped(SyncedMemory):
    """Host pages as small as they can be, so that growth moves."""

    def _make_pages(self, nbytes):
        return devices.Pages(nbytes, nbytes)


def test_growth_beyond_the_host_reservation_moves_and_old_arrays_stay_valid(device):
    memory = Cramped(100, device)
    old = memory.mutable_cpu_data()
    old[:] = 4
    big = memory.view(0, 1 << 20).cpu_data()
    assert memory.version == 1
    assert (big[:100] == 4).all() and not big[100:].any()
    assert not np.shares_memory(old, big)
    old[:] = 5
    assert (old == 5).all() and (big[:100] == 4).all()
    del big
    assert not memory.lent(0, 100)  # the old array is alive, and no longer over this memory


def test_a_move_of_host_pages_copies_only_what_the_host_has(device):
    memory = Cramped(0, device)
    memory.view(0, 512).cpu_data("overwrite")[:] = 1
    memory.view(512, 512).cpu_data("overwrite")[:] = 2
    write(device, memory.view(512, 512).gpu_data("overwrite"), 3, 512)
    grown = memory.view(0, 64 << 10).cpu_data()
    assert (grown[:512] == 1).all() and (grown[512:1024] == 3).all() and not grown[1024:].any()


def test_reserve_touches_no_state(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 1
    did = Counts(device)
    memory.reserve(Side.DEVICE, 5000)
    memory.reserve(Side.HOST, 9000)
    memory.reserve(Side.DEVICE, 10)
    assert (memory.cpu_capacity, memory.gpu_capacity, memory.head) == (9000, 5000, "at_cpu")
    assert did() == (0, 0, 0, 0, 0, 1)
    memory.view(0, 5000).gpu_data()
    assert did() == (1, 100, 0, 0, 1, 0)
    with pytest.raises(ValueError):
        memory.reserve(Side.HOST, -1)


def test_unreserve_undoes_a_reserve_and_nothing_else(device):
    memory = SyncedMemory(0, device)
    memory.reserve(Side.DEVICE, 5000)
    memory.unreserve(Side.DEVICE, 0)
    assert (memory.gpu_capacity, device.statistics.bytes_held) == (0, 0)
    memory.view(0, 100).gpu_data()
    memory.view(0, 100).cpu_data("write")
    for side in Side:
        memory.reserve(side, 5000)
        memory.unreserve(side, 100)
        memory.unreserve(side, 300)
    assert (memory.cpu_capacity, memory.gpu_capacity) == (100, 100)
    memory.reserve(Side.HOST, 600)
    for side in (Side.HOST, Side.DEVICE):
        memory.view(0, 600).cpu_data() if side is Side.HOST else memory.view(0, 600).gpu_data()
        with pytest.raises(BlobmemError, match="has been used since"):
            memory.unreserve(side, 100)
    assert (memory.cpu_capacity, memory.gpu_capacity) == (600, 600)


# Failures


def test_out_of_memory_changes_nothing_and_the_same_call_succeeds_later():
    device = SimulatedDevice(10_000)
    memory = SyncedMemory(0, device, "conv1/data")
    view = memory.view(0, 6000)
    memory.view(0, 100).cpu_data("overwrite")[:] = 1
    hog = device.allocate(5000, "hog")
    for intent in Intent:
        epoch, state = memory.epoch, repr(memory._extents)
        with pytest.raises(OutOfDeviceMemory, match=r"'conv1/data'.*hog 5000 bytes") as raised:
            view.gpu_data(intent)
        assert raised.value.holders == [("hog", 5000)]
        assert (memory.epoch, repr(memory._extents), memory.gpu_capacity) == (epoch, state, 0)
    with pytest.raises(OutOfDeviceMemory):
        memory.reserve(Side.DEVICE, 6000)
    memory.set_size(6000)
    with pytest.raises(OutOfDeviceMemory):
        memory.async_gpu_push(device.create_stream())
    device.free(hog)
    assert read(device, view.gpu_data(), 6000).tolist() == [1] * 100 + [0] * 5900


def test_out_of_memory_while_growing_keeps_what_is_there():
    device = SimulatedDevice(fail_at=2)
    memory = SyncedMemory(0, device)
    write(device, memory.view(0, 100).gpu_data("overwrite"), 1, 100)
    with pytest.raises(OutOfDeviceMemory):
        memory.view(0, 200).gpu_data("write")
    assert memory.gpu_capacity == 100 and (memory.view(0, 100).cpu_data() == 1).all()
    assert read(device, memory.view(0, 200).gpu_data("write"), 200).tolist() == [1] * 100 + [0] * 100


@pytest.mark.parametrize("queued", [False, True])
def test_a_copy_that_fails_in_the_middle_leaves_every_byte_true(device, queued):
    memory = SyncedMemory(2048, device)
    stream = device.create_stream() if queued else None
    memory.gpu_data()
    for offset, value in ((0, 1), (1024, 2)):
        memory.view(offset, 512).cpu_data("overwrite")[:] = value
    start = device.statistics.htod_copies
    device.fail_at = lambda name, ordinal: name == "memcpy_htod" and ordinal == start + 2
    with pytest.raises(DeviceError, match="memcpy_htod"):
        memory.view(0, 2048).gpu_data("write", stream)
    assert [bits for _, _, bits in memory._extents.runs(0, 2048)] == [3, 2, 1, 2]
    if queued:  # the copy that was queued still reads the host, so a write there waits for it
        memory.view(0, 512).cpu_data("overwrite")[:] = 9
        assert stream.pending == 0
        memory.view(0, 512).cpu_data("overwrite")[:] = 1
    expected = [1] * 512 + [0] * 512 + [2] * 512 + [0] * 512
    assert read(device, memory.view(0, 2048).gpu_data("write", stream), 2048).tolist() == expected or queued
    device.synchronize()
    assert memory.cpu_data().tolist() == expected


def test_a_failed_fetch_leaves_every_byte_true(device):
    memory = SyncedMemory(1024, device)
    write(device, memory.mutable_gpu_data(), 1, 1024)
    memory.view(0, 512).cpu_data()
    device.fail_at = lambda name, ordinal: name == "memcpy_dtoh" and ordinal == 2
    with pytest.raises(DeviceError):
        memory.mutable_cpu_data()
    assert [bits for _, _, bits in memory._extents.runs(0, 1024)] == [3, 2]
    assert (memory.mutable_cpu_data() == 1).all()


def test_memory_for_the_host_alone_says_so():
    memory = SyncedMemory(10, devices.HOST, "labels")
    memory.mutable_cpu_data()[:] = 1
    assert memory.head == "at_cpu" and memory.cpu_data().sum() == 10
    with pytest.raises(DeviceError, match=r"'labels' has no device side.*device='simulated'"):
        memory.gpu_data()
    assert memory.head == "at_cpu"


def test_device_by_word_and_by_default():
    assert SyncedMemory(1).device is devices.HOST
    assert SyncedMemory(1, "simulated:1MiB").device.capacity == 1 << 20
    with pytest.raises(DeviceError):
        SyncedMemory(1, "simulatd")


# Clear


def test_clear_reads_zero_on_both_sides_and_touches_neither(device):
    memory = SyncedMemory(1024, device)
    memory.mutable_cpu_data()[:] = 1
    memory.gpu_data()
    did = Counts(device)
    memory.clear(512, 512)
    assert memory.is_zero(512, 512) and not memory.is_zero(0, 1024) and not memory.is_zero(511, 2)
    assert did() == (0, 0, 0, 0, 0, 0)
    assert memory.cpu_data().tolist() == [1] * 512 + [0] * 512
    memory.clear(0, 512)
    assert not read(device, memory.gpu_data(), 1024).any()
    assert did() == (1, 512, 1, 1024, 1, 0)  # the host had zeroed its half already


def test_clear_then_a_partial_write_then_read_on_the_other_side(device):
    for side in Side:
        memory = SyncedMemory(1024, device)
        memory.mutable_cpu_data()[:] = 1
        memory.gpu_data()
        memory.clear(0, 1024)
        part = memory.view(512, 100)
        put(device, part, side, 5)
        for look in (*Side, *reversed(Side)):
            assert get(device, memory.view(0, 1024), look) == [0] * 512 + [5] * 100 + [0] * 412


def test_overwriting_what_was_cleared_brings_the_epoch_back(device):
    memory = SyncedMemory(0, device)
    stream = device.create_stream()
    view = memory.view(0, 512)
    address, epoch = view.gpu_data("overwrite", stream), memory.epoch
    state = repr(memory._extents)
    for again in (lambda: view.gpu_data("overwrite", stream), lambda: memory.refill(epoch, 0, 512)) * 2:
        memory.clear(0, 512)
        assert memory.epoch != epoch and memory.is_zero(0, 512) and memory.is_cleared_since(epoch, 0, 512)
        assert again() in (address, True)
        assert (memory.epoch, repr(memory._extents)) == (epoch, state)
        assert not memory.is_cleared_since(epoch, 0, 512) and not memory.refill(epoch, 0, 512)


@pytest.mark.parametrize(
    "use",
    [
        lambda memory, stream: memory.view(0, 512).cpu_data(),
        lambda memory, stream: memory.view(0, 512).gpu_data(),
        lambda memory, stream: memory.view(0, 100).gpu_data("write"),
        lambda memory, stream: memory.view(512, 512).gpu_data("read", stream),
        lambda memory, stream: (setattr(memory, "watched", True), memory.set_writer(stream)),
        lambda memory, stream: memory.clear(512, 512),
        lambda memory, stream: memory.reserve(Side.DEVICE, 5000),
        lambda memory, stream: memory.set_host_array(np.ones(2000, np.uint8)),
        lambda memory, stream: memory.move_to(SimulatedDevice()),
    ],
)
def test_a_clear_stays_once_anything_else_has_happened(device, use):
    memory = SyncedMemory(1024, device)
    write(device, memory.mutable_gpu_data(), 1, 1024)
    epoch = memory.epoch
    memory.clear(0, 512)
    use(memory, device.create_stream())
    later = memory.epoch
    assert not memory.is_cleared_since(epoch, 0, 512) and not memory.refill(epoch, 0, 512)
    memory.view(0, 512).gpu_data("overwrite")
    assert memory.epoch not in (epoch, epoch + 1) and later != epoch + 1


def test_other_bytes_cleared_at_the_same_epoch_are_another_state(device):
    memory = SyncedMemory(1024, device)
    first, second = memory.view(0, 512), memory.view(512, 512)
    write(device, memory.mutable_gpu_data(), 1, 1024)
    epoch = memory.epoch
    memory.clear(0, 512)
    seen = memory.epoch
    assert second.gpu_data() and memory.epoch == seen  # an access that is good at this epoch
    first.gpu_data("overwrite")
    assert memory.epoch == epoch
    memory.clear(512, 512)
    assert memory.epoch not in (epoch, seen)
    assert not read(device, second.gpu_data(), 512).any()


def test_clear_under_a_queued_copy(device):
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(stream)
    memory.clear(0, 100)
    assert not read(device, memory.gpu_data(), 100).any()
    device.synchronize()
    assert not read(device, memory.gpu_data(), 100).any() and not memory.cpu_data().any()


# Trim


def test_trim_keeps_the_largest_live_view(device):
    memory = SyncedMemory(100, device, "x")
    whole, kept = memory.view(0, 9000), memory.view(512, 1000)
    whole.cpu_data("overwrite")[:] = 1
    whole.gpu_data()
    assert memory.trim() == 0
    del whole
    epoch = memory.epoch
    assert memory.trim() == 2 * (9000 - 1512)
    assert memory.epoch > epoch
    assert (memory.cpu_capacity, memory.gpu_capacity, device.statistics.bytes_held) == (1512, 1512, 1512)
    assert (kept.cpu_data() == 1).all() and (read(device, kept.gpu_data(), 1000) == 1).all()
    assert memory.trim() == 0


def test_trim_then_growing_again_reads_zero_on_both_sides(device):
    for side in Side:
        memory = SyncedMemory(0, device)
        whole = memory.view(0, 9000)
        whole.cpu_data("overwrite")[:] = 1
        whole.gpu_data("write")
        memory.set_size(700)
        del whole
        memory.trim()
        assert get(device, memory.view(0, 9000), side) == [1] * 700 + [0] * 8300


def test_trim_of_everything_frees_the_device(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 1
    memory.gpu_data()
    version = memory.version
    memory.set_size(0)
    memory.trim()
    assert (memory.cpu_capacity, memory.gpu_capacity, device.statistics.bytes_held) == (0, 0, 0)
    assert memory.version > version
    memory.set_size(100)
    assert not memory.cpu_data().any()
    write(device, memory.mutable_gpu_data(), 2, 100)
    assert (memory.cpu_data() == 2).all()


def test_trim_refuses_while_an_array_uses_the_tail_and_names_it(device):
    memory = SyncedMemory(600, device, "conv1/data")
    array = memory.view(512, 1000).cpu_data("overwrite")
    array[:] = 1
    part = array[900:]
    del array
    before = (memory.epoch, repr(memory._extents), memory.cpu_capacity)
    with pytest.raises(BlobmemError, match=r"'conv1/data' to 600 bytes.*bytes 512 to 1512 is still alive"):
        memory.trim()
    assert (memory.epoch, repr(memory._extents), memory.cpu_capacity) == before
    assert (part == 1).all()
    del part
    assert memory.trim() == 1512 - 600


# The epoch


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("intent", Intent)
@pytest.mark.parametrize("queued", [False, True])
def test_repeating_an_access_at_the_same_epoch_is_a_no_op(device, side, intent, queued):
    memory = SyncedMemory(0, device)
    stream = device.create_stream() if queued and side is Side.DEVICE else None
    memory.view(0, 512).cpu_data("overwrite")[:] = 1
    write(device, memory.view(512, 512).gpu_data("overwrite"), 2, 512)
    first = memory.access(side, 0, 2048, intent, stream)
    epoch, before, state = memory.epoch, device.statistics.snapshot(), repr(memory._extents)
    pending = stream and stream.pending
    for _ in range(3):
        assert memory.access(side, 0, 2048, intent, stream) == first
    assert (memory.epoch, device.statistics, repr(memory._extents)) == (epoch, before, state)
    assert (stream and stream.pending) == pending


def test_what_moves_the_epoch(device):
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    writer = object()
    for change in (
        lambda: memory.mutable_cpu_data(),
        lambda: memory.gpu_data(),
        lambda: memory.view(0, 50).gpu_data("write"),
        lambda: memory.view(0, 100).cpu_data("read"),
        lambda: memory.clear(0, 10),
        lambda: memory.reserve(Side.HOST, 500),
        lambda: memory.reserve(Side.DEVICE, 500),
        lambda: memory.trim(),
        lambda: memory.async_gpu_push(stream),
        lambda: (setattr(memory, "watched", True), memory.set_writer(writer)),
        lambda: memory.view(0, 100).gpu_data("read", stream),
        lambda: memory.view(0, 100).gpu_data("write"),
    ):
        epoch = memory.epoch
        change()
        assert memory.epoch > epoch


def test_what_does_not_move_the_epoch(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()
    memory.gpu_data()
    memory.set_writer("train")
    epoch = memory.epoch
    for nothing in (
        lambda: memory.cpu_data(),
        lambda: memory.gpu_data(),
        lambda: memory.set_writer("train"),
        lambda: memory.set_writer("test"),  # of which nobody takes notice
        lambda: memory.clear(512, 100),
        lambda: memory.reserve(Side.HOST, 10),
        lambda: memory.set_size(50),
        lambda: memory.async_gpu_push(device.create_stream()),
        lambda: memory.host_array(0, (10,), np.uint8),
        lambda: memory.view(512, 100),
        lambda: memory.set_size(100),
        lambda: memory.trim(),
    ):
        nothing()
        assert memory.epoch == epoch
    assert memory.writer == "test"


@pytest.mark.parametrize("side", [Side.HOST, Side.DEVICE])
@pytest.mark.parametrize("write", ["write", "overwrite", "clear"])
def test_a_write_that_is_expected_moves_the_epoch_once(device, side, write):
    memory = SyncedMemory(512, device)
    memory.access(side, 0, 512, "overwrite")
    memory.expect_write()
    epoch = memory.epoch
    memory.access(side, 0, 512, "read")
    memory.expect_write()
    assert memory.unwritten and memory.epoch == epoch
    memory.clear(0, 512) if write == "clear" else memory.access(side, 0, 512, write)
    assert not memory.unwritten and memory.epoch >= epoch + 2
    if write != "clear":
        after = memory.epoch
        memory.access(side, 0, 512, write)
        assert memory.epoch == after


class Listener:
    """Reads the bytes whenever it is told."""

    def __init__(self, memory):
        self.memory, self.read = memory, []
        memory.listen(weakref.WeakMethod(self.told))

    def told(self):
        self.read.append(self.memory.cpu_data()[0])


BY_HAND = {
    "host": lambda memory, view: view.cpu_data("write"),
    "host anew": lambda memory, view: view.cpu_data("overwrite"),
    "device": lambda memory, view: view.gpu_data("write"),
    "device anew": lambda memory, view: view.gpu_data("overwrite"),
    "all on the host": lambda memory, view: memory.mutable_cpu_data(),
    "all on the device": lambda memory, view: memory.mutable_gpu_data(),
    "zero": lambda memory, view: memory.clear(0, 100),
    "another array": lambda memory, view: memory.set_host_array(np.zeros(100, np.uint8)),
}


@pytest.mark.parametrize("write_by_hand", BY_HAND)
@pytest.mark.parametrize("side", [Side.HOST, Side.DEVICE])
def test_who_listens_is_told_once_before_somebody_writes(device, side, write_by_hand):
    memory = SyncedMemory(100, device)
    view = memory.view(0, 100)
    view.cpu_data("overwrite")[:] = 7
    memory.access(side, 0, 100, "write")
    epoch = memory.epoch
    listener = Listener(memory)
    assert memory.epoch > epoch  # who has an array to write into asks again
    view.cpu_data(), view.gpu_data(), memory.cpu_data(), memory.gpu_data()
    memory.access(side, 0, 100, "write")  # as schedules do
    assert not listener.read
    for _ in range(2):
        BY_HAND[write_by_hand](memory, view)
    assert listener.read == [7]


def test_a_memory_does_not_keep_who_listens(device):
    memory = SyncedMemory(100, device)
    listener = Listener(memory)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    memory.mutable_cpu_data()[:] = 3
    assert (memory.cpu_data() == 3).all()


def test_who_cannot_read_what_is_there_leaves_it_there(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 3

    class Fails(Listener):
        def told(self):
            raise MemoryError

    listener = Fails(memory)
    for _ in range(2):
        with pytest.raises(MemoryError):
            memory.mutable_cpu_data()[:] = 4
    assert (memory.cpu_data() == 3).all()
    del listener
    memory.mutable_cpu_data()[:] = 4


def test_resident_side(device):
    memory = SyncedMemory(0, device)
    assert memory.resident_side(0, 1000) is Side.HOST
    memory.view(0, 1000).cpu_data("overwrite")
    assert memory.resident_side(0, 1000) is Side.HOST
    memory.view(0, 1000).gpu_data()
    assert memory.resident_side(0, 1000) is Side.DEVICE
    memory.view(0, 400).cpu_data("write")
    assert memory.resident_side(0, 1000) is Side.HOST
    memory.view(512, 488).gpu_data("write")
    assert memory.resident_side(0, 1000) is Side.DEVICE
    memory.view(0, 1000).gpu_data("overwrite")
    assert memory.resident_side(0, 1000) is Side.DEVICE


def test_what_is_at_the_host(device):
    """Whoever else has it; and zeros."""
    memory = SyncedMemory(0, device)
    assert memory.is_at_host(0, 1000)
    memory.view(0, 400).cpu_data("overwrite")
    memory.view(0, 400).gpu_data()
    assert memory.is_at_host(0, 1000)
    memory.view(512, 488).gpu_data("write")
    assert memory.is_at_host(0, 512) and not memory.is_at_host(0, 1000)
    memory.view(0, 1000).cpu_data()
    assert memory.is_at_host(0, 1000)


# Lifetime, names


def test_a_memory_that_goes_frees_its_device_bytes_at_once(device):
    memory = SyncedMemory(1000, device)
    array = memory.mutable_cpu_data()
    memory.gpu_data()
    reference = weakref.ref(memory)
    gc.disable()
    try:
        del memory
        assert reference() is None and device.statistics.bytes_held == 0
    finally:
        gc.enable()
    array[:] = 3  # arrays outlive it
    assert array.sum() == 3000


def test_collected_in_the_middle_of_a_device_call(device):
    memory = SyncedMemory(100, device)
    memory.gpu_data()
    memory.itself = memory
    del memory
    with device._lock:
        gc.collect()
    device.allocate(1)
    assert device.statistics.bytes_held == 1


def test_the_name_is_the_label(device):
    memory = SyncedMemory(10, device, "first")
    memory.gpu_data()
    assert device.holders() == [("first", 10)]
    memory.name = "second"
    assert device.holders() == [("second", 10)] and memory.name == "second"
    assert "second" in repr(memory) and "at_gpu" in repr(memory)


# compute=False


def test_without_compute_everything_is_counted_and_nothing_touched():
    device = SimulatedDevice(1 << 40, compute=False)
    memory = SyncedMemory(1 << 36, device)
    memory.reserve(Side.HOST, 1 << 36)
    memory.view(0, 1 << 36).gpu_data("write")
    memory.view(0, 1 << 36).cpu_data("write")
    memory.gpu_data()
    memory.clear(0, 1 << 36)
    memory.cpu_data()
    s = device.statistics
    assert (s.memsets, s.dtoh_bytes, s.htod_bytes) == (1, 1 << 36, 1 << 36)


# Threads


def test_threads_on_disjoint_views_lose_nothing(device):
    """Each thread writes its own view on either side in turn while the memory grows under them, in place."""
    memory = SyncedMemory(0, device)
    nbytes, count, failures = 700, 4, []

    def work(index):
        try:
            view = memory.view(index * 1024, nbytes)
            stream = device.create_stream()
            for value in range(1, 60):
                if value % 3 == 0:
                    write(device, view.gpu_data("overwrite", stream), value, nbytes, stream)
                elif value % 3 == 1:
                    view.cpu_data("overwrite")[:] = value
                else:
                    write(device, view.gpu_data("write"), value, nbytes)
                assert (view.cpu_data() == value).all()
                assert (read(device, view.gpu_data(), nbytes) == value).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    whole = memory.view(0, 4096).cpu_data()
    assert all((whole[i * 1024 : i * 1024 + nbytes] == 59).all() for i in range(count))


def test_views_come_and_go_in_one_thread_while_another_trims(device):
    memory = SyncedMemory(512, device)
    memory.mutable_cpu_data()[:] = 1
    stop, failures = threading.Event(), []

    def trim():
        try:
            while not stop.is_set():
                memory.trim()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=trim)
    thread.start()
    for i in range(1500):
        view = memory.view(512, 1 + i)
        view.gpu_data("overwrite")
    stop.set()
    thread.join(60)
    assert not failures and view.nbytes == 1500
    assert (memory.cpu_data() == 1).all()


# Other places


def test_moving_to_another_device_keeps_every_byte(device):
    memory = SyncedMemory(1000, device, "moved")
    memory.mutable_cpu_data()[:] = 1
    device.as_array(memory.view(512, 488).gpu_data("write"), (488,), np.uint8)[:] = 2
    other = SimulatedDevice()
    held = memory.cpu_data()
    memory.move_to(other)
    assert device.statistics.bytes_held == 0 and memory.device is other
    assert memory.cpu_data().tolist() == [1] * 512 + [2] * 488 == held.tolist()
    assert other.as_array(memory.gpu_data(), (1000,), np.uint8).tolist() == held.tolist()
    other.as_array(memory.mutable_gpu_data(), (1000,), np.uint8)[:] = 3
    memory.move_to(HOST)
    assert other.statistics.bytes_held == 0
    assert set(memory.cpu_data().tolist()) == {3}


def test_a_copy_that_fails_leaves_the_memory_where_it_was(device):
    memory = SyncedMemory(1000, device, "moved")
    device.as_array(memory.mutable_gpu_data(), (1000,), np.uint8)[:] = 2
    device.fail_at = lambda name, _: name == "memcpy_dtoh"
    with pytest.raises(DeviceError):
        memory.move_to(HOST)
    assert memory.device is device
    device.fail_at = None
    memory.move_to(HOST)
    assert set(memory.cpu_data().tolist()) == {2}


def test_a_new_host_array_replaces_the_old_one(device):
    memory = SyncedMemory(8, device)
    memory.mutable_cpu_data()[:] = 1
    memory.gpu_data()
    first, second = np.full(8, 2, np.uint8), np.full(8, 3, np.uint8)
    for array in (first, second, first):
        memory.set_host_array(array)
        assert device.as_array(memory.gpu_data(), (8,), np.uint8).tolist() == array.tolist()
        assert memory.mutable_cpu_data().ctypes.data == array.ctypes.data
    device.as_array(memory.mutable_gpu_data(), (8,), np.uint8)[:] = 9
    assert memory.cpu_data()[0] == 9 and first[0] == 9 and second[0] == 3
