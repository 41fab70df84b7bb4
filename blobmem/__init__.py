"""blobmem: Caffe nets on one memory system whose every byte is accounted for.

`import blobmem as caffe` serves scripts written for pycaffe.
"""

from blobmem import data, layers, solvers
from blobmem.devices import SimulatedDevice, set_default
from blobmem.errors import BlobmemError, DeviceError, NetError, OutOfDeviceMemory, SharedBlobError
from blobmem.layers import TEST, TRAIN, Layer, layer_types, register_layer, set_random_seed
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net import Net, build_nets
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
    "__version__",
    "build_nets",
    "data",
    "get_solver",
    "layer_types",
    "layers",
    "register_layer",
    "set_default",
    "set_random_seed",
    "solvers",
]
