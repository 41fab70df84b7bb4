"""What parameters of halves are the roundings of, and who writes these."""

import gc
import weakref

import numpy as np
import pytest

from blobmem import dtypes
from blobmem.memory import Side
from blobmem.memory.blob import Blob
from blobmem.solvers.masters import make_master

HALVES = pytest.mark.parametrize("dtype", dtypes.HALVES)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


@pytest.fixture
def values():
    """Float32 numbers of all sizes, none of them in the middle between two halves."""
    rng = np.random.default_rng(0)
    found = (rng.normal(size=(7, 300)) * 10.0 ** rng.integers(-4, 4, (7, 300))).astype(np.float32)
    return np.where(bits(found) & 0xFFF == 0, found * np.float32(1 + 2.0**-20), found)


def made(values, dtype, device="simulated"):
    param = Blob(values.shape, dtype=dtypes.of(dtype), device=device, name="w")
    with np.errstate(over="ignore"):
        param.data[...] = values
    master = make_master(param, "layer/0")
    master.set(values)
    return param, master


@HALVES
def test_a_master_is_what_it_was_set_to(values, dtype):
    param, master = made(values, dtype)
    assert master.values().tobytes() == values.tobytes()
    assert master.beside.nbytes == (2 if dtype == "float16" else 1) * param.nbytes
    assert master.beside.name == ("layer/0/master" if dtype == "float16" else "layer/0/lower")


@HALVES
def test_before_it_is_set_it_is_the_parameter(values, dtype):
    param = Blob((3, 4), dtype=dtypes.of(dtype), device="simulated")
    param.data[...] = 0.75
    master = make_master(param, "")
    assert (master.values() == 0.75).all()
    param.data[1] = 0.5
    master.settle()
    assert (master.values()[1] == 0.5).all() and (master.values()[0] == 0.75).all()


def test_in_the_middle_between_two_bfloat16_it_is_rounded_as_it_is_or_the_next_smaller():
    exact = np.array([0x3F808000, 0xBF808000, 0x3F818000, 0xBF818000, 0x3F817FFF, 0x7F7FFFFF, 0xFF7FFFFF], np.uint32)
    _, master = made(exact.view(np.float32), "bfloat16")
    wanted = exact.copy()
    wanted[:2] -= 1  # whose lower neighbour is even, so that they are rounded down
    assert bits(master.values()).tolist() == wanted.tolist()
    assert master.beside.cpu_data().tolist() == [32767, 32767, -32768, -32768, 32767, -1, -1]
    again = made(master.values(), "bfloat16")[1]
    assert bits(again.values()).tolist() == wanted.tolist()


@HALVES
def test_what_is_no_number_or_infinite_or_zero(dtype):
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    _, master = made(values, dtype)
    found = master.values()
    assert np.isnan(found[0]) and found[1:].tobytes() == values[1:].tobytes()


def test_a_zero_that_nobody_told_of_is_none_that_would_be_no_number():
    """As updates have it (`ops.cuda.update`)."""
    param, master = made(np.full(3, -1e-38, np.float32) * np.float32([1, 0.999, 2]), "bfloat16")
    master.beside.data[...] = [-5, 0, 5]
    address = param.data_view.memory.access(Side.DEVICE, 0, param.nbytes, "overwrite")  # as another solver's update
    param.device.as_array(address, param.shape, param.dtype)[...] = 0
    assert (np.abs(master.values()) < 1e-40).all()


def by_data(blob):
    blob.data[2] = 0.5


def by_held(blob):
    held = blob.data
    held[2] = 0.1
    held[2] = 0.5


def by_address(blob):
    blob.device.as_array(blob.mutable_gpu_data(), blob.shape, blob.dtype)[2] = 0.5


def by_view(blob):
    blob.data_view.cpu_data("write").view(blob.dtype).reshape(blob.shape)[2] = 0.5


def by_memory(blob):
    blob.data_view.memory.set_size(blob.nbytes)
    blob.data_view.memory.mutable_cpu_data().view(blob.dtype).reshape(blob.shape)[2] = 0.5


def by_adopting(blob):
    array = blob.cpu_data().copy()
    array[2] = 0.5
    blob.data_view.memory.set_host_array(array)


@HALVES
@pytest.mark.parametrize("write", [by_data, by_held, by_address, by_view, by_memory, by_adopting])
def test_what_somebody_writes_is_where_it_begins_and_the_rest_stays(values, dtype, write):
    param, master = made(values, dtype)
    for _ in range(2):  # it listens again
        write(param)
        master.settle()
        found = master.values()
        assert (found[2] == 0.5).all()
        assert np.delete(found, 2, 0).tobytes() == np.delete(values, 2, 0).tobytes()
        param.data[2] = values[2]
        master.set(values)


@HALVES
def test_who_only_looks_changes_nothing(values, dtype):
    param, master = made(values, dtype)
    param.cpu_data()
    param.gpu_data()
    assert param.data.shape == values.shape  # which counts as writing
    master.settle()
    assert master.values().tobytes() == values.tobytes()


@HALVES
def test_what_is_written_again_before_anybody_has_asked_counts_once(values, dtype):
    param, master = made(values, dtype)
    param.data[0] = 0.5
    param.gpu_data()
    param.data[1] = 0.25
    found = master.values()
    assert (found[0] == 0.5).all() and (found[1] == 0.25).all()
    assert found[2:].tobytes() == values[2:].tobytes()


@HALVES
def test_another_nets_parameter_is_where_it_begins(values, dtype):
    param, master = made(values, dtype)
    other, _ = made(values * 2, dtype, param.device)
    param.share_data(other)
    master.settle()
    assert master.values().tobytes() == other.cpu_data().astype(np.float32).tobytes()
    other.data[0] = 0.5
    assert (master.values()[0] == 0.5).all()


def test_a_parameter_does_not_keep_its_master(values):
    param, master = made(values, "bfloat16")
    gone = weakref.ref(master)
    del master
    gc.collect()
    assert gone() is None
    param.data[0] = 0.5
    assert (param.cpu_data()[0] == 0.5).all()
