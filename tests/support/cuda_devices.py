"""The devices that tests run on: the emulated CUDA device anywhere, a real one where there is a GPU (marked gpu)."""

import functools
import os

import pytest
from cuda_emulation import AVAILABLE, EmulatedCuda

from blobmem import SimulatedDevice
from blobmem.devices import HOST
from blobmem.dtypes import is_half
from blobmem.errors import DeviceError
from blobmem.memory.workspace import workspace

needs_compiler = pytest.mark.skipif(not AVAILABLE, reason="needs g++ on x86-64")


@functools.cache
def has_gpu():
    """Whether a CUDA device can be made here."""
    from blobmem.devices.cuda import context

    try:
        return context.count() > 0
    except DeviceError:
        return False


def red_zones():
    """What BLOBMEM_RED_ZONES says: "before" for compute-sanitizer, which wants none after an allocation."""
    word = os.environ.get("BLOBMEM_RED_ZONES", "0")
    return word if word == "before" else word != "0"


_made = []


def alone_on_gpu():
    """Whether no other test process is at work, so that the driver's free memory is ours to tell."""
    return os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"


def make_gpu(**options):
    """A CUDA device of its own, without any memory held.

    What this thread's workspaces on earlier ones hold is given back: they live as long as the thread.
    """
    from blobmem.devices.cuda.device import CudaDevice

    for device in _made:
        workspace(device).trim()

    options.setdefault("red_zones", red_zones())
    _made.append(CudaDevice(0, **options))
    return _made[-1]


class WithTensorCores(EmulatedCuda):
    """Runs the kernels for these, by other means."""

    def on_tensor_cores(self, dtype):
        return True

    def in_warpgroups(self, dtype):
        return is_half(dtype)


needs_gpu = (pytest.mark.gpu, pytest.mark.skipif("not __import__('cuda_devices').has_gpu()", reason="needs a GPU"))

GPU = pytest.param(make_gpu, id="cuda", marks=needs_gpu)
TF32_GPU = pytest.param(functools.partial(make_gpu, math="tf32"), id="cuda-tf32", marks=needs_gpu)
ON_TENSOR_CORES = pytest.param(WithTensorCores, id="emulated", marks=needs_compiler), TF32_GPU
EXACT_GPU = pytest.param(functools.partial(make_gpu, deterministic=True), id="cuda", marks=needs_gpu)
EMULATED = pytest.param(EmulatedCuda, id="emulated", marks=needs_compiler)

# for tests of what is above the devices; they compare one run with another bit for bit
DEVICES = [pytest.param(lambda: HOST, id="host"), pytest.param(SimulatedDevice, id="simulated"), EMULATED, EXACT_GPU]
