import numpy as np
import pytest
from cuda_devices import has_gpu

from blobmem import devices
from blobmem.devices import HOST, HostDevice, SimulatedDevice
from blobmem.errors import BlobmemError, DeviceError


def test_memory_info_is_the_machines():
    free, total = HOST.memory_info()
    assert 0 < free <= total
    assert total > 64 << 20


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.allocate(10),
        lambda d: d.grow(1, 2, 3),
        lambda d: d.shrink(1, 3, 2),
        lambda d: d.free(1),
        lambda d: d.grows_in_place(1, 2),
        lambda d: d.relabel(1, "x"),
        lambda d: d.memcpy_htod(1, np.zeros(1)),
        lambda d: d.memcpy_dtoh(np.zeros(1), 1),
        lambda d: d.memcpy_dtod(1, 2, 3),
        lambda d: d.memset(1, 0, 1),
        lambda d: d.create_stream(),
        lambda d: d.as_array(1, (1,), np.uint8),
    ],
)
def test_no_device_side_and_the_error_says_what_to_do(call):
    with pytest.raises(DeviceError, match="choose a device"):
        call(HostDevice())


def test_host_is_idle_and_holds_nothing():
    HOST.synchronize()
    assert HOST.holders() == [] and HOST.is_host and HOST.statistics.allocator_calls == 0
    done = []
    HOST.when_idle(lambda: done.append(1))
    assert done == [1]


def test_get_by_word():
    assert devices.get("cpu") is HOST
    assert devices.get(HOST) is HOST
    assert devices.get("simulated").memory_info() == (1 << 46, 1 << 46)
    assert devices.get("simulated:8GiB").capacity == 8 << 30
    assert devices.get("simulated:123456").capacity == 123456
    assert isinstance(devices.get("simulated"), SimulatedDevice)


@pytest.mark.parametrize("word", ["cuda:x", "gpu", "cpu:1", "tpu", "", "simulated:", "simulated:lots", "simulated:0"])
def test_get_refuses_and_says_what_there_is(word):
    with pytest.raises(DeviceError, match="8GiB"):
        devices.get(word)


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_cuda_says_what_is_missing():
    with pytest.raises(DeviceError, match=r"(pip install|no CUDA driver|no GPU)"):
        devices.get("cuda")


def test_options_of_a_gpu_are_for_a_gpu():
    with pytest.raises(DeviceError, match="reserve"):
        devices.get("simulated", reserve=1)
    with pytest.raises(DeviceError, match="cannot be limited"):
        devices.get("cpu", 1 << 20)
    assert devices.get("simulated", 1 << 20).capacity == 1 << 20
    assert devices.get("simulated:1KiB", 1 << 20).capacity == 1 << 10


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("123456", 123456), ("7B", 7), ("7 b", 7), ("2KB", 2000), ("2KiB", 2048), ("3MB", 3 * 10**6),
        ("3 mib", 3 << 20), ("1.5GB", 1_500_000_000), ("1.5GiB", 3 << 29), ("8GiB", 8 << 30), ("2TiB", 2 << 40),
        ("0.1GiB", 107374182), (512, 512),
    ],
)  # fmt: skip
def test_parse_bytes(text, nbytes):
    assert devices.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8G", "8 gigs", "1e9", "1.5", "1,5GB", "1.5B", "nan"])
def test_parse_bytes_refuses_for_people(text):
    with pytest.raises(ValueError, match="write for instance"):
        devices.parse_bytes(text)


def test_default_device():
    assert devices.default() is HOST
    try:
        devices.set_default("simulated:1MiB")
        assert devices.default().capacity == 1 << 20
    finally:
        devices.set_default(HOST)
    with pytest.raises(DeviceError):
        devices.set_default("nowhere")
    assert devices.default() is HOST


def test_errors_are_also_the_usual_ones():
    from blobmem import errors

    for ours, usual in ((errors.OutOfDeviceMemory, MemoryError), (errors.NetError, ValueError)):
        assert issubclass(ours, BlobmemError) and issubclass(ours, usual)
    assert issubclass(errors.SharedBlobError, RuntimeError)
