"""The outermost layer of the wire format."""

from __future__ import annotations

import pytest

from blobmem.proto import caffe_pb2, wire


def test_fields_of_every_kind() -> None:
    message = caffe_pb2.LayerParameter(name="ab", loss_weight=[0.5], phase=1)
    found = [(f.number, f.kind, bytes(f.payload)) for f in wire.fields(memoryview(message.SerializeToString()))]
    assert found == [(1, wire.LEN, b"ab"), (5, wire.I32, b"\0\0\0\x3f"), (10, wire.VARINT, b"\1")]
    assert [f.kind for f in wire.fields(memoryview(b"\x09" + bytes(8)))] == [wire.I64]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70000])
def test_packed_field_is_what_protobuf_writes(size: int) -> None:
    data = bytes(size)
    written = wire.packed_field(4, data)
    assert caffe_pb2.Datum.FromString(written).data == data
    assert written == caffe_pb2.Datum(data=data).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [b"\x80", b"\x0a", b"\x0a\x05ab", b"\x0d\0\0", b"\x08", b"\xff" * 20, b"\x0b", b"\x0a\xff\xff\xff\xff\x0f"],
)
def test_it_ends_where_bytes_make_no_sense(data: bytes) -> None:
    assert list(wire.fields(memoryview(data))) == []
    good = b"\x0a\x01a"
    assert len(list(wire.fields(memoryview(good + data)))) == 1


def test_share_of() -> None:
    net = caffe_pb2.NetParameter(name="n", layer=[{"name": "a"}], debug_info=True)
    data = net.SerializeToString()
    assert wire.share_of(data, caffe_pb2.NetParameter.DESCRIPTOR) == 1
    assert wire.share_of(data, caffe_pb2.SolverState.DESCRIPTOR) == 0
    assert wire.share_of(b"", caffe_pb2.NetParameter.DESCRIPTOR) == 0
    blob = caffe_pb2.BlobProto(num=1, width=7, data=range(100)).SerializeToString()
    assert wire.share_of(blob, caffe_pb2.BlobProto.DESCRIPTOR) == 1
    # A BlobProto's width has the number and kind of a NetParameter's input_dim.
    assert 0 < wire.share_of(blob, caffe_pb2.NetParameter.DESCRIPTOR) < 0.1
