"""BlobProto to NumPy and back."""

from __future__ import annotations

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array, blob_shape, fill_blob, is_legacy, shape_matches


def blob(shape=(), **fields):
    proto = caffe_pb2.BlobProto(**fields)
    proto.shape.dim.extend(shape)
    return proto


def array(proto, **kwargs) -> np.ndarray:
    values = blob_array(proto, **kwargs)
    assert values is not None
    return values


def test_shapes() -> None:
    assert blob_shape(blob((2, 3))) == (2, 3)
    assert blob_shape(blob()) == ()
    legacy = caffe_pb2.BlobProto(num=2, width=5)
    assert is_legacy(legacy) and blob_shape(legacy) == (2, 0, 0, 5)
    assert not is_legacy(blob((2, 3)))


@pytest.mark.parametrize("shape", [(2, -1), (1,) * 33])
def test_impossible_shapes(shape) -> None:
    with pytest.raises(NetError, match="at most 32 axes, none below 0"):
        blob_shape(blob(shape))


def test_shapes_fit() -> None:
    legacy = caffe_pb2.BlobProto(num=1, channels=1, height=3, width=4)
    for shape in ((1, 1, 3, 4), (1, 3, 4), (3, 4)):
        assert shape_matches(legacy, shape)
    for other in ((4,), (12,), (3, 4, 1), (1, 1, 1, 3, 4), (4, 3)):
        assert not shape_matches(legacy, other)
    assert shape_matches(blob((3, 4)), (3, 4)) and not shape_matches(blob((3, 4)), (1, 3, 4))
    assert shape_matches(blob(), ())


def test_values_in_single_and_double_precision() -> None:
    single = array(blob((2, 2), data=[1, 2, 3, 0.1]))
    assert single.dtype == np.float32 and single.tolist() == [[1, 2], [3, np.float32(0.1)]]
    double = array(blob((2,), double_data=[1, 0.1], data=[7, 7]))
    assert double.dtype == np.float64 and double.tolist() == [1, 0.1]
    assert not single.flags.writeable


def test_gradients() -> None:
    proto = blob((2,), data=[1, 2], diff=[3, 4])
    assert array(proto).tolist() == [1, 2]
    assert array(proto, diff=True).tolist() == [3, 4]
    assert array(blob((1,), double_diff=[5]), diff=True).dtype == np.float64
    assert blob_array(blob((2,), data=[1, 2]), diff=True) is None


def test_no_values() -> None:
    assert blob_array(blob((2, 3))) is None


def test_legacy_blob() -> None:
    proto = caffe_pb2.BlobProto(num=1, channels=2, height=1, width=3, data=range(6))
    assert array(proto).shape == (1, 2, 1, 3)
    assert array(proto).ravel().tolist() == list(range(6))


def test_wrong_number_of_values() -> None:
    with pytest.raises(NetError, match=r"shape \(2, 3\) with 5 values: expected 6"):
        blob_array(blob((2, 3), data=range(5)))


def test_values_behind_fields_that_we_do_not_know() -> None:
    """A varint, a fixed32 and a fixed64 under numbers that BlobProto does not use."""
    proto = caffe_pb2.BlobProto()
    known = blob((300,), data=range(300)).SerializeToString()
    proto.ParseFromString(b"\xa0\x06\x05" + b"\xa5\x06\0\0\0\0" + b"\xa1\x06\0\0\0\0\0\0\0\0" + known)
    assert array(proto).tolist() == list(range(300))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
def test_round_trip(dtype) -> None:
    values = np.arange(200).reshape(2, 5, 20).astype(dtype)
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, values)
    fill_blob(proto, -values, diff=True)
    again = caffe_pb2.BlobProto.FromString(proto.SerializeToString())
    assert blob_shape(again) == (2, 5, 20)
    wide = dtype in (np.float64, np.int32)
    assert list(again.double_data if wide else again.data) == values.ravel().tolist()
    assert list(again.double_diff if wide else again.diff) == (-values).ravel().tolist()
    assert (array(again) == values).all() and (array(again, diff=True) == -values).all()


def test_bits_survive() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x00000001, 0x80000000], dtype=np.uint32)
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, bits.view(np.float32))
    again = caffe_pb2.BlobProto.FromString(proto.SerializeToString())
    assert array(again)[1:].view(np.uint32).tolist() == bits[1:].tolist()
    assert np.isnan(array(again)[0])


def test_filling_replaces_what_was_there() -> None:
    proto = caffe_pb2.BlobProto(num=1, channels=1, height=1, width=2, double_data=[1, 2])
    fill_blob(proto, np.array([[5], [6], [7]], np.float32))
    assert not is_legacy(proto) and blob_shape(proto) == (3, 1)
    assert array(proto).tolist() == [[5], [6], [7]]
    assert not proto.double_data
    fill_blob(proto, np.array([8.0]))
    assert array(proto).tolist() == [8] and not proto.data


def test_scalars_empty_and_strided_arrays() -> None:
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, np.array(3, np.float32))
    assert blob_shape(proto) == () and proto.HasField("shape") and array(proto).tolist() == 3
    fill_blob(proto, np.zeros((0, 4), np.float32))
    assert blob_shape(proto) == (0, 4) and blob_array(proto) is None
    fill_blob(proto, np.arange(12, dtype=np.float32).reshape(3, 4).T)
    assert array(proto).tolist() == np.arange(12).reshape(3, 4).T.tolist()


def test_what_does_not_fit_a_message_is_refused() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2**29,), (0,))
    with pytest.raises(NetError, match="2 GiB"):
        fill_blob(caffe_pb2.BlobProto(), huge)
