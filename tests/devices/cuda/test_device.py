"""The CUDA device on a real GPU: memory, streams, copies, errors, doors to other libraries."""

import threading

import cuda_devices
import numpy as np
import pytest

from blobmem import SyncedMemory, devices
from blobmem.devices.cuda import context
from blobmem.errors import DeviceError, NetError, OutOfDeviceMemory
from blobmem.memory import Side
from blobmem.memory.blob import Blob, from_dlpack

pytestmark = [*cuda_devices.needs_gpu]

MIB = 1 << 20


@pytest.fixture
def device():
    return cuda_devices.make_gpu()


def test_a_word_is_one_device():
    assert devices.get("cuda") is devices.get("cuda:0")
    free, total = devices.memory_info(0)
    assert 0 < free <= total
    with pytest.raises(DeviceError, match="counted from 0"):
        devices.get("cuda:99")


def test_describes_itself(device):
    facts = device.describe()
    assert facts["memory_bytes"] > 1 << 30 and facts["model"] and facts["multiprocessors"] > 0


def test_bytes_travel(device):
    rng = np.random.default_rng(0)
    memory = SyncedMemory(10 * MIB, device)
    values = rng.integers(0, 256, 10 * MIB, np.uint8)
    memory.mutable_cpu_data()[:] = values
    address = memory.gpu_data()
    other = device.allocate(10 * MIB)
    device.memcpy_dtod(other, address, 10 * MIB)
    back = np.empty(10 * MIB, np.uint8)
    device.memcpy_dtoh(back, other)
    np.testing.assert_array_equal(back, values)
    device.memset(other, 7, MIB)
    device.memcpy_dtoh(back, other)
    assert (back[:MIB] == 7).all() and (back[MIB:] == values[MIB:]).all()
    device.free(other)


def test_grows_in_place():
    device = cuda_devices.make_gpu(red_zones=False)
    address = device.allocate(3 * MIB, "a")
    pattern = np.arange(3 * MIB // 4, dtype=np.int32)
    device.memcpy_htod(address, pattern)
    device.allocate(MIB, "b")
    before = device.statistics.snapshot()
    assert device.grow(address, 3 * MIB, 1024 * MIB) == address
    change = device.statistics - before
    assert change.grows == 1 and change.moves == change.dtod_copies == 0
    back = np.empty_like(pattern)
    device.memcpy_dtoh(back, address)
    np.testing.assert_array_equal(back, pattern)
    device.memset(address + 1023 * MIB, 1, MIB)
    device.shrink(address, 1024 * MIB, 2 * MIB)
    device.memcpy_dtoh(back[: 2 * MIB // 4], address)
    np.testing.assert_array_equal(back[: 2 * MIB // 4], pattern[: 2 * MIB // 4])


def test_a_limit_and_a_reserve(device):
    limited = cuda_devices.make_gpu(limit=8 * MIB)
    address = limited.allocate(6 * MIB, "most")
    with pytest.raises(OutOfDeviceMemory, match="most 6.0 MiB.*other processes"):
        limited.allocate(3 * MIB, "more")
    with pytest.raises(OutOfDeviceMemory):
        limited.grow(address, 6 * MIB, 9 * MIB)
    assert limited.memory_info() == (2 * MIB, 8 * MIB)
    limited.free(address)
    assert limited.statistics.bytes_held == 0
    kept = cuda_devices.make_gpu(reserve=devices.memory_info(0)[0])
    with pytest.raises(OutOfDeviceMemory, match="reserved"):
        kept.allocate(64 * MIB)


@pytest.mark.xdist_group("memory")  # others may find the card full meanwhile
def test_more_than_the_card_has_changes_nothing(device):
    address = device.allocate(MIB)
    free, total = devices.memory_info(0)
    with pytest.raises(OutOfDeviceMemory, match="MiB free"):
        device.allocate(2 * total, "too much")
    with pytest.raises(OutOfDeviceMemory):
        device.grow(address, MIB, 2 * total)
    if cuda_devices.alone_on_gpu():
        assert devices.memory_info(0)[0] == free
    device.free(address)


def test_all_memory_comes_back(device):
    def work():
        for n in range(50):
            addresses = [device.allocate(size) for size in (1000, MIB, 3 * MIB, 40 * MIB)]
            addresses[3] = device.grow(addresses[3], 40 * MIB, (41 + n) * MIB)
            for address in addresses:
                device.free(address)

    work()
    free = devices.memory_info(0)[0]
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.statistics.bytes_held == device.physical_bytes == 0
    if cuda_devices.alone_on_gpu():
        assert devices.memory_info(0)[0] == free


def test_streams_order_work(device):
    first, second = device.create_stream(), device.create_copy_stream()
    memory = SyncedMemory(64 * MIB, device)
    memory.mutable_cpu_data()[:] = 1
    memory.access(Side.DEVICE, 0, 64 * MIB, "read", first)
    for _ in range(10):
        address = memory.access(Side.DEVICE, 0, 64 * MIB, "write", second)
        device.memset(address, 2, 64 * MIB, second)
        address = memory.access(Side.DEVICE, 0, 64 * MIB, "write", first)
        device.memset(address, 3, 64 * MIB, first)
        assert (memory.cpu_data() == 3).all()
    event = first.record()
    event.synchronize()
    assert event.done


def test_a_thread_queues_on_one_of_its_two_streams(device):
    main, side, elsewhere = device.compute_stream(), device.side_stream(), []
    thread = threading.Thread(target=lambda: elsewhere.extend([device.compute_stream(), device.side_stream()]))
    device.queue_on(side)
    thread.start()
    thread.join()
    assert device.compute_stream() is side is device.side_stream()
    assert len({each.handle for each in (main, side, *elsewhere)}) == 4
    memory = SyncedMemory(64 * MIB, device)
    address = memory.access(Side.DEVICE, 0, 64 * MIB, "overwrite", main)
    device.set_bytes(address, 2, 64 * MIB)
    main.wait(side.record())
    device.queue_on(main)
    assert (memory.cpu_data() == 2).all()
    with pytest.raises(DeviceError, match="not one of its streams"):
        device.queue_on(object())


def test_pins_what_travels_again(device):
    memory = SyncedMemory(4 * MIB, device)
    memory.mutable_cpu_data()[:] = 5
    memory.gpu_data()
    assert memory.pinned_bytes == 0  # a single look does not pin
    memory.mutable_gpu_data()
    assert (memory.cpu_data() == 5).all()
    assert memory.pinned_bytes == 4 * MIB
    memory.set_size(9 * MIB)
    memory.mutable_cpu_data()[-1] = 6
    address = memory.gpu_data()
    assert memory.pinned_bytes >= 9 * MIB
    byte = np.empty(1, np.uint8)
    device.memcpy_dtoh(byte, address + 9 * MIB - 1)
    assert byte[0] == 6
    array = memory.cpu_data()
    del memory
    assert array[0] == 5 and array[-1] == 6


def test_bad_values_are_raised_when_waited_for(device):
    from blobmem.ops.cuda.loss import softmax_loss_forward

    x = device.as_array(device.allocate(4 * 30), (3, 10, 1), np.float32)
    x.zero()
    label = device.as_array(device.allocate(512), (3, 1), np.float32)
    device.memcpy_htod(label.address, np.array([1, 12, 3], np.float32))
    sums = device.as_array(device.allocate(512), (3, 2, 1), np.float32)
    loss = device.as_array(device.allocate(512), (), np.float32)
    ws = device.as_array(device.allocate(MIB), (MIB,), np.uint8)
    softmax_loss_forward(x, label, sums, loss, ignore_label=None, normalization="VALID", layer="loss", ws=ws)
    with pytest.raises(NetError, match="'loss'.*12"):
        device.synchronize()
    device.synchronize()


@pytest.mark.parametrize("at, where", [(60, "1 bytes beyond the end of"), (-3, "3 bytes before")])
def test_red_zones_name_the_memory_that_was_overrun(at, where):
    device = cuda_devices.make_gpu(red_zones=True)
    address, other = device.allocate(60, "conv1 data"), device.allocate(7, "another")
    device.synchronize()
    device.memset(address + at, 0, 1)
    message = f"wrote {where} the allocation at .*'conv1 data'"
    with pytest.raises(DeviceError, match=message):
        device.synchronize()
    with pytest.raises(DeviceError, match=message):
        device.free(address)
    assert device.holders() == [("another", 7)]
    device.synchronize()
    device.free(other)


def test_too_old_a_card_is_refused(monkeypatch):
    monkeypatch.setattr(context, "LEAST_CAPABILITY", (99, 0))
    monkeypatch.setattr(context, "_contexts", {})
    with pytest.raises(DeviceError, match="compute capability"):
        cuda_devices.make_gpu()


class TestDoors:
    def blob(self, device, shape=(3, 5)):
        blob = Blob(shape, device=device)
        blob.data[...] = np.arange(blob.count).reshape(shape)
        return blob

    def test_pycuda(self, device):
        blob = self.blob(device)
        array = blob.gpu_array()
        np.testing.assert_array_equal(array.get(), np.arange(15).reshape(3, 5))
        array.fill(np.float32(4))
        assert (blob.data == 4).all()

    def test_torch_reads_and_writes_in_place(self, device):
        torch = pytest.importorskip("torch")
        blob = self.blob(device)
        tensor = torch.from_dlpack(blob)
        assert tensor.device.type == "cuda" and tuple(tensor.shape) == (3, 5)
        np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(15).reshape(3, 5))
        tensor += 1
        np.testing.assert_array_equal(blob.cpu_data(), 1 + np.arange(15).reshape(3, 5))
        again = torch.as_tensor(blob, device="cuda")
        again *= 2
        np.testing.assert_array_equal(blob.cpu_data(), 2 + 2 * np.arange(15).reshape(3, 5))

    def test_cupy_reads_and_writes_in_place(self, device):
        cupy = pytest.importorskip("cupy")
        blob = self.blob(device)
        array = cupy.asarray(blob)
        array += 1
        cupy.cuda.runtime.deviceSynchronize()
        np.testing.assert_array_equal(blob.cpu_data(), 1 + np.arange(15).reshape(3, 5))
        assert float(cupy.from_dlpack(blob).sum()) == 120

    def test_a_tensor_becomes_a_blob(self, device):
        torch = pytest.importorskip("torch")
        tensor = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
        blob = from_dlpack(tensor, device)
        np.testing.assert_array_equal(blob.cpu_data(), np.arange(12).reshape(3, 4))
        blob.data[...] = 7
        blob.gpu_data()
        assert (tensor == 7).all()
        with pytest.warns(UserWarning, match="outgrew"):
            blob.reshape(30, 40)
            blob.mutable_gpu_data()
        with pytest.raises(DeviceError, match="contiguous"):
            from_dlpack(tensor.T, device)

    def test_an_array_outlives_growth_and_its_blob(self, device):
        torch = pytest.importorskip("torch")
        blob = self.blob(device)
        tensor = torch.from_dlpack(blob)
        for size in (1000, 10**5, 10**6):
            blob.reshape(size)
            blob.mutable_gpu_data()
        other = [self.blob(device, (7,)) for _ in range(20)]
        for each in other:
            each.mutable_gpu_data()
        np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(15).reshape(3, 5))
        del blob, other
        assert float(tensor.sum()) == 105

    def test_reading_syncs_once(self, device):
        blob = self.blob(device)
        blob.mutable_gpu_data()
        before = device.statistics.dtoh_copies
        blob.data  # noqa: B018
        blob.data  # noqa: B018
        assert device.statistics.dtoh_copies == before + 1
