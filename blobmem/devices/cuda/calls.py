"""Calls of the CUDA driver: its module, what they give, and what it means that one failed."""

from __future__ import annotations

import functools
from typing import Any

from blobmem.errors import DeviceError

_INSTALL = "pip install 'blobmem[cuda]' installs them (PyCUDA is built from source and needs the CUDA toolkit)"
_FATAL = (
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED", "CUDA_ERROR_EXTERNAL_DEVICE",
)  # fmt: skip

losses: dict[int, str] = {}
"""What is to be said of contexts that a call found lost, by their addresses: nothing works in them any more, nor in
another context of this process on that GPU."""


@functools.cache
def bindings() -> Any:
    """cuda-bindings' driver module, initialised. DeviceError where there is no package, driver or GPU."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"the CUDA device needs cuda-bindings ({error}): {_INSTALL}") from error
    try:
        result = driver.cuInit(0)[0]
    except RuntimeError as error:  # libcuda.so.1 cannot be loaded
        raise DeviceError(f"there is no CUDA driver on this machine ({error}): use device cpu or simulated") from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"no GPU can be used ({result.name}): look at nvidia-smi, or use device cpu or simulated")
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call's result; DeviceError naming the call if it failed."""
    if result[0]:
        raise failure(result[0], what)
    return result[1] if len(result) == 2 else result[1:]


def failure(code: Any, what: str) -> DeviceError:
    """The exception for a driver call that failed; always the same from the loss of the current context on."""
    said = f"{what} failed with {code.name}"
    if code.name not in _FATAL:
        return DeviceError(f"CUDA: {said}")
    message = f"the GPU's context is lost, with all that was on the GPU ({said}): the process must be started anew"
    code, context = bindings().cuCtxGetCurrent()
    return DeviceError(message if code or not int(context) else losses.setdefault(int(context), message))
