"""blobmem: Caffe nets on one memory system whose every byte is accounted for.

`import blobmem as caffe` serves scripts written for pycaffe.
"""

from blobmem import data, layers, proto, solvers
from blobmem.devices import SimulatedDevice, set_default, set_device, set_mode_cpu, set_mode_gpu
from blobmem.errors import BlobmemError, DeviceError, NetError, OutOfDeviceMemory, SharedBlobError
from blobmem.layers import TEST, TRAIN, Layer, layer_types, register_layer, set_random_seed
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob, from_dlpack
from blobmem.net import Net, build_nets
from blobmem.proto import caffe_pb2
from blobmem.pycaffe import (
    Timer,
    has_nccl,
    init_log,
    layer_type_list,
    log,
    set_multiprocess,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
from blobmem.solvers import SGDSolver, get_solver
from blobmem.version import __version__

__all__ = [
    "TEST",
    "TRAIN",
    "Blob",
    "BlobmemError",
    "DeviceError",
    "Layer",
    "Net",
    "NetError",
    "OutOfDeviceMemory",
    "SGDSolver",
    "SharedBlobError",
    "SimulatedDevice",
    "SyncedMemory",
    "Timer",
    "__version__",
    "build_nets",
    "caffe_pb2",
    "data",
    "from_dlpack",
    "get_solver",
    "has_nccl",
    "init_log",
    "layer_type_list",
    "layer_types",
    "layers",
    "log",
    "proto",
    "register_layer",
    "set_default",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "solvers",
]
