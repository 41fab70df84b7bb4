"""Every kernel source through NVRTC, which needs no GPU, and the cache of what it makes."""

import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from blobmem import dtypes
from blobmem.devices.cuda import compiler, sources
from blobmem.devices.cuda.context import LEAST_CAPABILITY
from blobmem.errors import DeviceError

LEAST = "sm_{}{}".format(*LEAST_CAPABILITY)
DTYPES = pytest.mark.parametrize("dtype", sources.DEFINES)
SOURCES = [(name, dtype) for name in sources.names() for dtype in sources.DEFINES]
# the two halves differ in two functions of common.cuh, which every source has, and double from float there and in resample
ONCE = {"bfloat16": {"neuron"}, "float64": {"neuron", "resample"}}
SOURCES = [(name, dtype) for name, dtype in SOURCES if name in ONCE.get(dtype, {name})]


@pytest.fixture
def nvrtc(tmp_path, monkeypatch):
    """What the compiler takes from NVRTC's packages; an empty cache."""
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path))
    try:
        return compiler._nvrtc()
    except (DeviceError, RuntimeError) as error:  # no package, or no library that it could load
        pytest.skip(f"needs NVRTC: {error}")


@pytest.fixture
def hasty(nvrtc, monkeypatch):
    """Less optimisation than users get: the same errors in a quarter of the time. What an earlier run made is kept."""
    program, options, version = nvrtc
    version += hashlib.sha256(Path(compiler.__file__).read_bytes()).hexdigest()  # which says how
    monkeypatch.setenv("BLOBMEM_CACHE", f"{tempfile.gettempdir()}/blobmem-hasty-{os.getuid()}")
    monkeypatch.setattr(compiler, "_nvrtc", lambda: (program, functools.partial(options, ofast_compile="max"), version))


def kernels(code):
    """The names of the kernels in machine code: of each, and of no other function, a section has the parameters."""
    return {name.decode() for name in re.findall(rb"\0\.nv\.constant0\.(\w+)(?=\0)", code)}


@pytest.mark.parametrize(("source", "dtype"), SOURCES)
def test_compiles(hasty, source, dtype):
    expected = set(sources.signatures(source))
    assert expected and kernels(compiler.compile_source(source, dtypes.of(dtype), "sm_90")) == expected


@DTYPES
@pytest.mark.parametrize("source", ["boxes", "neuron", "recurrent_cluster", "update"])  # what old ones may lack
def test_compiles_for_the_oldest_gpus(hasty, source, dtype):
    assert kernels(compiler.compile_source(source, dtypes.of(dtype), LEAST)) == set(sources.signatures(source))


def test_as_users_get_it_and_once(nvrtc, tmp_path, monkeypatch):
    code = compiler.compile_source("eltwise", np.dtype(np.float32), "sm_90")
    assert kernels(code) == set(sources.signatures("eltwise"))
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.read_bytes() == code
    monkeypatch.setattr(compiler, "_nvrtc", lambda: (None, None, nvrtc[2]))  # cannot compile
    assert compiler.compile_source("eltwise", np.dtype(np.float32), "sm_90") == code


def test_an_error_names_the_source_and_shows_the_place(nvrtc, monkeypatch):
    monkeypatch.setattr(sources, "read", lambda name: 'extern "C" __global__ void f() { missing(); }')
    with pytest.raises(DeviceError, match=r"kernels 'wrong' do not compile for sm_90 with NVRTC[\s\S]*missing"):
        compiler.compile_source("wrong", np.dtype(np.float32), "sm_90")


def test_an_unknown_architecture_is_an_error(nvrtc):
    with pytest.raises(DeviceError, match="do not compile for sm_11"):
        compiler.compile_source("axpy", np.dtype(np.float32), "sm_11")
