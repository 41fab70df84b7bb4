"""A script that lets a kernel write where nothing is, and looks at what is left: `python wild_kernel.py [pycuda]`.

It needs a GPU, and a process of its own.
"""

import sys
from collections.abc import Callable

import numpy as np

import blobmem
from blobmem import SyncedMemory, devices
from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.device import CudaDevice
from blobmem.errors import DeviceError
from blobmem.memory import Side
from blobmem.ops.registry import table
from blobmem.proto import caffe_pb2
from blobmem.proto.text import parse_text

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 dim: 32 dim: 32 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "c" top: "y"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
NBYTES = 4 << 20


def said_by(call: Callable[[], object]) -> str:
    """The message of the DeviceError that `call` raises."""
    try:
        call()
    except DeviceError as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")


def net_on(device: CudaDevice) -> blobmem.Net:
    net = blobmem.Net(parse_text(NET, caffe_pb2.NetParameter), blobmem.TEST, device=device, seed=1)
    net.blobs["x"].data[...] = 1
    net.forward()
    return net


def main(with_pycuda: bool) -> None:
    device = CudaDevice()
    net = net_on(device)  # cuDNN, cuBLAS, kernels, pinned pages
    outputs = net.blobs["y"].data.copy()
    lent = net.blobs["c"].gpu_array() if with_pycuda else None
    on_host, on_both, on_gpu = (SyncedMemory(NBYTES, device) for _ in range(3))
    for value, memory in enumerate((on_host, on_both, on_gpu), start=1):
        for _ in range(3):  # which locks its pages
            memory.mutable_cpu_data()[:] = value
            memory.access(Side.DEVICE, 0, NBYTES, "read", device.create_stream())
    on_host.mutable_cpu_data()[:] = 4
    on_gpu.mutable_gpu_data()
    assert on_gpu.pinned_bytes == NBYTES

    wild = CudaArray(0x1000, (1024,), np.float32, device)
    table("cuda")["relu_forward"](wild, wild, slope=0.0)
    first = said_by(device.synchronize)
    print(first)
    assert "context is lost" in first and "CUDA_ERROR_ILLEGAL_ADDRESS" in first and "process must be" in first, first
    calls: dict[str, Callable[[], object]] = {
        "read from the GPU": on_gpu.cpu_data,
        "again": on_gpu.cpu_data,
        "sent to the GPU": on_host.gpu_data,
        "allocate": lambda: device.allocate(1000),
        "a net's pass": net.forward,
        "a new device": CudaDevice,
        "another net": lambda: net_on(device),
        "memory": lambda: devices.memory_info(0),
    }
    wrong = {name: said for name, call in calls.items() if (said := said_by(call)) != first}
    assert not wrong, wrong
    assert (on_host.cpu_data() == 4).all() and (on_both.cpu_data() == 2).all()
    np.testing.assert_array_equal(net.blobs["y"].data, outputs)  # it was read before, and both sides have it
    del on_gpu, lent
    print("all is as it should be")


if __name__ == "__main__":
    main("pycuda" in sys.argv)
