"""Work in flight. The simulated stream copies only when somebody waits: a wait that is missing shows as wrong bytes."""

import numpy as np
import pytest
from device_tools import Counts, read, write

from blobmem.memory import Side, SyncedMemory
from blobmem.memory.device_side import DeviceSide


def test_async_push_counts_and_state(device):
    memory = SyncedMemory(1000, device)
    stream = device.create_stream()
    memory.view(0, 512).cpu_data("overwrite")[:] = 1
    did = Counts(device)
    memory.async_gpu_push(stream)
    assert did() == (1, 512, 0, 0, 1, 1)
    assert [bits for _, _, bits in memory._extents.runs(0, 1000)] == [3, 2]
    memory.async_gpu_push(stream)
    assert did() == (0, 0, 0, 0, 0, 0) and stream.pending == 2
    assert read(device, memory.gpu_data(), 1000).tolist() == [1] * 512 + [0] * 488


@pytest.mark.parametrize("intent", ["write", "overwrite"])
def test_a_host_write_waits_for_the_copy_that_reads_it(device, intent):
    memory = SyncedMemory(2048, device)
    stream = device.create_stream()
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(stream)
    memory.cpu_data()
    assert stream.pending == 1  # a read does not wait
    memory.view(1024, 100).cpu_data(intent)[:] = 2
    assert stream.pending == 0
    got = read(device, memory.view(0, 1024).gpu_data(), 1024)
    assert (got == 1).all()


def test_without_that_wait_wrong_bytes_would_show(device, monkeypatch):
    monkeypatch.setattr(DeviceSide, "land_for_host", lambda *args: False)
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(stream)
    got = np.zeros(100, np.uint8)
    device.memcpy_dtoh(got, memory.view(0, 100).gpu_data("read", stream), stream)
    memory.mutable_cpu_data()[:] = 2
    device.synchronize()
    assert (got == 2).all()  # 1 is what the stream was promised


def test_a_device_access_waits_for_the_copy(device):
    memory = SyncedMemory(1024, device)
    stream = device.create_stream()
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(stream)
    assert (read(device, memory.gpu_data(), 1024) == 1).all()
    assert stream.pending == 0


def test_another_stream_comes_after_the_copy_without_anybody_waiting(device):
    memory = SyncedMemory(100, device)
    first, second = device.create_stream(), device.create_stream()
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(first)
    got = np.zeros(100, np.uint8)
    device.memcpy_dtoh(got, memory.view(0, 100).gpu_data("read", second), second)
    assert first.pending == 1 and second.pending == 2
    second.synchronize()
    assert (got == 1).all() and first.pending == 0


def test_bytes_elsewhere_do_not_wait(device):
    memory = SyncedMemory(2048, device)
    memory.mutable_cpu_data()[:] = 1
    memory.gpu_data()
    stream = device.create_stream()
    write(device, memory.view(0, 512).gpu_data("overwrite", stream), 2, 512, stream)
    memory.view(512, 512).gpu_data("write")
    memory.view(512, 512).cpu_data("write")
    assert stream.pending == 1
    assert (memory.view(0, 512).cpu_data() == 2).all()
    assert stream.pending == 0


def test_readers_do_not_wait_for_readers(device):
    memory = SyncedMemory(100, device)
    memory.mutable_cpu_data()[:] = 1
    memory.gpu_data()
    stream, got = device.create_stream(), np.zeros(100, np.uint8)
    device.memcpy_dtoh(got, memory.view(0, 100).gpu_data("read", stream), stream)
    memory.gpu_data()
    memory.cpu_data()
    memory.mutable_cpu_data()[:] = 2  # the stream reads the device's bytes, not these
    assert stream.pending == 1
    memory.gpu_data()  # which brings the 2, after the stream has read the 1
    assert stream.pending == 0 and (got == 1).all()


def test_a_fetch_waits_for_the_stream_that_writes(device):
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    address = memory.view(0, 100).gpu_data("overwrite", stream)
    write(device, address, 5, 100, stream)
    assert (memory.cpu_data() == 5).all()


def test_work_queued_long_after_the_access_is_waited_for_too(device):
    """A stream user may go on with its address while the epoch stands."""
    memory = SyncedMemory(100, device)
    stream, other = device.create_stream(), device.create_stream()
    view = memory.view(0, 100)
    address, epoch = view.gpu_data("overwrite", stream), memory.epoch
    write(device, address, 1, 100, stream)
    stream.synchronize()
    assert memory.epoch == epoch  # so that this is as good as an access of its own:
    write(device, address, 2, 100, stream)
    got = np.zeros(100, np.uint8)
    device.memcpy_dtoh(got, view.gpu_data("read", other), other)
    other.synchronize()
    assert (got == 2).all()
    assert memory.epoch != epoch


def test_two_streams_in_turn(device):
    memory = SyncedMemory(100, device)
    view, streams = memory.view(0, 100), [device.create_stream(), device.create_stream()]
    view.gpu_data("overwrite")
    results = []
    for i in range(20):
        stream = streams[i % 2]
        write(device, view.gpu_data("write", stream), i, 100, stream)
        got, reader = np.zeros(100, np.uint8), streams[(i // 2) % 2]
        device.memcpy_dtoh(got, view.gpu_data("read", reader), reader)
        results.append(got)
    streams[0].synchronize()
    streams[1].synchronize()
    assert [got[0] for got in results] == list(range(20))
    assert len(memory._far.flights) <= 4


def test_finished_copies_are_forgotten(device):
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    for value in range(50):
        memory.mutable_cpu_data()[:] = value
        memory.async_gpu_push(stream)
        stream.synchronize()
    memory.gpu_data()
    assert memory._far.flights == []


def test_a_device_move_waits_for_pending_work(device):
    device.reservation = lambda nbytes: 2 << 20
    memory = SyncedMemory(100, device)
    stream = device.create_stream()
    write(device, memory.view(0, 100).gpu_data("overwrite", stream), 6, 100, stream)
    got = np.zeros(100, np.uint8)
    device.memcpy_dtoh(got, memory.view(0, 100).gpu_data("read", stream), stream)
    memory.view(0, device.reservation(100) + 1).gpu_data()
    assert device.statistics.moves == 1
    assert (got == 6).all() and (memory.view(0, 100).cpu_data() == 6).all()


def test_trim_waits_for_copies_in_flight(device):
    memory = SyncedMemory(5000, device)
    stream, got = device.create_stream(), np.zeros(5000, np.uint8)
    memory.mutable_cpu_data()[:] = 1
    memory.async_gpu_push(stream)
    device.memcpy_dtoh(got, memory.view(0, 5000).gpu_data("read", stream), stream)
    memory.set_size(100)
    memory.trim()
    assert stream.pending == 0 and (got == 1).all()


def test_a_memory_that_goes_waits_for_its_copies(device):
    memory = SyncedMemory(100, device)
    stream, got = device.create_stream(), np.zeros(100, np.uint8)
    memory.mutable_cpu_data()[:] = 4
    memory.async_gpu_push(stream)
    device.memcpy_dtoh(got, memory.view(0, 100).gpu_data("read", stream), stream)
    del memory
    assert (got == 4).all() and device.statistics.bytes_held == 0


def test_an_access_waits_for_a_stream_but_leaves_its_user_the_rest(device):
    """One thread has asked for bytes to use on its stream, and another one for those beside, before the first has queued
    its work."""
    memory, stream = SyncedMemory(2048, device), device.create_stream()
    memory.access(Side.DEVICE, 0, 2048, "overwrite", stream)
    address = memory.view(0, 512).gpu_data("overwrite", stream)
    memory.view(1024, 512).gpu_data("overwrite")  # waits for the stream
    memory.view(1536, 512).cpu_data()
    device.memcpy_htod(address, np.full(512, 7, np.uint8), stream)
    assert (memory.view(0, 512).cpu_data() == 7).all()
