"""Blob: shapes, sharing between shapes, arithmetic where the bytes are, files."""

import copy
import gc
import pickle

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import Blob, SimulatedDevice
from blobmem.errors import NetError
from blobmem.memory.blob import from_dlpack
from blobmem.proto import caffe_pb2


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def test_shapes():
    blob = Blob(2, 3, 4, 5)
    assert blob.shape == (2, 3, 4, 5) == Blob((2, 3, 4, 5)).shape == Blob([2, 3, 4, 5]).shape
    assert (blob.num, blob.channels, blob.height, blob.width) == (2, 3, 4, 5)
    assert blob.num_axes == 4 and blob.nbytes == 480
    assert blob.count == 120 and blob.count_of(1) == 60 and blob.count_of(1, 3) == 12 and blob.count_of(-2) == 20
    assert blob.count_of(2, 2) == 1
    assert blob.offset(1, 2, 3, 4) == 119 and blob.offset(1) == 60 and blob.offset([0, 1]) == 20
    assert blob.canonical_axis(-1) == 3
    assert Blob().shape == () and Blob().count == 1
    assert Blob(7).channels == 1
    with pytest.raises(IndexError, match="axis 4 is out of range for a blob"):
        blob.canonical_axis(4)
    with pytest.raises(IndexError):
        blob.count_of(3, 2)
    with pytest.raises(IndexError):
        blob.offset(2)
    with pytest.raises(ValueError, match="cannot be negative"):
        Blob(2, -1)
    with pytest.raises(ValueError, match="at most 32 axes"):
        Blob([1] * 33)
    with pytest.raises(ValueError, match="TiB"):
        Blob(1 << 40, 1 << 40)
    with pytest.raises(ValueError, match="more than the 4 axes"):
        _ = Blob(1, 1, 1, 1, 1).num


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_dtypes(dtype, device):
    blob = Blob(3, 2, dtype=dtype, device=device)
    blob.data[...] = [[1, 2], [3, 4], [5, 6]]
    blob.diff[...] = 1
    blob.update()
    blob.scale_data(2)
    np.testing.assert_array_equal(blob.cpu_data(), [[0, 2], [4, 6], [8, 10]])
    assert blob.data.dtype == dtype
    assert blob.asum_data() == 30 and blob.sumsq_diff() == 6


def test_other_dtypes_are_refused():
    for dtype in (np.complex64, object, bool, "U3"):
        with pytest.raises(TypeError, match="floats or integers"):
            Blob(1, dtype=dtype)


def test_data_is_writable_and_lasting(device):
    blob = Blob(2, 3, device=device)
    array = blob.data
    assert not array.any()
    array[0, 1] = 5
    assert blob.data is array
    assert blob.cpu_data()[0, 1] == 5
    with pytest.raises(ValueError):
        blob.cpu_data()[0, 0] = 1
    blob.reshape(4, 5)
    assert blob.data[0, 1] == 5
    array[0, 0] = 7  # valid memory, and the same: growth is in place
    assert blob.data[0, 0] == 7


def test_reshape_keeps_the_bytes_and_reads_zero_beyond():
    blob = Blob(4)
    blob.data[...] = [1, 2, 3, 4]
    blob.reshape(2)
    np.testing.assert_array_equal(blob.data, [1, 2])
    blob.reshape(6)
    np.testing.assert_array_equal(blob.data, [1, 2, 3, 4, 0, 0])
    blob.reshape_like(Blob(2, 2))
    assert blob.shape == (2, 2)


def test_sharing_between_shapes_survives_reshapes_of_either(device):
    a, b = Blob(10, device=device, name="a"), Blob(4, device=device, name="b")
    b.share_data(a)
    a.data[...] = np.arange(10)
    np.testing.assert_array_equal(b.data, np.arange(4))
    for mine, other, size in ((b, a, 30), (a, b, 50), (b, a, 3), (a, b, 2), (b, a, 70)):
        mine.reshape(size)
        mine.data[...] = size
        shared = min(mine.count, other.count)
        np.testing.assert_array_equal(other.data.ravel()[:shared], np.full(shared, size))
        assert mine.data_view.memory is other.data_view.memory


def test_a_small_view_keeps_the_bytes_beyond_it():
    device = SimulatedDevice()
    a, b = Blob(100, dtype=np.uint8, device=device), Blob(50, dtype=np.uint8, device=device)
    b.share_data(a)
    a.data[...] = 1
    a.gpu_data()
    device.memset(a.mutable_gpu_data(), 2, 100)
    b.data[...] = 3
    np.testing.assert_array_equal(a.cpu_data(), [3] * 50 + [2] * 50)


def test_unsharing_keeps_the_values(device):
    a, b = Blob(4, device=device), Blob(3, device=device)
    b.share_data(a)
    b.share_diff(a)
    a.data[...], a.diff[...] = 1, 2
    b.unshare_data()
    b.unshare_diff()
    a.data[...], a.diff[...] = 7, 8
    assert (b.data == 1).all() and (b.diff == 2).all()


def test_blobs_on_two_devices_do_not_share():
    with pytest.raises(ValueError, match="cannot share"):
        Blob(1, device=SimulatedDevice()).share_data(Blob(1, device=SimulatedDevice()))


def test_arithmetic_runs_where_the_bytes_are():
    device = SimulatedDevice()
    blob = Blob(1000, device=device)
    blob.data[...], blob.diff[...] = 3, 1
    blob.gpu_diff()
    blob.mutable_gpu_data()
    before = device.statistics.snapshot()
    blob.update()
    blob.scale_data(-2)
    assert blob.asum_data() == 4000
    assert blob.sumsq_data() == 16000
    change = device.statistics - before
    assert change.dtoh_copies == change.htod_copies == 0
    assert (blob.data == -4).all()


def test_copy_from(device):
    a, b = Blob(2, 3, device=device), Blob(6, device=device)
    a.data[...], a.diff[...] = 4, 5
    with pytest.raises(ValueError, match="reshape=True"):
        b.copy_from(a)
    b.copy_from(a, reshape=True)
    b.copy_from(a, copy_diff=True)
    assert b.shape == (2, 3) and (b.data == 4).all() and (b.diff == 5).all()
    c = Blob(2, 3, dtype=np.float64, device=device)
    c.copy_from(a)
    assert (c.data == 4).all()


def test_copy_on_the_device_moves_nothing_to_the_host():
    device = SimulatedDevice()
    a, b = Blob(100, device=device), Blob(100, device=device)
    a.data[...] = 1
    a.mutable_gpu_data()
    b.copy_from(a)
    assert device.statistics.dtoh_copies == 0 and device.statistics.dtod_copies == 1
    assert (b.data == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_proto_round_trip(dtype, device):
    blob = Blob(2, 3, dtype=dtype, device=device)
    blob.data[...] = np.arange(6).reshape(2, 3) / 3
    blob.diff[...] = 9
    other = Blob(dtype=dtype, device=device)
    other.from_proto(caffe_pb2.BlobProto.FromString(blob.to_proto(write_diff=True).SerializeToString()))
    np.testing.assert_array_equal(other.data, blob.data)
    np.testing.assert_array_equal(other.diff, blob.diff)
    assert not blob.to_proto().diff


def test_legacy_and_double_protos():
    legacy = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=3, data=range(6))
    blob = Blob()
    blob.from_proto(legacy)
    assert blob.shape == (1, 1, 2, 3)
    flat = Blob(2, 3)
    flat.from_proto(legacy, reshape=False)
    assert flat.data[1, 2] == 5
    double = caffe_pb2.BlobProto(double_data=[1, 2])
    double.shape.dim.append(2)
    blob.from_proto(double)
    np.testing.assert_array_equal(blob.data, [1, 2])


def test_wrong_protos_change_nothing():
    blob = Blob(2)
    blob.data[...] = 7
    short = caffe_pb2.BlobProto(data=[1])
    short.shape.dim.append(3)
    with pytest.raises(NetError, match="expected 3"):
        blob.from_proto(short)
    other = caffe_pb2.BlobProto(data=[1, 2, 3])
    other.shape.dim.append(3)
    with pytest.raises(NetError, match="cannot take values of shape"):
        blob.from_proto(other, reshape=False)
    assert blob.shape == (2,) and (blob.data == 7).all()


def test_nothing_is_allocated_before_it_is_touched():
    device = SimulatedDevice()
    blob = Blob(1 << 20, device=device)
    blob.share_diff(Blob(5, device=device))
    assert device.statistics.allocator_calls == 0
    memory = blob.data_view.memory
    assert memory.cpu_capacity == memory.gpu_capacity == 0
    blob.gpu_data()
    assert device.statistics.bytes_held == blob.nbytes
    assert device.statistics.htod_copies == 0


# The standard doors


def test_numpy_and_dlpack_share_memory():
    blob = Blob(2, 3, device=SimulatedDevice())
    blob.mutable_gpu_data()
    array = np.asarray(blob)
    assert array.shape == (2, 3) and array.dtype == np.float32 and not array.any()
    array[0, 1] = 5
    assert blob.data[0, 1] == 5 and np.from_dlpack(blob)[0, 1] == 5
    assert blob.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("door", [np.asarray, np.from_dlpack], ids=["asarray", "dlpack"])
def test_what_left_through_a_door_outlives_the_blob_and_its_growth(door):
    blob = Blob(1000)
    blob.data[...] = 3
    array = door(blob)
    blob.reshape(1 << 20)
    blob.data[-1] = 1
    del blob
    gc.collect()
    assert (array == 3).all()


def test_dlpack_in_shares_memory():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    blob = from_dlpack(array, name="given")
    assert blob.shape == (2, 3)
    blob.data[0, 0] = 9
    assert array[0, 0] == 9
    other = Blob(2, 3)
    other.share_data(blob)
    array[1, 1] = 8
    assert other.data[1, 1] == 8
    with pytest.warns(UserWarning, match="'given' outgrew"):
        blob.reshape(4, 3)
        assert blob.data[1, 1] == 8
    with pytest.raises(ValueError, match="C-contiguous"):
        from_dlpack(np.ones((4, 4), np.float32)[:, ::2])


def test_blobs_of_two_dtypes_do_not_share():
    blob = Blob(2, name="b")
    for share in (blob.share_data, blob.share_diff):
        with pytest.raises(ValueError, match="'b' .* float32, .* float64: they cannot share"):
            share(from_dlpack(np.ones(2)))
    assert blob.data.tolist() == [0, 0]


def test_numbers_of_another_byte_order_are_refused():
    with pytest.raises(TypeError, match="byte order"):
        Blob.adopt(np.ones(2, np.dtype(np.float32).newbyteorder()))


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_lives_in_memory_is_not_copied_as_an_object(copies):
    with pytest.raises(TypeError, match="memory 'b' .* cannot be copied or pickled"):
        copies(Blob(2, name="b").data_view.memory)


def test_an_adopted_array_is_asked_again(device):
    """Whoever gave an array may write to it: nothing tells us."""
    array = np.ones(4, np.float32)
    blob = Blob.adopt(array, device=device)
    if not device.is_host:
        blob.gpu_data()
    array[...] = 5
    blob.touch_if_held()
    assert blob.asum_data() == 20
    if not device.is_host:
        blob.gpu_data()
        assert blob.asum_data() == 20 and device.statistics.htod_copies == 2
