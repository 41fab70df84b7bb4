import gc
import threading

import numpy as np
import pytest
from device_tools import read

from blobmem.devices import SimulatedDevice
from blobmem.devices.simulated import FIRST_ADDRESS, POISON
from blobmem.errors import DeviceError, OutOfDeviceMemory

MIB = 1 << 20


@pytest.fixture
def device():
    return SimulatedDevice(64 * MIB)


# Allocation and accounting


def test_exact_accounting(device):
    a = device.allocate(1001, "a")
    b = device.allocate(500, "b")
    assert device.memory_info() == (64 * MIB - 1501, 64 * MIB)
    assert device.holders() == [("a", 1001), ("b", 500)]
    assert device.grow(b, 500, 2000) == b
    assert device.holders() == [("b", 2000), ("a", 1001)]
    device.shrink(b, 2000, 1)
    device.free(a)
    device.relabel(b, "c")
    assert device.holders() == [("c", 1)]
    s = device.statistics
    assert (s.bytes_held, s.peak_bytes) == (1, 3001)
    assert (s.allocations, s.grows, s.shrinks, s.frees, s.moves, s.allocator_calls) == (2, 1, 1, 1, 0, 5)
    s.reset_peak()
    assert s.peak_bytes == 1


def test_statistics_snapshot_and_difference(device):
    before = device.statistics.snapshot()
    a = device.allocate(100)
    device.memcpy_htod(a, np.zeros(10, np.float32))
    since = device.statistics - before
    assert (since.allocations, since.bytes_held, since.htod_copies, since.htod_bytes, since.dtoh_bytes) == (
        1, 100, 1, 40, 0,
    )  # fmt: skip
    assert before.allocations == 0


def test_addresses_are_its_own_and_never_used_again(device):
    seen = []
    for nbytes in (1, 100, MIB, 3 * MIB, 10):
        address = device.allocate(nbytes)
        assert address >= FIRST_ADDRESS
        assert all(address >= end for end in seen)
        seen.append(address + 16 * nbytes)
        device.free(address)


def test_allocating_nothing_is_misuse(device):
    for nbytes in (0, -1):
        with pytest.raises(DeviceError, match="at least one"):
            device.allocate(nbytes)


def test_fresh_and_grown_bytes_are_poisoned(device):
    a = device.allocate(100)
    assert (read(device, a, 100) == POISON).all()
    device.memset(a, 1, 100)
    device.grow(a, 100, 200)
    assert (read(device, a, 100) == 1).all()
    assert (read(device, a + 100, 100) == POISON).all()
    device.shrink(a, 200, 50)
    device.grow(a, 50, 100)
    assert (read(device, a + 50, 50) == POISON).all()


def test_growth_in_place_up_to_the_reservation_then_moves(device):
    device.reservation = lambda nbytes: 2 << 20
    a = device.allocate(100, "a")
    device.memset(a, 5, 100)
    reach = device.reservation(100)
    assert device.grows_in_place(a, reach) and not device.grows_in_place(a, reach + 1)
    assert device.grow(a, 100, reach) == a
    before = device.statistics.snapshot()
    b = device.grow(a, reach, reach + 1)
    assert b != a
    assert (read(device, b, 100) == 5).all()
    since = device.statistics - before
    assert (since.grows, since.moves, since.frees, since.dtod_copies, since.dtod_bytes) == (1, 1, 0, 1, reach)
    assert device.statistics.peak_bytes == 2 * reach + 1
    with pytest.raises(DeviceError):
        read(device, a, 1)


def test_a_move_needs_room_for_both(device):
    reach = 2 << 20
    device = SimulatedDevice(2 * reach)
    device.reservation = lambda nbytes: reach
    a = device.allocate(1, "a")
    device.grow(a, 1, reach)
    before = device.statistics.snapshot()
    with pytest.raises(OutOfDeviceMemory) as raised:
        device.grow(a, reach, reach + 1)
    assert (raised.value.requested, raised.value.free) == (reach + 1, reach)
    assert device.statistics == before


@pytest.mark.parametrize(("old", "new"), [(99, 200), (100, 99), (101, 200)])
def test_grow_checks_what_it_is_told(device, old, new):
    a = device.allocate(100)
    with pytest.raises(DeviceError, match="cannot grow"):
        device.grow(a, old, new)


@pytest.mark.parametrize(("old", "new"), [(99, 50), (100, 101), (100, 0)])
def test_shrink_checks_what_it_is_told(device, old, new):
    a = device.allocate(100)
    with pytest.raises(DeviceError, match="cannot shrink"):
        device.shrink(a, old, new)


def test_out_of_memory_names_everything_and_changes_nothing(device):
    device.allocate(50 * MIB, "fc6/0")
    small = device.allocate(2 * MIB, "conv1/0")
    before = device.statistics.snapshot()
    with pytest.raises(OutOfDeviceMemory) as raised:
        device.allocate(40 * MIB, "conv1/data")
    error = raised.value
    assert (error.requested, error.free, error.total) == (40 * MIB, 12 * MIB, 64 * MIB)
    assert error.holders == [("fc6/0", 50 * MIB), ("conv1/0", 2 * MIB)]
    for part in ("40.0 MiB asked for 'conv1/data'", "12.0 MiB of 64.0 MiB free", "fc6/0 50.0 MiB, conv1/0 2.0 MiB"):
        assert part in str(error)
    with pytest.raises(OutOfDeviceMemory, match=r"'conv1/0' to grow from 2\.0 MiB to 16\.0 MiB"):
        device.grow(small, 2 * MIB, 16 * MIB)
    assert device.statistics == before
    assert device.allocate(12 * MIB)
    with pytest.raises(MemoryError, match="1 bytes asked for 'unnamed', 0 bytes of"):
        device.allocate(1)


# Failures by script


def test_fail_at_ordinals_count_allocate_and_grow_together():
    device = SimulatedDevice(fail_at=(2, 4))
    a = device.allocate(10)  # 1
    with pytest.raises(OutOfDeviceMemory, match="fail_at asked"):
        device.grow(a, 10, 20)  # 2
    assert device.grow(a, 10, 20) == a  # 3
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(10)  # 4
    device.allocate(10)
    assert device.statistics.bytes_held == 30


def test_fail_at_one_ordinal():
    device = SimulatedDevice(fail_at=1)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(10)
    device.allocate(10)


@pytest.mark.parametrize("name", ["memcpy_htod", "memcpy_dtoh", "memcpy_dtod", "memset"])
def test_fail_at_call(name):
    device = SimulatedDevice()
    a = device.allocate(100)
    device.memset(a, 1, 100)
    calls = {
        "memcpy_htod": lambda: device.memcpy_htod(a, np.full(10, 9, np.uint8)),
        "memcpy_dtoh": lambda: read(device, a, 10),
        "memcpy_dtod": lambda: device.memcpy_dtod(a, a + 50, 10),
        "memset": lambda: device.memset(a, 9, 10),
    }
    start = 2 if name == "memset" else 1
    device.fail_at = lambda called, ordinal: called == name and ordinal == start + 1
    calls[name]()
    device.memset(a, 1, 100) if name != "memset" else None
    bytes_before, before = device.as_array(a, (100,), np.uint8).copy(), device.statistics.snapshot()
    with pytest.raises(DeviceError, match=f"{name} number {start + 1} fails"):
        calls[name]()
    assert device.statistics == before
    assert np.array_equal(device.as_array(a, (100,), np.uint8), bytes_before)
    calls[name]()


def test_fail_at_may_look_at_the_device():
    device = SimulatedDevice(1000)
    device.fail_at = lambda name, _: name == "allocate" and device.memory_info()[0] < 500
    device.allocate(600)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(1)


# Copies


def test_round_trip_of_any_contiguous_array(device):
    a = device.allocate(1000)
    for array in (
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
        np.array(3.5),
        np.arange(10, dtype=np.int64)[2:5],
    ):
        device.memcpy_htod(a, array)
        back = np.empty_like(array)
        device.memcpy_dtoh(back, a)
        assert np.array_equal(array, back)
    device.memcpy_htod(a, b"bytes too")
    assert read(device, a, 9).tobytes() == b"bytes too"


def test_copies_within_and_counts(device):
    a, b = device.allocate(100), device.allocate(100)
    device.memset(a, 3, 100)
    device.memcpy_dtod(b + 10, a, 20)
    got = read(device, b, 100)
    assert (got[10:30] == 3).all() and (got[:10] == POISON).all() and (got[30:] == POISON).all()
    s = device.statistics
    assert (s.dtod_copies, s.dtod_bytes, s.dtoh_copies, s.dtoh_bytes, s.memsets) == (1, 20, 1, 100, 1)


def test_empty_copies_count_nothing(device):
    a = device.allocate(10)
    device.memcpy_htod(a + 10, np.empty(0))
    device.memcpy_dtoh(np.empty(0), a)
    device.memset(a, 0, 0)
    device.memcpy_dtod(a, a, 0)
    s = device.statistics
    assert s.htod_copies == s.dtoh_copies == s.memsets == s.dtod_copies == 0


def test_host_arrays_that_cannot_be_copied(device):
    a = device.allocate(1000)
    with pytest.raises(DeviceError, match="not contiguous"):
        device.memcpy_htod(a, np.zeros((4, 4))[:, ::2])
    locked = np.zeros(4)
    locked.setflags(write=False)
    with pytest.raises(DeviceError, match="read-only"):
        device.memcpy_dtoh(locked, a)
    device.memcpy_htod(a, locked)


@pytest.mark.parametrize("offset", [-1, 91, 1 << 30])
def test_every_access_outside_a_live_allocation_is_an_error(device, offset):
    a = device.allocate(100, "mine")
    other = device.allocate(100, "other")
    array = np.zeros(10, np.uint8)
    before = device.statistics.snapshot()
    for call in (
        lambda: device.memcpy_htod(a + offset, array),
        lambda: device.memcpy_dtoh(array, a + offset),
        lambda: device.memcpy_dtod(a + offset, other, 10),
        lambda: device.memcpy_dtod(other, a + offset, 10),
        lambda: device.memset(a + offset, 0, 10),
        lambda: device.as_array(a + offset, (10,), np.uint8),
    ):
        with pytest.raises(DeviceError, match=rf"10 bytes at {a + offset:#x}.*the nearest is"):
            call()
    assert device.statistics == before


def test_the_nearest_allocation_is_named(device):
    a = device.allocate(100, "mine")
    device.allocate(100, "far")
    with pytest.raises(DeviceError, match=f"'mine', 100 bytes at {a:#x}"):
        device.memset(a + 95, 0, 10)


def test_freed_is_gone(device):
    a = device.allocate(100, "a")
    array = device.as_array(a, (100,), np.uint8)
    array[:] = 1
    device.free(a)
    with pytest.raises(DeviceError, match="none is live"):
        device.free(a)
    with pytest.raises(DeviceError):
        device.memset(a, 0, 1)
    assert (array == POISON).all()  # whoever kept the array sees that the bytes are gone


def test_free_of_an_inner_address(device):
    a = device.allocate(100)
    with pytest.raises(DeviceError, match="no allocation starts there"):
        device.free(a + 1)


def test_as_array_is_the_devices_memory(device):
    a = device.allocate(100)
    array = device.as_array(a + 4, (2, 3), np.float32)
    array[:] = [[1, 2, 3], [4, 5, 6]]
    assert np.array_equal(read(device, a + 4, 24).view(np.float32), [1, 2, 3, 4, 5, 6])
    with pytest.raises(DeviceError):
        device.as_array(a + 4, (25,), np.float32)
    device.grow(a, 100, 200)
    array[0, 0] = 9
    assert device.as_array(a + 4, (), np.float32) == 9


# compute=False


def test_without_compute_everything_is_counted_and_no_page_exists():
    device = SimulatedDevice(1 << 40, compute=False)
    a = device.allocate(1 << 38, "huge")
    b = device.allocate(1 << 37, "large")
    host = np.ones(100, np.uint8)
    device.memcpy_htod(a, host)
    device.memset(a, 0, 1 << 38)
    device.memcpy_dtod(b, a, 1 << 37)
    device.memcpy_dtoh(host, a)
    assert (host == 1).all()
    stream = device.create_stream()
    device.memcpy_htod(a, host, stream)
    assert not stream.record().done
    stream.synchronize()
    with pytest.raises(DeviceError):
        device.memcpy_htod(a + (1 << 38) - 1, host)
    with pytest.raises(DeviceError, match="compute=False"):
        device.as_array(a, (1,), np.uint8)
    with pytest.raises(OutOfDeviceMemory):
        device.grow(a, 1 << 38, 1 << 40)
    s = device.statistics
    assert (s.htod_copies, s.dtod_bytes, s.memsets, s.bytes_held) == (2, 1 << 37, 1, (1 << 38) + (1 << 37))
    device.free(a)
    device.free(b)


# Streams and events


def test_a_queued_copy_reads_its_source_when_it_is_waited_for(device):
    a, stream = device.allocate(4), device.create_stream()
    source = np.array([1, 2, 3, 4], np.uint8)
    device.memcpy_htod(a, source, stream)
    assert (read(device, a, 4) == POISON).all()  # a synchronous call does not flush streams
    source[0] = 9
    stream.synchronize()
    assert read(device, a, 4).tolist() == [9, 2, 3, 4]


def test_events_end_where_they_were_recorded(device):
    a, stream = device.allocate(4), device.create_stream()
    assert stream.record().done
    device.memset(a, 1, 4, stream)
    event = stream.record()
    device.memset(a, 2, 4, stream)
    assert not event.done and stream.pending == 2
    event.synchronize()
    assert event.done and stream.pending == 1
    assert (read(device, a, 4) == 1).all()
    event.synchronize()
    device.synchronize()
    assert (read(device, a, 4) == 2).all()


def test_streams_wait_for_one_another(device):
    a, b = device.allocate(4), device.allocate(4)
    first, second = device.create_stream(), device.create_stream()
    device.memset(a, 7, 4, first)
    second.wait(first.record())
    device.memset(a, 8, 4, first)
    device.memcpy_dtod(b, a, 4, second)
    second.synchronize()
    assert (read(device, b, 4) == 7).all()
    assert first.pending == 1


def test_a_long_chain_of_waits(device):
    a = device.allocate(1)
    streams = [device.create_stream(), device.create_stream()]
    for i in range(5000):
        device.memset(a, i % 251, 1, streams[i % 2])
        streams[(i + 1) % 2].wait(streams[i % 2].record())
    device.synchronize()
    assert read(device, a, 1)[0] == 4999 % 251
    assert all(stream.pending == 0 for stream in streams)


def test_freeing_shrinking_and_moving_finish_queued_work_first(device):
    device.reservation = lambda nbytes: 2 << 20
    source = np.full(10, 6, np.uint8)
    stream, got = device.create_stream(), np.zeros(10, np.uint8)
    a = device.allocate(10)
    device.memcpy_htod(a, source, stream)
    device.memcpy_dtoh(got, a, stream)
    device.free(a)
    assert (got == 6).all()
    a = device.allocate(10)
    device.memcpy_htod(a, source, stream)
    device.shrink(a, 10, 5)
    assert stream.pending == 0
    device.memset(a, 4, 5, stream)
    b = device.grow(a, 5, device.reservation(10) + 1)
    assert (read(device, b, 5) == 4).all()


def test_freeing_leaves_work_on_other_allocations_queued(device):
    a, b, stream = device.allocate(10), device.allocate(10), device.create_stream()
    device.memset(b, 1, 10, stream)
    device.free(a)
    assert stream.pending == 1


def test_queued_work_is_checked_when_it_is_queued(device):
    a, stream = device.allocate(10), device.create_stream()
    with pytest.raises(DeviceError):
        device.memset(a + 5, 0, 10, stream)
    device.fail_at = lambda name, _: name == "memset"
    with pytest.raises(DeviceError):
        device.memset(a, 0, 10, stream)
    assert stream.pending == 0


def test_streams_and_events_of_another_device(device):
    other = SimulatedDevice(MIB)
    a = device.allocate(10)
    with pytest.raises(DeviceError, match="not one of its streams"):
        device.memset(a, 0, 10, other.create_stream())
    with pytest.raises(DeviceError, match="not an event"):
        device.create_stream().wait(other.create_stream().record())


def test_work_on_a_dropped_stream_is_done_all_the_same(device):
    a, stream = device.allocate(10), device.create_stream()
    device.memset(a, 3, 10, stream)
    del stream
    gc.collect()
    device.synchronize()
    assert (read(device, a, 10) == 3).all()


# Threads and finalizers


def test_threads_account_together(device):
    def work():
        for i in range(200):
            address = device.allocate(1 + i)
            device.memset(address, 1, 1 + i)
            assert device.grow(address, 1 + i, 2 + i) == address
            device.free(address)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    s = device.statistics
    assert s.bytes_held == 0
    assert s.allocations == s.grows == s.frees == s.memsets == 800


def test_finalizers_never_enter_a_call_that_is_under_way(device):
    """The garbage collector may run one while the device's lock is held by the same thread."""
    a = device.allocate(10)
    with device._lock:
        device.when_idle(lambda: device.free(a))  # would deadlock if it ran now
        assert device.statistics.bytes_held == 10
    b = device.allocate(5)
    assert device.statistics.bytes_held == 5
    device.when_idle(lambda: device.free(b))
    assert device.statistics.bytes_held == 0
