"""What stands for a GPU where there is none: it counts what one would hold, and nothing computes on it."""

from __future__ import annotations

import numpy as np

from blobmem.devices.cuda.device import CudaDevice, takes_tensor_cores
from blobmem.devices.simulated import SimulatedDevice
from blobmem.dtypes import is_half


class PredictedCuda(SimulatedDevice):
    """A device with the workspaces of CUDA's ops, those of convolutions from the files of chosen algorithms.

    Args:
        limit: most bytes to hold.

    Attributes:
        model: the GPU whose files are looked up.
        uncertain: whether they lacked a convolution, which was charged the most that it may take.
    """

    name = "cuda (predicted)"
    family = "cuda"
    streams = CudaDevice.streams
    predicts = True
    workspace_limit: int | None = None

    def __init__(
        self, model: str = "NVIDIA H200", math: str = "fp32", deterministic: bool = False, limit: int | None = None
    ) -> None:
        super().__init__(limit, compute=False)
        self.model, self.math, self.deterministic = model, math, deterministic
        self.uncertain = False

    channels_last = CudaDevice.channels_last

    def on_tensor_cores(self, dtype: np.dtype) -> bool:
        """As a `CudaDevice`'s: on every model of which files are known."""
        return takes_tensor_cores(dtype, self.math)

    def in_warpgroups(self, dtype: np.dtype) -> bool:
        """Likewise."""
        return is_half(dtype)
