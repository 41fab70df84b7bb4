"""Where a CUDA device's memory comes from: on a driver of our own anywhere, and on a GPU where there is one."""

import functools
import gc
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cuda_devices import make_gpu, needs_compiler, needs_gpu
from cuda_emulation import EmulatedCuda
from fake_cuda import FakeCuda

from blobmem import SyncedMemory, devices, get_solver
from blobmem.devices.cuda import allocators
from blobmem.devices.cuda.allocators import ALLOCATORS, SPARE
from blobmem.devices.cuda.device import CudaDevice
from blobmem.errors import DeviceError, OutOfDeviceMemory
from blobmem.memory import Side, stress, stress_cuda
from blobmem.memory.stress_cuda import StressedCuda
from blobmem.net.steps import Step
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

MIB = 1 << 20
MOVING = ALLOCATORS[1:]


class Resource:
    """An RMM resource over the fake's plain memory."""

    def __init__(self, cuda):
        self.cuda, self.given = cuda, {}

    def allocate(self, nbytes, stream):
        code, address = self.cuda.cuMemAlloc(nbytes)
        if code:
            raise MemoryError("std::bad_alloc")
        self.given[address] = nbytes
        self.cuda.unready[address] = stream.native
        return address

    def deallocate(self, address, nbytes, stream):
        assert self.given.pop(address) == nbytes and stream.native not in self.cuda.unready.values()
        self.cuda.cuMemFree(address)


@pytest.fixture
def cuda(monkeypatch):
    """The driver, and an RMM whose resource is `cuda.resource`."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    fake.resource = Resource(fake)
    modules = {name: ModuleType(name) for name in ("rmm", "rmm.mr", "rmm.pylibrmm", "rmm.pylibrmm.stream")}
    modules["rmm.mr"].get_current_device_resource = lambda: fake.resource
    # as RMM's, which asks for the handle by the protocol
    modules["rmm.pylibrmm.stream"].Stream = lambda stream: SimpleNamespace(native=stream.__cuda_stream__()[1])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    gc.collect()  # while it is the driver


def fill(device, address, nbytes):
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    device.memcpy_htod(address, values)
    return values


def bytes_at(device, address, nbytes):
    values = np.empty(nbytes, np.uint8)
    device.memcpy_dtoh(values, address)
    return values


@pytest.mark.parametrize("name", MOVING)
def test_growth_moves_and_all_comes_back(cuda, name):
    device = CudaDevice(allocator=name)
    before = dict(cuda.kinds)
    address = device.allocate(1000, "a")
    kind = {"direct": "plain", "rmm": "plain"}.get(name, name)
    assert cuda.kinds[address] == kind and bool(cuda.resource.given) == (name == "rmm")
    values = fill(device, address, 1000)
    assert not device.grows_in_place(address, 1001)
    moved = device.grow(address, 1000, 5000)
    assert moved != address and (bytes_at(device, moved, 1000) == values).all()
    count = device.statistics
    assert (count.allocations, count.grows, count.moves, count.dtod_bytes) == (1, 1, 1, 1000)
    assert count.bytes_held == device.physical_bytes == 5000 and count.peak_bytes == 6000
    device.shrink(moved, 5000, 100)
    assert device.grows_in_place(moved, 5000) and device.grow(moved, 100, 5000) == moved
    device.free(moved)
    assert count.bytes_held == device.physical_bytes == 0
    assert cuda.kinds == before and not cuda.resource.given and not cuda.unready


@pytest.mark.parametrize("name", MOVING)
def test_a_limit_counts_both_while_it_moves_and_what_was_cut_off(cuda, name):
    device = CudaDevice(limit=6000, allocator=name)
    address = device.allocate(2000, "a")
    values = fill(device, address, 2000)
    with pytest.raises(OutOfDeviceMemory, match=f"4001 bytes asked for 'a' to grow.*allocator {name}") as raised:
        device.grow(address, 2000, 4001)
    assert raised.value.requested == 4001 and raised.value.free == 4000
    assert (bytes_at(device, address, 2000) == values).all() and device.holders() == [("a", 2000)]
    address = device.grow(address, 2000, 4000)
    assert device.statistics.peak_bytes == 6000
    device.shrink(address, 4000, 1000)
    assert device.memory_info() == (2000, 6000)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(2001)
    device.free(address)
    device.free(device.allocate(6000))


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_driver_is_not_asked_for_more_than_the_card_has(cuda, name, monkeypatch):
    device = CudaDevice(allocator=name)
    address, cuda.capacity = device.allocate(MIB, "a"), 100 * MIB
    monkeypatch.setattr(cuda, "_new", None)
    for take in (lambda: device.allocate(101 * MIB), lambda: device.grow(address, MIB, 102 * MIB)):
        with pytest.raises(OutOfDeviceMemory):
            take()
    assert device.statistics.bytes_held == MIB


@pytest.mark.parametrize("name", MOVING)
def test_a_full_card_changes_nothing(cuda, name):
    device = CudaDevice(allocator=name)
    address = device.allocate(MIB, "a")
    values, held = fill(device, address, MIB), dict(cuda.kinds)
    cuda.capacity = sum(array.nbytes for array in cuda.held.values()) + 3 * MIB
    with pytest.raises(OutOfDeviceMemory, match="asked for 'b'.*largest holders: a 1.0 MiB"):
        device.allocate(4 * MIB, "b")
    with pytest.raises(OutOfDeviceMemory, match="asked for 'a' to grow"):
        device.grow(address, MIB, 4 * MIB)
    assert cuda.kinds == held and device.statistics.bytes_held == MIB and not cuda.unready
    assert (bytes_at(device, address, MIB) == values).all()


@pytest.mark.parametrize("name", MOVING)
def test_a_memory_that_moves_says_so(cuda, name):
    """By its version, which whoever keeps its address looks at; an address that was handed out stays good."""
    memory = SyncedMemory(1000, CudaDevice(allocator=name))
    memory.mutable_cpu_data()[:] = 7
    first, version, epoch = memory.gpu_data(), memory.version, memory.epoch
    memory.set_size(3000)
    assert memory.mutable_gpu_data() != first
    assert memory.version == version + 1 and memory.epoch > epoch
    np.testing.assert_array_equal(memory.cpu_data(), [7] * 1000 + [0] * 2000)
    hold, kept = memory.hold_device(), memory.gpu_data()
    memory.reserve(Side.DEVICE, 9000)
    assert kept in cuda.held and memory.gpu_data() != kept
    del hold
    gc.collect()
    assert kept not in cuda.held


@pytest.mark.parametrize("name", MOVING)
def test_a_walk_of_the_memory_machine(cuda, monkeypatch, name):
    monkeypatch.setattr(stress_cuda, "BALLAST", 1)
    monkeypatch.setattr(stress_cuda, "check", lambda result, what: result[1])
    monkeypatch.setattr(stress_cuda, "bindings", lambda: cuda)
    stress.run(400, 1, make_device=functools.partial(StressedCuda, allocator=name))


def test_rmm_gets_back_what_it_gave_from_the_resource_that_gave_it(cuda):
    device, first = CudaDevice(allocator="rmm"), cuda.resource
    address = device.allocate(100)
    cuda.resource = Resource(cuda)
    other = device.allocate(200)
    assert list(first.given) == [address] and list(cuda.resource.given) == [other]
    device.free(address)
    device.free(other)
    assert not first.given and not cuda.resource.given


def test_managed_memory_comes_to_the_gpu_at_once_and_leaves_some_free(cuda):
    device = CudaDevice(allocator="managed")
    held = sum(array.nbytes for array in cuda.held.values())
    cuda.capacity = held + SPARE + 6 * MIB
    address = device.allocate(3 * MIB)
    assert [place[:2] for place in cuda.prefetched] == [(address, 3 * MIB)]
    with pytest.raises(OutOfDeviceMemory):  # though the driver would have it
        device.allocate(5 * MIB)
    array = device.as_array(address + 512, (100,), np.float32)
    lent = device.as_array(cuda._cuMemAlloc(4096), (1024,), np.float32)
    device.prefetch([array, None, lent])
    assert cuda.prefetched[1:] == [(address + 512, 400, device.compute_stream().native)]
    assert device.prefetches and not device.graphs
    assert not CudaDevice().prefetches


def test_what_cannot_be(cuda, monkeypatch):
    for options, message in (
        ({"allocator": "heap"}, "'heap' is not one of pool, direct, async, rmm, managed"),
        ({"allocator": "direct", "red_zones": True}, "no red zones"),
        ({"allocator": "managed", "graphs": True}, "leave graphs out"),
    ):
        with pytest.raises(DeviceError, match=message):
            CudaDevice(**options)
    with pytest.raises(DeviceError, match="'cpu' has no allocator"):
        devices.get("cpu", allocator="async")
    assert devices.get("cuda", allocator="async").allocator == "async"
    monkeypatch.setattr(allocators.Context, "attribute", lambda self, name: 0)
    for name in ("async", "managed"):
        with pytest.raises(DeviceError, match=f"another allocator than {name}"):
            CudaDevice(allocator=name)
    monkeypatch.setitem(sys.modules, "rmm.mr", None)
    with pytest.raises(DeviceError, match=r"'rmm' needs RMM .*blobmem\[rmm\]"):
        CudaDevice(allocator="rmm")


def lenet(side, first, second, units):
    """LeNet's layers, on images of that side, with so many outputs."""
    filler = 'weight_filler { type: "xavier" }'
    return f"""
name: "lenet"
layer {{ name: "data" type: "Input" top: "data" top: "label"
  input_param {{ shape {{ dim: 8 dim: 1 dim: {side} dim: {side} }} shape {{ dim: 8 }} }} }}
layer {{ name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param {{ num_output: {first} kernel_size: 5 {filler} }} }}
layer {{ name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" pooling_param {{ kernel_size: 2 stride: 2 }} }}
layer {{ name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
  convolution_param {{ num_output: {second} kernel_size: 3 {filler} }} }}
layer {{ name: "pool2" type: "Pooling" bottom: "conv2" top: "pool2" pooling_param {{ kernel_size: 2 stride: 2 }} }}
layer {{ name: "ip1" type: "InnerProduct" bottom: "pool2" top: "ip1"
  inner_product_param {{ num_output: {units} {filler} }} }}
layer {{ name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }}
layer {{ name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param {{ num_output: 10 {filler} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }}
"""


LENET, SMALL = lenet(28, 20, 50, 500), lenet(10, 2, 2, 4)


def trained(device, memory, model, batches):
    """Losses and parameters after steps at these batch sizes: what is captured, or repeated, has to follow."""
    param = caffe_pb2.SolverParameter(base_lr=0.01, lr_policy="fixed", momentum=0.9, random_seed=3)
    param.net_param.CopyFrom(read_net(model))
    solver = get_solver(param, device=device, memory=memory)
    net, trace = solver.net, []
    shape = net.blobs["data"].shape[1:]
    for batch in batches:
        net.blobs["data"].reshape(batch, *shape)
        net.blobs["label"].reshape(batch)
        net.reshape()
        rng = np.random.default_rng(batch)
        net.blobs["data"].data[...] = rng.random((batch, *shape))
        net.blobs["label"].data[...] = rng.integers(0, 10, batch)
        for _ in range(6):
            solver.step(1)
            trace.append(float(net.blobs["loss"].data))
    return [*trace, *(entry.blob.cpu_data().tobytes() for entry in net.learnable)]


class Moving(EmulatedCuda):
    """Whose growth always moves."""

    def reservation(self, nbytes):
        return nbytes


@needs_compiler
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_what_is_captured_follows_memory_that_moves(memory):
    moving, staying = Moving(), EmulatedCuda()
    assert trained(moving, memory, SMALL, (2, 1, 4)) == trained(staying, memory, SMALL, (2, 1, 4))
    assert moving.statistics.moves > 0 == staying.statistics.moves and len(moving.captured) > 2


class Prefetching(EmulatedCuda):
    """Notes what is brought to it."""

    prefetches, graphs = True, False

    def __init__(self):
        super().__init__()
        self.brought, self.last = 0, set()

    def prefetch(self, arrays):
        self.last = {(array.address, array.nbytes) for array in arrays if array is not None}
        self.brought += 1


@needs_compiler
def test_arrays_are_prefetched_before_each_op(monkeypatch):
    device, ran = Prefetching(), []

    def launch(step, real=Step.launch):
        fn = step.fn

        def op(*arguments, **attributes):
            used = [*arguments, attributes.get("ws")]
            assert {(array.address, array.nbytes) for array in used if array is not None} == device.last
            ran.append(step)
            fn(*arguments, **attributes)

        if step.side is Side.DEVICE and step.device is device:
            step.fn = op
        real(step)
        step.fn = fn

    monkeypatch.setattr(Step, "launch", launch)
    assert trained(device, "train", SMALL, (2,)) == trained(EmulatedCuda(), "train", SMALL, (2,))
    assert len(ran) == device.brought > 0


# On a GPU


def gpu(name, **options):
    if name == "rmm":
        pytest.importorskip("rmm")
    return make_gpu(allocator=name, red_zones=False, **options)


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_walk_on_a_gpu(name):
    if name == "rmm":
        pytest.importorskip("rmm")
    stress.run(3000, 5, make_device=functools.partial(StressedCuda, allocator=name))


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("name", MOVING)
def test_more_than_the_card_has_changes_nothing_on_a_gpu(name):
    device = gpu(name)
    address = device.allocate(3 * MIB)
    values = fill(device, address, 3 * MIB)
    total = devices.memory_info(0)[1]
    with pytest.raises(OutOfDeviceMemory, match="MiB free"):
        device.allocate(2 * total, "too much")
    with pytest.raises(OutOfDeviceMemory):
        device.grow(address, 3 * MIB, 2 * total)
    assert (bytes_at(device, address, 3 * MIB) == values).all()
    device.free(address)
    assert device.statistics.bytes_held == device.physical_bytes == 0


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("memory", ["keep", "train"])
@pytest.mark.parametrize("name", MOVING)
def test_a_step_has_the_same_bits_on_a_gpu(name, memory):
    device = gpu(name, deterministic=True)
    pool = trained(gpu("pool", deterministic=True), memory, LENET, (8, 4, 64))
    assert trained(device, memory, LENET, (8, 4, 64)) == pool
    assert device.statistics.moves > 0
    gc.collect()
