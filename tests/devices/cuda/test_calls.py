"""A context that is lost half-way: one clear message, from whatever is called; the host's data stay; a clean exit."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import needs_gpu
from fake_cuda import FakeCuda

from blobmem import SyncedMemory
from blobmem.devices.cuda import calls
from blobmem.devices.cuda.device import CudaDevice
from blobmem.errors import DeviceError
from blobmem.memory import Side

ROOT = Path(__file__).parents[3]
LOST = (
    r"^the GPU's context is lost, with all that was on the GPU \(\w+ failed with CUDA_ERROR_ILLEGAL_ADDRESS\): "
    r"the process must be started anew$"
)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    fake.install(monkeypatch)
    yield fake
    gc.collect()  # while it is the driver


def filled(device, value, nbytes=100_000):
    memory = SyncedMemory(nbytes, device)
    memory.mutable_cpu_data()[:] = value
    return memory


def test_bytes_travel_to_the_fake_and_back(cuda):
    device = CudaDevice()
    memory = filled(device, 3)
    memory.mutable_gpu_data()
    np.testing.assert_array_equal(memory.cpu_data(), np.full(100_000, 3, np.uint8))
    before = len(cuda.held)
    del memory
    assert len(cuda.held) == before - 1


def test_all_calls_say_the_same_once_the_context_is_lost(cuda):
    device = CudaDevice()
    stream, event = device.create_stream(), device.compute_stream().record()
    on_host, on_both, on_gpu = (filled(device, value) for value in (1, 2, 3))
    on_host.gpu_data()
    on_host.mutable_cpu_data()[:] = 4
    on_both.access(Side.DEVICE, 0, 100_000, "read", stream)
    on_gpu.access(Side.DEVICE, 0, 100_000, "write", stream)
    cuda.lose()
    said = set()
    for call in (
        device.synchronize, stream.synchronize, stream.record, event.synchronize, lambda: event.done,
        lambda: device.allocate(10), device.memory_info, lambda: device.memset(1, 0, 4), lambda: device.running(),
        on_gpu.cpu_data, on_gpu.mutable_cpu_data, on_gpu.cpu_data, on_host.gpu_data, on_host.mutable_gpu_data,
        lambda: CudaDevice(),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=LOST) as raised:
            call()
        said.add(str(raised.value))
    assert len(said) == 1 and device.lost
    assert (on_host.cpu_data() == 4).all() and (on_both.cpu_data() == 2).all()


def test_what_is_dropped_after_the_loss_says_nothing(cuda, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    device = CudaDevice()
    memories = [filled(device, 1) for _ in range(3)]
    for memory in memories:
        memory.pin()
        memory.access(Side.DEVICE, 0, 100_000, "write", device.create_stream())
    assert memories[0].pinned_bytes
    cuda.lose()
    del memory, memories  # nobody has noticed yet
    gc.collect()
    with pytest.raises(DeviceError, match=LOST):
        device.allocate(10)
    del device
    gc.collect()
    assert not said


def test_other_failures_lose_nothing(cuda):
    device = CudaDevice()
    error = calls.failure(cuda.CUresult.CUDA_ERROR_NOT_READY, "cuX")
    assert str(error) == "CUDA: cuX failed with CUDA_ERROR_NOT_READY" and not device.lost
    device.free(device.allocate(10))


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("pycuda", [False, True], ids=["plain", "with PyCUDA"])
def test_a_wild_kernel_ends_in_one_message_and_a_clean_exit(pycuda):
    command = [sys.executable, str(ROOT / "tests" / "support" / "wild_kernel.py"), *["pycuda"][: int(pycuda)]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all is as it should be"
    # PyCUDA's own destructors may say that they failed
    said = [line for line in done.stderr.splitlines() if not pycuda or "Traceback" in line or "rror in" in line]
    assert not said, done.stderr


def test_a_thread_has_two_streams_and_queues_on_one(cuda):
    device = CudaDevice()
    main, side = device.compute_stream(), device.side_stream()
    device.queue_on(side)
    assert device.compute_stream() is side is device.side_stream() and side.handle != main.handle
    device.queue_on(main)
    assert device.compute_stream() is main
    with pytest.raises(DeviceError, match="not one of its streams"):
        device.queue_on(object())
