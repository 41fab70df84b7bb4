"""What a GPU's figures depend on: the card, the driver, the libraries' versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from typing import Any

import blobmem
from blobmem import devices

PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cublas", "nvidia-cublas-cu13", "nvmath-python", "cuda-bindings", "pycuda")


def described(word: str, with_torch: bool) -> dict[str, Any]:
    """Facts by name; those that cannot be had are left out."""
    facts: dict[str, Any] = {"python": platform.python_version(), "blobmem": blobmem.__version__}
    with contextlib.suppress(Exception):  # a device that fails has a message in every row
        facts |= {name: value for name, value in devices.get(word).describe().items() if name != "free_bytes"}
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
    with contextlib.suppress(Exception):
        import cudnn

        facts["cudnn"] = cudnn.backend_version()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if with_torch:
        with contextlib.suppress(Exception):
            import torch

            facts |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
            facts["torch_cudnn"] = torch.backends.cudnn.version()
    return facts
