"""What the driver is asked for: nothing that takes time or room once a net has run twice."""

import pytest
from cuda_devices import make_gpu, needs_gpu
from driver_trace import driver_calls, growing

MIB = 1 << 20


def test_what_counts_as_growing():
    calls = dict.fromkeys(
        (
            "cuMemAlloc_v2", "cuMemAllocAsync_ptsz", "cuMemCreate", "cuMemMap", "cuMemHostRegister_v2",
            "cuMemHostAlloc_v2", "cuModuleLoadDataEx", "cuLibraryLoadData", "cuMemFreeAsync", "cuMemAddressReserve",
            "cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyDtoHAsync_v2", "cuMemsetD8Async", "cuMemGetInfo_v2",
            "cuModuleGetFunction", "cuEventRecord", "cuStreamSynchronize", "cuCtxSetCurrent",
        ), 1,
    )  # fmt: skip
    assert list(growing(calls)) == list(calls)[:10]


@pytest.mark.gpu
@needs_gpu[1]
def test_the_trace_sees_calls():
    device = make_gpu(red_zones=False)
    device.free(device.allocate(4 * MIB))
    with driver_calls() as calls:
        address = device.allocate(4 * MIB)
        device.memset(address, 0, MIB)
    assert calls["cuMemCreate"] == calls["cuMemMap"] == 1 and any("Memset" in name for name in calls)
    assert set(growing(calls)) >= {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"}
    device.free(address)
    assert calls["cuMemRelease"] == 0  # the block is over
