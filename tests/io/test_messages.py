"""Arrays to messages and back."""

import numpy as np
import pytest
from PIL import Image

from blobmem import caffe_pb2, io
from blobmem.errors import NetError


def test_blobs_go_out_in_single_precision_and_come_back_in_double():
    values = np.arange(6.0).reshape(1, 2, 3) / 7
    blob = io.array_to_blobproto(values)
    assert list(blob.shape.dim) == [1, 2, 3] and len(blob.data) == 6 and not blob.double_data
    back = io.blobproto_to_array(blob)
    assert back.dtype == np.float64 and back.flags.writeable
    np.testing.assert_array_equal(back, values.astype(np.float32))


def test_gradients_of_a_blob():
    blob = io.array_to_blobproto(np.zeros(3), np.array([1, 2, 3]))
    np.testing.assert_array_equal(io.blobproto_to_array(blob, return_diff=True), [1, 2, 3])
    with pytest.raises(NetError, match=r"an array of shape \(3,\) with gradients of shape \(2,\)"):
        io.array_to_blobproto(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match=r"a BlobProto of shape \(3,\) has no gradients"):
        io.blobproto_to_array(io.array_to_blobproto(np.zeros(3)), return_diff=True)


def test_shapes_of_blobs():
    legacy = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=3, data=range(6))
    assert io.blobproto_to_array(legacy).shape == (1, 1, 2, 3)
    assert io.blobproto_to_array(caffe_pb2.BlobProto(data=[5])) == 5
    assert io.blobproto_to_array(io.array_to_blobproto(np.zeros((0, 3)))).shape == (0, 3)
    assert io.blobproto_to_array(caffe_pb2.BlobProto(double_data=[0.1])) == 0.1
    with pytest.raises(ValueError, match="2 values"):
        io.blobproto_to_array(caffe_pb2.BlobProto(data=[5, 6]))


def test_lists_of_arrays():
    arrays = [np.ones((2, 2)), np.arange(3.0)]
    for encode in (io.arraylist_to_blobprotovector_str, io.arraylist_to_blobprotovecor_str):
        back = io.blobprotovector_str_to_arraylist(encode(arrays))
        assert len(back) == 2
        for array, other in zip(arrays, back, strict=True):
            np.testing.assert_array_equal(array, other)
    with pytest.raises(NetError, match="these 3 bytes are no BlobProtoVector"):
        io.blobprotovector_str_to_arraylist(b"\xff\xff\xff")


@pytest.mark.parametrize(("dtype", "field"), [(np.uint8, "data"), (np.float32, "float_data"), (np.int64, "float_data")])
def test_data(dtype, field):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    datum = io.array_to_datum(values.transpose(0, 2, 1), 7)
    assert (datum.channels, datum.height, datum.width, datum.label) == (2, 4, 3, 7)
    assert [name for name in ("data", "float_data") if getattr(datum, name)] == [field]
    back = io.datum_to_array(datum)
    assert back.dtype == (np.uint8 if dtype == np.uint8 else np.float64) and back.flags.writeable
    np.testing.assert_array_equal(back, values.transpose(0, 2, 1))


def test_a_datum_without_a_label_has_none():
    assert not io.array_to_datum(np.zeros((1, 1, 1))).HasField("label")
    with pytest.raises(ValueError, match=r"\(channels, height, width\), got one of shape \(2, 2\)"):
        io.array_to_datum(np.zeros((2, 2)))


def test_a_compressed_datum_is_decoded_to_blue_green_red(tmp_path):
    path = tmp_path / "x.png"
    Image.fromarray(np.array([[[1, 2, 3]]], dtype=np.uint8)).save(path)
    values = io.datum_to_array(caffe_pb2.Datum(data=path.read_bytes(), encoded=True))
    np.testing.assert_array_equal(values[:, 0, 0], [3, 2, 1])


def test_a_datum_that_does_not_fit_its_dimensions():
    with pytest.raises(ValueError, match="3 bytes of data, expected 4"):
        io.datum_to_array(caffe_pb2.Datum(channels=1, height=2, width=2, data=b"abc"))
