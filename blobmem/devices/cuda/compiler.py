"""From kernel sources to machine code: NVRTC, which needs no GPU, and a cache on disk."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from blobmem.devices.cuda import sources
from blobmem.errors import DeviceError, NetError
from blobmem.proto.files import write_atomic


def cache_folder() -> Path:
    """Where compiled kernels and chosen algorithms are kept: `BLOBMEM_CACHE`, or the user's cache folder."""
    return _cache_folder(*map(os.environ.get, ("BLOBMEM_CACHE", "XDG_CACHE_HOME", "HOME")))


@functools.lru_cache(1)
def _cache_folder(named: str | None, base: str | None, _home: str | None) -> Path:
    """The same, by what the environment says: it is asked for each convolution of a net."""
    return Path(named) if named else Path(base or Path.home() / ".cache") / "blobmem"


@functools.cache
def _nvrtc() -> tuple[Any, Any, str]:
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the latter where it finds no library
        raise DeviceError(
            f"compiling kernels needs cuda-core and NVRTC ({error}): pip install 'blobmem[cuda]'"
        ) from error
    return Program, ProgramOptions, f"{major}.{minor}"


def compile_source(source: str, dtype: np.dtype, architecture: str) -> bytes:
    """The machine code of a source for "sm_90" and the like, from the cache if it is there.

    Raises DeviceError where NVRTC is missing or does not know the architecture.
    """
    program, options_of, version = _nvrtc()
    text, macros = sources.read(source), sources.DEFINES[np.dtype(dtype).name]
    digest = hashlib.sha256("\0".join([text, *macros, architecture, version]).encode()).hexdigest()[:32]
    path = cache_folder() / "kernels" / f"{source}-{np.dtype(dtype).char}-{architecture}-{digest}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    options = options_of(arch=architecture, std="c++17", define_macro=macros or None)
    try:
        code = bytes(program(text, "c++", options).compile("cubin").code)
    except Exception as error:
        raise DeviceError(
            f"kernels '{source}' do not compile for {architecture} with NVRTC {version}: {error}"
        ) from error
    keep(path, code)
    return code


def keep(path: Path, content: bytes) -> bool:
    """Write a file of the cache, whole or not at all; whether it could be written (a cache is only a cache)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except (OSError, NetError):
        return False
    return True
