"""Memory from the driver: on a driver of our own that checks how it is called, and on a GPU where there is one."""

import ctypes
import enum
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_devices import needs_gpu
from fake_driver import FakeDriver

from blobmem.devices.cuda import driver as module
from blobmem.devices.cuda.calls import bindings, check
from blobmem.devices.cuda.chunks import NoRoom
from blobmem.devices.cuda.context import Context
from blobmem.devices.cuda.driver import RED_ZONE, PlainMemory, VirtualMemory, make_space
from blobmem.devices.cuda.space import Space
from blobmem.errors import DeviceError

MIB = 1 << 20
CHUNK = 2 * MIB


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


def entry(function):
    """A driver function of the fake: a tuple beginning with its error code, one that was asked for or its own."""

    @functools.wraps(function)
    def call(self, *arguments):
        self.called.append(function.__name__)
        code = self.failures.pop(function.__name__, CUresult.CUDA_SUCCESS)
        if code:
            return (code,) if function.__name__ in NO_VALUE else (code, None)
        try:
            value = function(self, *arguments)
        except NoRoom:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return (CUresult.CUDA_SUCCESS,) if function.__name__ in NO_VALUE else (CUresult.CUDA_SUCCESS, value)

    return call


NO_VALUE = {
    "cuMemAddressFree", "cuMemRelease", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoD", "cuMemcpyDtoH",
    "cuMemsetD8", "cuCtxSynchronize", "cuMemFree",
}  # fmt: skip


class FakeBindings:
    """What is used of `cuda.bindings.driver`, over a FakeDriver."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")

    def __init__(self, virtual=1, capacity=1 << 50):
        self.virtual = virtual
        self.memory = FakeDriver(CHUNK, capacity)
        self.failures = {}
        self.called = []
        self.plain = {}
        self.accessible = set()

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    @entry
    def cuDeviceGet(self, ordinal):
        return ordinal

    @entry
    def cuDeviceGetAttribute(self, attribute, device):
        assert (attribute, device) == (102, 3)
        return self.virtual

    @entry
    def cuMemGetAllocationGranularity(self, properties, option):
        self.check_properties(properties)
        assert option == "minimum"
        return CHUNK

    def check_properties(self, properties):
        assert properties == SimpleNamespace(type="pinned", location=SimpleNamespace(type="device", id=3))

    @entry
    def cuMemAddressReserve(self, nbytes, alignment, address, flags):
        assert (alignment, address, flags) == (CHUNK, 0, 0)
        return self.memory.reserve(nbytes)

    @entry
    def cuMemAddressFree(self, address, nbytes):
        self.memory.unreserve(address, nbytes)

    @entry
    def cuMemCreate(self, nbytes, properties, flags):
        self.check_properties(properties)
        assert flags == 0
        return self.memory.create(nbytes)

    @entry
    def cuMemRelease(self, handle):
        self.memory.release(handle)

    @entry
    def cuMemMap(self, address, nbytes, offset, handle, flags):
        assert (offset, flags) == (0, 0)
        self.memory.map(address, nbytes, handle)

    @entry
    def cuMemSetAccess(self, address, nbytes, descriptors, count):
        assert self.memory.mappings[address][0] == nbytes and count == 1
        assert descriptors == [SimpleNamespace(flags="rw", location=SimpleNamespace(type="device", id=3))]
        self.accessible.add(address)

    @entry
    def cuMemUnmap(self, address, nbytes):
        self.memory.unmap(address, nbytes)
        self.accessible.discard(address)

    @entry
    def cuMemcpyDtoD(self, target, source, nbytes):
        self.memory.queue_write(target, self.memory.read(source, nbytes))

    @entry
    def cuMemcpyDtoH(self, target, source, nbytes):
        ctypes.memmove(target, self.memory.read(source, nbytes).tobytes(), nbytes)

    @entry
    def cuMemsetD8(self, address, value, nbytes):
        self.memory.queue_write(address, np.full(nbytes, value, np.uint8))

    @entry
    def cuCtxSynchronize(self):
        self.memory.synchronize()

    @entry
    def cuMemAlloc(self, nbytes):
        size = -(-nbytes // CHUNK) * CHUNK
        handle, address = self.memory.create(size), self.memory.reserve(size)
        self.memory.map(address, size, handle)
        self.plain[address] = size, handle
        return address

    @entry
    def cuMemFree(self, address):
        size, handle = self.plain.pop(address)
        self.memory.unmap(address, size)
        self.memory.unreserve(address, size)
        self.memory.release(handle)


@pytest.fixture
def make(monkeypatch):
    def make(red_zones=False, **options):
        cu = FakeBindings(**options)
        monkeypatch.setattr(module, "bindings", lambda: cu)
        return cu, make_space(3, lambda: None, red_zones)

    return make


def put(cu, address, nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    cu.memory.write(address, data)
    return data


def test_mapped_memory_grows_in_place(make):
    cu, space = make()
    assert isinstance(space, Space)
    address, neighbour = space.allocate(CHUNK + MIB), space.allocate(2 * CHUNK - MIB)
    data = put(cu, address, CHUNK + MIB)
    assert space.physical_bytes == 3 * CHUNK
    assert space.grow(address, CHUNK + MIB, 4 * CHUNK) == address
    assert np.array_equal(cu.memory.read(address, data.size), data)
    assert cu.accessible == set(cu.memory.mappings)
    space.free(address)
    space.free(neighbour)
    assert cu.memory.state() == ({}, {}, [], 0)


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("error", ["OUT_OF_MEMORY", "INVALID_VALUE"])
def test_a_call_that_fails_changes_nothing(make, call, error):
    cu, space = make()
    space.allocate(CHUNK + MIB)
    before = cu.memory.state()
    code = CUresult[f"CUDA_ERROR_{error}"]
    cu.failures = {call: code}
    if error == "INVALID_VALUE":
        with pytest.raises(DeviceError, match=f"{call} failed with CUDA_ERROR_INVALID_VALUE"):
            space.allocate(3 * CHUNK)
    elif call == "cuMemAddressReserve":
        space.free(space.allocate(3 * CHUNK))  # with fewer addresses
    else:
        with pytest.raises(NoRoom):
            space.allocate(3 * CHUNK)
    assert cu.memory.state() == before


def test_a_copy_comes_after_all_work_and_is_finished(make):
    cu, space = make()
    memory = VirtualMemory(3, lambda: None)
    address = space.allocate(2 * CHUNK)
    cu.memory.queue_write(address, np.full(100, 7, np.uint8))
    cu.called.clear()
    memory.copy(address + CHUNK, address, 100)
    assert cu.called == ["cuCtxSynchronize", "cuMemcpyDtoD", "cuCtxSynchronize"]
    assert (cu.memory.read(address + CHUNK, 100) == 7).all()


def test_the_context_is_bound_first(monkeypatch):
    cu = FakeBindings()
    monkeypatch.setattr(module, "bindings", lambda: cu)
    make_space(3, lambda: cu.called.append("bind")).allocate(100)
    assert cu.called[0] == "bind"
    assert all(cu.called[i - 1] == "bind" for i, name in enumerate(cu.called) if name.startswith(("cuMem", "cuCtx")))


def test_without_virtual_memory_growth_moves(make):
    cu, space = make(virtual=0, capacity=10 * CHUNK)
    assert isinstance(space, PlainMemory)
    address = space.allocate(1000)
    data = put(cu, address, 1000)
    assert not space.grows_in_place(address, 1001)
    moved = space.grow(address, 1000, 5000)
    assert moved != address and space.physical_bytes == 5000
    assert np.array_equal(cu.memory.read(moved, 1000), data)
    space.shrink(moved, 5000, 100)
    assert space.grows_in_place(moved, 5000) and space.grow(moved, 100, 5000) == moved
    before = cu.memory.state()
    with pytest.raises(NoRoom):
        space.grow(moved, 5000, 10 * CHUNK)
    assert cu.memory.state() == before and space.physical_bytes == 5000
    space.free(moved)
    assert cu.memory.state() == ({}, {}, [], 0)


@pytest.mark.parametrize("written", [1, 100, RED_ZONE])
@pytest.mark.parametrize("red_zones, beyond", [(True, False), ("before", False), (True, True)])
def test_red_zones_show_what_was_written_beside_an_allocation(make, written, red_zones, beyond):
    cu, space = make(red_zones=red_zones)
    address, other = space.allocate(1000), space.allocate(1000)
    assert space.physical_bytes == 2 * (1000 + RED_ZONE * (1 + (red_zones is True)))
    put(cu, other, 1000)
    space.check()
    cu.memory.write(address + 999 + written if beyond else address - written, np.zeros(1, np.uint8))
    where = "beyond the end of" if beyond else "before"
    message = f"wrote {written} bytes {where} the allocation at {address:#x}"
    space.free(space.grow(other, 1000, 3000))
    with pytest.raises(DeviceError, match=message):
        space.check()
    with pytest.raises(DeviceError, match=message):
        space.grow(address, 1000, 2000)
    with pytest.raises(DeviceError, match=message):
        space.free(address)
    assert cu.memory.state() == ({}, {}, [], 0)


# On a GPU


@pytest.fixture(params=[pytest.param(0, marks=needs_gpu, id="gpu")])
def gpu_space(request):
    return make_space(request.param, Context.of(request.param).bind)


def host_bytes(address, nbytes):
    result = np.empty(nbytes, np.uint8)
    check(bindings().cuMemcpyDtoH(result.ctypes.data, address, nbytes), "cuMemcpyDtoH")
    return result


def write(address, data):
    check(bindings().cuMemcpyHtoD(address, data.ctypes.data, data.nbytes), "cuMemcpyHtoD")


def test_on_a_gpu(gpu_space):
    """Neighbours in shared chunks keep their bytes while they grow, move, shrink and are freed."""
    space = gpu_space
    random = np.random.default_rng(0)
    live = {}

    def fill(address, nbytes):
        live[address] = random.integers(0, 256, nbytes, np.uint8)
        write(address, live[address])

    for _ in range(30):
        fill(address := space.allocate(nbytes := int(random.integers(1, 3 * CHUNK))), nbytes)
    for _ in range(200):
        address = list(live)[int(random.integers(len(live)))]
        old, other = live.pop(address), int(random.integers(1, 5 * CHUNK))
        if other < old.size:
            space.shrink(address, old.size, other)
            live[address] = old[:other]
        else:
            address = space.grow(address, old.size, other)
            assert np.array_equal(host_bytes(address, old.size), old)
            fill(address, other)
    for address, data in live.items():
        assert np.array_equal(host_bytes(address, data.size), data)
        space.free(address)
    assert space.physical_bytes == 0


@pytest.mark.parametrize("shared", [False, True])
def test_growth_by_a_gib_on_a_gpu(gpu_space, shared):
    """Where it is, with a crowded last chunk, too, of which it copies its part; benchmarks/link.py times it."""
    space = gpu_space
    size = 1 << 30
    for _ in range(12):
        first = space.allocate(old := size + MIB if shared else size)
        second = space.allocate(size + MIB) if shared else 0
        assert space.grow(first, old, old + size) == first
        assert space.physical_bytes < old + size + (size + MIB if shared else 0) + 2 * CHUNK
        space.free(first)
        if second:
            space.free(second)
    assert space.physical_bytes == 0
