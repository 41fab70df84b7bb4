import warnings

import numpy as np
import pytest
from device_tools import read, write

import blobmem.memory as memory_package
from blobmem.errors import BlobmemError
from blobmem.memory import SyncedMemory
from blobmem.memory.host_side import HostSide

# Arrays lent


def test_lent_follows_slices_and_deaths(device):
    memory = SyncedMemory(2000, device)
    array = memory.view(512, 100).cpu_data("write")
    assert memory.lent(600, 1) and memory.lent(0, 513) and not memory.lent(0, 512) and not memory.lent(612, 100)
    view_of_view = array[10:].reshape(9, 10)[1:].view(np.int8)
    del array
    assert memory.lent(512, 100)
    exported = memoryview(view_of_view)
    del view_of_view
    assert memory.lent(512, 100)
    del exported
    assert not memory.lent(0, 2000)
    frozen = memory.cpu_data()
    assert memory.lent(0, 1) and not memory.lent(0, 1, writeable=True)
    del frozen
    kept = memory.host_array(0, (10,), np.uint8, lend=False)
    assert not memory.lent(0, 10) and kept.size == 10


def test_lending_often_costs_no_memory(device):
    memory = SyncedMemory(100, device)
    kept = [memory.cpu_data() for _ in range(100)]
    for _ in range(5000):
        memory.cpu_data()
    assert len(memory._host._lent) <= 2 * len(kept) + 1


def test_host_array_needs_an_access_first(device):
    memory = SyncedMemory(100, device, "x")
    for _ in range(2):
        with pytest.raises(BlobmemError, match=r"'x' has .* access them first"):
            memory.host_array(0, (101,), np.uint8)
        memory.mutable_cpu_data()


def test_fresh_host_pages_are_not_touched_to_make_them_zero(device, monkeypatch):
    memory = SyncedMemory(1 << 20, device)
    memory.view(0, 512).cpu_data("overwrite")[:] = 1
    touched, original = [], HostSide.bytes

    def recorded(self, start, stop):
        touched.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(HostSide, "bytes", recorded)
    memory.cpu_data()
    memory.clear(0, 1 << 20)
    assert not memory.cpu_data().any()
    assert touched == [(0, 512)]


# Adopted arrays


def test_adopted_memory_is_the_users_array(device):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory = SyncedMemory.adopt(array, device, "input")
    assert (memory.size, memory.cpu_capacity, memory.head) == (24, 24, "at_cpu")
    assert np.shares_memory(memory.cpu_data(), array)
    assert np.array_equal(read(device, memory.gpu_data(), 24).view(np.float32), array.ravel())
    write(device, memory.view(0, 24).gpu_data("overwrite"), 0, 24)
    memory.cpu_data()
    assert not array.any()
    memory.set_size(4)
    memory.trim()
    assert memory.cpu_capacity == 24
    part = memory.mutable_cpu_data()[1:3]
    assert memory.lent(0, 4) and part.size == 2
    del part
    assert not memory.lent(0, 4)
    assert SyncedMemory.adopt(np.empty(0, np.float32)).cpu_data().size == 0


def test_growing_past_an_adopted_array_detaches_with_a_warning(device):
    array = np.full(1000, 7, np.uint8)
    memory = SyncedMemory.adopt(array, device, "input")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.view(0, 1000).cpu_data("write")[:10] = 8
        memory.view(0, 2000).gpu_data()
    with pytest.warns(UserWarning, match="'input' outgrew the 1000 bytes") as caught:
        grown = memory.view(0, 2000).cpu_data("write")
    assert caught[0].filename == __file__
    assert memory.version == 1
    assert grown.tolist() == [8] * 10 + [7] * 990 + [0] * 1000
    grown[:] = 1
    assert array.tolist() == [8] * 10 + [7] * 990


def test_what_cannot_be_adopted():
    locked = np.zeros(4)
    locked.setflags(write=False)
    for array in (locked, np.zeros((4, 4))[:, ::2]):
        with pytest.raises(ValueError, match="C-contiguous, writable"):
            SyncedMemory.adopt(array)


# The debug mode


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr(memory_package, "debug", True)


@pytest.mark.parametrize(
    "touch",
    [
        lambda m: m.cpu_data(),
        lambda m: m.mutable_cpu_data(),
        lambda m: m.gpu_data(),
        lambda m: m.mutable_gpu_data(),
        lambda m: m.clear(0, 100),
        lambda m: m.view(0, 60).cpu_data("overwrite"),
    ],
)
def test_a_late_write_is_reported(device, debug, touch):
    memory = SyncedMemory(100, device, "data")
    array = memory.mutable_cpu_data()
    array[:] = 1
    memory.gpu_data()
    array[50] = 2
    with pytest.raises(BlobmemError, match="late write: bytes 0 to 100 of memory 'data'"):
        touch(memory)
    touch(memory)  # reported once


def test_a_late_write_under_a_push_is_reported(device, debug):
    memory = SyncedMemory(100, device)
    array = memory.mutable_cpu_data()
    memory.async_gpu_push(device.create_stream())
    array[0] = 1
    with pytest.raises(BlobmemError, match="late write"):
        memory.cpu_data()


def test_writes_in_time_are_not_reported(device, debug):
    memory = SyncedMemory(1000, device)
    array = memory.mutable_cpu_data()
    for value in range(3):
        array[:] = value
        memory.gpu_data()
        memory.cpu_data()
        memory.view(512, 100).cpu_data("write")[:] = 9  # a part may be written again, the rest stays sealed
        memory.view(0, 1000).gpu_data("write")
        write(device, memory.view(0, 1000).gpu_data("overwrite"), 7, 1000)
        assert (memory.cpu_data() == 7).all()
        array = memory.mutable_cpu_data()
    del array
    memory.gpu_data()


def test_the_rest_of_a_sealed_array_stays_sealed(device, debug):
    memory = SyncedMemory(1000, device)
    array = memory.mutable_cpu_data()
    memory.gpu_data()
    memory.view(512, 100).cpu_data("write")
    array[520] = 1  # rightly: somebody asked for these bytes to write
    memory.gpu_data()
    array[700] = 1
    with pytest.raises(BlobmemError, match="late write: bytes 612 to 1000"):
        memory.cpu_data()


def test_debug_off_seals_nothing(device):
    memory = SyncedMemory(100, device)
    array = memory.mutable_cpu_data()
    memory.gpu_data()
    array[:] = 1
    memory.cpu_data()
    assert memory._host.seals is None
