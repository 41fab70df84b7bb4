"""blobmem: Caffe nets on one memory system whose every byte is accounted for.

`import blobmem as caffe` serves scripts written for pycaffe.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from blobmem import data, layers, proto, solvers
from blobmem.caffe_names import install_as_caffe
from blobmem.devices import SimulatedDevice, set_default, set_device, set_mode_cpu, set_mode_gpu
from blobmem.errors import BlobmemError, DeviceError, NetError, OutOfDeviceMemory, SharedBlobError
from blobmem.layers import TEST, TRAIN, Layer, layer_types, register_layer, set_random_seed
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob, from_dlpack
from blobmem.net import Net, build_nets
from blobmem.net_spec import NetSpec, params, to_proto
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
from blobmem.solvers import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    get_solver,
)
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem import classifier, coord_map, detector, draw, io
    from blobmem.classifier import Classifier
    from blobmem.detector import Detector

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "BlobmemError",
    "Classifier",
    "Detector",
    "DeviceError",
    "Layer",
    "NesterovSolver",
    "Net",
    "NetError",
    "NetSpec",
    "OutOfDeviceMemory",
    "RMSPropSolver",
    "SGDSolver",
    "SharedBlobError",
    "SimulatedDevice",
    "SyncedMemory",
    "Timer",
    "__version__",
    "build_nets",
    "caffe_pb2",
    "classifier",
    "coord_map",
    "data",
    "detector",
    "draw",
    "from_dlpack",
    "get_solver",
    "has_nccl",
    "init_log",
    "install_as_caffe",
    "io",
    "layer_type_list",
    "layer_types",
    "layers",
    "log",
    "params",
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
    "to_proto",
]

_LATER = {
    "Classifier": "classifier",
    "Detector": "detector",
    "classifier": "classifier",
    "coord_map": "coord_map",
    "detector": "detector",
    "draw": "draw",
    "io": "io",
}
"""What is imported when it is first used, and the module that it is in, or is."""

_caffe = sys.modules[__name__]  # pycaffe's compiled half


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LATER[name]}")
    return module if name == _LATER[name] else getattr(module, name)
