import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem.data.datum import Misfit, RecordError, parse, unpack, unusable
from blobmem.proto import caffe_pb2


def record(**fields):
    return caffe_pb2.Datum(**fields).SerializeToString()


def test_bytes_and_floats_come_in_the_shape_the_datum_states():
    shape, pixels = unpack(parse(record(channels=2, height=1, width=3, data=bytes(range(250, 256)))))
    assert shape == (2, 1, 3)
    assert pixels().dtype == np.uint8
    assert pixels().tolist() == [[[250, 251, 252]], [[253, 254, 255]]]
    shape, pixels = unpack(parse(record(channels=3, height=1, width=1, float_data=[0.5, -2, 1e6])))
    assert shape == (3, 1, 1)
    assert pixels().dtype == np.float32
    assert pixels().ravel().tolist() == [0.5, -2, 1e6]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"channels": 1, "height": 2, "width": 2, "data": b"123"}, "3 bytes of data, expected 4 for 1 x 2 x 2"),
        ({"channels": 1, "height": 2, "width": 2, "data": b"12345"}, "5 bytes of data, expected 4"),
        ({"channels": 1, "height": 1, "width": 2, "float_data": [1]}, "1 values of float_data, expected 2"),
        ({"channels": 1, "height": 1, "width": 2}, "0 values, expected 2"),
        ({"channels": 1, "height": 0, "width": 2, "data": b""}, "1 x 0 x 2, expected 1 or more"),
        ({"channels": -1, "height": -1, "width": 2, "data": b"12"}, "-1 x -1 x 2, expected 1 or more"),
        ({"data": b"12"}, "0 x 0 x 0"),
        ({"channels": 2**31 - 1, "height": 2**31 - 1, "width": 2**31 - 1, "data": b"12"}, "2 bytes of data"),
    ],
)
def test_values_that_do_not_fit_the_dimensions(fields, said):
    with pytest.raises(RecordError, match=said):
        unpack(parse(record(**fields)))


def test_what_is_no_datum():
    whole = record(channels=1, height=2, width=2, data=b"1234", label=3)
    for cut in (b"\xff\xff\xff", whole[:-3], whole[:7], b"\x22\xff\xff\xff\xff\x0f"):
        with pytest.raises(RecordError, match=f"its {len(cut)} bytes are no Datum"):
            parse(cut)


GOOD = record(channels=2, height=3, width=3, data=bytes(18), label=7, float_data=[1, 2])


@settings(max_examples=300, deadline=None)
@given(st.one_of(
    st.binary(max_size=60),
    st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)).map(
        lambda change: GOOD[: change[0]] + bytes([change[1]]) + GOOD[change[0] + 1 :]
    ),
    st.integers(0, len(GOOD)).map(lambda stop: GOOD[:stop]),
))  # fmt: skip
def test_any_bytes_give_an_array_or_a_record_error(data):
    try:
        shape, pixels = unpack(parse(data))
        assert pixels().shape == shape
    except RecordError as error:
        assert str(error)


def test_the_error_that_stops_a_run_says_how_to_go_on_where_one_can():
    damaged, misfit = RecordError("cut short"), Misfit("too wide")
    assert str(unusable("net", "it is cut short", damaged)).endswith(
        "--skip-damaged (skip_damaged=True) the next one takes its place"
    )
    assert str(unusable("net", "it is too wide", misfit)) == "net: it is too wide"
