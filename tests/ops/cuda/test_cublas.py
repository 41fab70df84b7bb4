"""What `Cublas` tells the library, and how often; the library itself is recorded calls."""

import ctypes
import enum
import inspect
import sys
import threading
import types

import cublas_stand_in
import pytest

from blobmem.errors import DeviceError
from blobmem.ops.cuda.cublas import WORKSPACE, Cublas

A, B, C = 0x1000, 0x2000, 0x3000


class Math(enum.IntEnum):
    DEFAULT_MATH = 0
    TF32_TENSOR_OP_MATH = 3


class Refused(Exception):
    pass


@pytest.fixture
def calls(monkeypatch):
    """Calls of the library; of a scalar's address, what it holds."""
    seen = []

    def recorded(name, scalar, *at):
        def record(*values):
            listed = list(values)
            for index in at:
                listed[index] = scalar.from_address(listed[index]).value
            seen.append((name, *listed))

        return record

    library = types.ModuleType("nvmath.bindings.cublas")
    library.Math = Math
    library.create = lambda: 77
    library.cuBLASError = Refused
    for letter, scalar in (("s", ctypes.c_float), ("d", ctypes.c_double)):
        setattr(library, f"{letter}gemm", recorded(f"{letter}gemm", scalar, 6, 11))
        name = f"{letter}gemm_strided_batched"
        setattr(library, name, recorded(name, scalar, 6, 13))
        setattr(library, f"{letter}scal", recorded(f"{letter}scal", scalar, 2))
    for name, at in (("gemm_ex", (6, 13)), ("gemm_strided_batched_ex", (6, 15)), ("scal_ex", (2,))):
        setattr(library, name, recorded(name, ctypes.c_float, *at))
    for name in ("set_stream", "set_workspace", "set_math_mode"):
        setattr(library, name, recorded(name, None))
    bindings = types.ModuleType("nvmath.bindings")
    bindings.cublas = library
    for name, module in (("nvmath", types.ModuleType("nvmath")), ("nvmath.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    return seen


class Context:
    pass


class Device:
    math = "fp32"
    stream = 5

    def __init__(self):
        self.context = Context()

    def compute_stream(self):
        return types.SimpleNamespace(handle=self.stream)

    def synchronize(self):
        pass


def taken(calls):
    names = [name for name, *_ in calls]
    calls.clear()
    return names


def test_only_what_changed_is_set(calls):
    device = Device()
    cublas = Cublas(device)
    cublas.prepare(0x100)
    assert calls == [("set_stream", 77, 5), ("set_workspace", 77, 0x100, WORKSPACE), ("set_math_mode", 77, 0)]
    calls.clear()
    cublas.prepare(0x100)
    assert not calls
    cublas.prepare(0x200)
    assert taken(calls) == ["set_workspace"]
    device.math = "tf32"
    cublas.prepare(0x200)
    assert calls == [("set_math_mode", 77, 3)]
    calls.clear()
    device.stream = 6
    cublas.prepare(0x200)
    assert taken(calls) == ["set_stream", "set_workspace"]  # a new stream takes the workspace away


def test_a_handle_serves_the_next_thread(calls):
    library, made = sys.modules["nvmath.bindings"].cublas, []
    library.create = lambda: made.append(1) or len(made)
    device = Device()

    def use():
        Cublas(device).prepare(0x100)

    for _ in range(3):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(made) == 1
    assert calls == 3 * [("set_stream", 1, 5), ("set_workspace", 1, 0x100, WORKSPACE), ("set_math_mode", 1, 0)]
    both = Cublas(device), Cublas(device)
    assert len(made) == 2
    del both
    Cublas(Device())  # of another context
    assert len(made) == 3


@pytest.mark.parametrize("kind, letter", [("f", "s"), ("d", "d")])
def test_arguments_and_scalars(calls, kind, letter):
    cublas = Cublas(Device())
    cublas.gemm(kind, True, False, 2, 3, 4, 1.5, A, 10, B, 11, 0.25, C, 12)
    cublas.gemm_strided_batched(kind, False, True, 2, 3, 4, 1.0, A, 10, 20, B, 11, 21, 0.5, C, 12, 22, 6)
    cublas.scal(kind, 9, -0.5, C)
    assert calls == [
        (f"{letter}gemm", 77, 1, 0, 2, 3, 4, 1.5, A, 10, B, 11, 0.25, C, 12),
        (f"{letter}gemm_strided_batched", 77, 0, 1, 2, 3, 4, 1.0, A, 10, 20, B, 11, 21, 0.5, C, 12, 22, 6),
        (f"{letter}scal", 77, 9, -0.5, C, 1),
    ]


@pytest.mark.parametrize("kind, number", [("e", 2), ("E", 14)])
def test_halves_are_summed_in_float32(calls, kind, number):
    cublas = Cublas(Device())
    cublas.gemm(kind, True, False, 2, 3, 4, 1.5, A, 10, B, 11, 0.25, C, 12)
    cublas.gemm_strided_batched(kind, False, True, 2, 3, 4, 1.0, A, 10, 20, B, 11, 21, 0.5, C, 12, 22, 6)
    cublas.scal(kind, 9, -0.5, C)
    a, b, c = (A, number, 10), (B, number, 11), (C, number, 12)
    assert calls == [
        ("gemm_ex", 77, 1, 0, 2, 3, 4, 1.5, *a, *b, 0.25, *c, 68, -1),
        ("gemm_strided_batched_ex", 77, 0, 1, 2, 3, 4, 1.0, *a, 20, *b, 21, 0.5, *c, 22, 6, 68, -1),
        ("scal_ex", 77, 9, -0.5, 0, C, number, 1, 0),
    ]


def test_what_goes_wrong_is_a_device_error(calls, monkeypatch):
    library = sys.modules["nvmath.bindings"].cublas

    def sgemm(*_):
        raise Refused("CUBLAS_STATUS_EXECUTION_FAILED")

    def create():
        raise RuntimeError("libcublas.so cannot be opened")

    library.sgemm = sgemm
    with pytest.raises(DeviceError, match="sgemm failed: CUBLAS_STATUS_EXECUTION_FAILED"):
        Cublas(Device()).gemm("f", False, False, 1, 1, 1, 1.0, A, 1, B, 1, 0.0, C, 1)
    library.create = create
    with pytest.raises(DeviceError, match="does not start: libcublas"):
        Cublas(Device())
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(DeviceError, match="nvmath-python"):
        Cublas(Device())


def test_the_stand_in_takes_the_same_calls():
    def signatures(kind):
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in methods if not name.startswith("_")}

    assert signatures(cublas_stand_in.CublasStandIn) == signatures(Cublas)
