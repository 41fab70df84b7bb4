"""Batches of bytes made of plain records at once are those made record by record."""

import numpy as np
import pytest

from blobmem.data import batches
from blobmem.data.batches import BatchLoader, NotBytes
from blobmem.data.database import Records
from blobmem.data.plain import Placer
from blobmem.data.transform import Transformer, random_array, random_words
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2


def fail(field, expected, got=None):
    return NetError(f"{field}: expected {expected}, got {got}")


def transformer(train=True, **fields):
    return Transformer(caffe_pb2.TransformationParameter(**fields), train, np.float32, fail)


def load(loader, position, count, item):
    data, cuts = np.full((count, *item), 205, np.uint8), np.full((count, 3), -1, np.int32)
    labels = np.full(count, np.nan, np.float32)
    loader.load(position, 3, data, labels, cuts)
    return data, cuts, labels


@pytest.fixture
def one_by_one(monkeypatch):
    """one_by_one(function, ...): its result without runs."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(batches, "Records", type("Nobody", (), {}))
            return function(*arguments)

    return call


CASES = {
    "plain": ((1, 4, 5), {}),
    "crop": ((3, 9, 7), {"crop_size": 4, "mirror": True}),
    "centre": ((3, 9, 7), {"crop_size": 4, "train": False}),
    "mirror": ((2, 3, 3), {"mirror": True, "train": False}),
    "large": ((3, 60, 70), {"crop_size": 33, "mirror": True}),
}


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
def test_runs_are_what_records_are(make, one_by_one, shape, options):
    items = [make.datum(values, label) for label, values in enumerate(make.pictures(50, shape))]
    for number, label in ((3, 300), (4, -7), (5, 2**31 - 1)):
        items[number].label = label
    loader = BatchLoader(make(items), transformer(**options), "x", "here")
    item = loader.shape(0)
    for position, count in ((0, 7), (7, 1), (8, 60), (45, 12), (45, 120), (2, 3)):
        found = load(loader, position, count, item)
        assert all(map(np.array_equal, found, one_by_one(load, loader, position, count, item)))


def test_records_that_are_not_plain_come_in_their_places(make, one_by_one):
    items = list(make.pictures(40, (1, 6, 6)))
    items[4] = make.datum(items[4], 4)
    items[4].encoded = False
    items[9] = make.datum(make.pictures(1, (1, 8, 9))[0], 9)  # larger
    items[14] = make.datum(items[14], 14).SerializeToString()[:-2] + b"\x28\x01\x28\x8d\x01"  # the last label counts
    items[20] = make.datum(items[20], 20).SerializeToString() + b"\x7a\x01x"  # a field that is not known
    loader = BatchLoader(make(items), transformer(crop_size=5, mirror=True), "x", "here")
    for position in (0, 4, 9, 10, 30):
        found = load(loader, position, 25, (1, 5, 5))
        assert all(map(np.array_equal, found, one_by_one(load, loader, position, 25, (1, 5, 5))))
    assert load(loader, 14, 1, (1, 5, 5))[2] == 141


@pytest.mark.parametrize("what", ["cut", "garbage", "shape", "empty"])
def test_damage_is_told_as_ever(make, one_by_one, what):
    items = [make.datum(values, label).SerializeToString() for label, values in enumerate(make.pictures(12))]
    items[5] = {
        "cut": items[5][:-9], "garbage": b"\x08\xff", "empty": b"", "shape": make.datum(make.pictures(1, (1, 2, 2))[0])
        .SerializeToString(),
    }[what]  # fmt: skip
    path = make(items)
    loader = BatchLoader(path, transformer(), "x", "here")
    with pytest.raises(NetError, match="record b'00000005'") as found:
        load(loader, 2, 8, (1, 4, 5))
    with pytest.raises(NetError) as expected:
        one_by_one(load, loader, 2, 8, (1, 4, 5))
    assert str(found.value) == str(expected.value)
    assert load(loader, 6, 6, (1, 4, 5))[2].tolist() == [6, 7, 8, 9, 10, 11]
    if what != "shape":
        skipping = BatchLoader(path, transformer(), "x", "here", skip_damaged=True)
        assert load(skipping, 2, 8, (1, 4, 5))[2].tolist() == [2, 3, 4, 6, 6, 7, 8, 9]


def test_floats_are_not_taken_for_bytes(make):
    items = list(make.pictures(6))
    items[3] = items[3].astype(np.float32)
    loader = BatchLoader(make(items), transformer(), "x", "here")
    assert load(loader, 0, 3, (1, 4, 5))[2].tolist() == [0, 1, 2]
    with pytest.raises(NotBytes):
        load(loader, 0, 6, (1, 4, 5))


def test_whatever_bytes_a_value_has_nothing_is_read_beyond_it():
    rng, made = np.random.default_rng(0), transformer(crop_size=2)
    good = caffe_pb2.Datum(channels=1, height=3, width=4, data=bytes(range(12)), label=5).SerializeToString()
    for _ in range(3000):
        value = bytearray(good[: rng.integers(0, len(good) + 1)])
        for _ in range(rng.integers(0, 4) if value else 0):
            value[rng.integers(len(value))] = rng.choice([0, 1, 0x08, 0x22, 0x28, 0x7F, 0x80, 0xFF])
        data, cuts = np.zeros((1, 1, 2, 2), np.uint8), np.zeros((1, 3), np.int32)
        placer = Placer(made, data, cuts, np.zeros((1, 4), np.uint64))
        raw = np.frombuffer(bytes(value) + b"\xee" * 300, np.uint8)
        placer.place(raw, np.array([[0, len(value)]]))
        assert not (data == 0xEE).any() or 0xEE in value
        if placer.done:  # then it is one for protobuf too
            message = caffe_pb2.Datum.FromString(bytes(value))
            assert len(message.data) == message.channels * message.height * message.width
            window = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width)[:2, :2]
            assert np.array_equal(data[0, 0], window) and placer.labels[0] == message.label


def test_runs_go_round_and_stop_at_damage(make):
    path = make(make.pictures(30))
    reader = Records(path)
    for position in (0, 17, 29, 64):
        count = 0
        for raw, places in reader.runs(position):
            for start, stop in places:
                assert caffe_pb2.Datum.FromString(raw[start:stop].tobytes()).label == (position + count) % 30
                count += 1
            if count > 70:
                break


def test_random_numbers_as_an_array():
    assert [tuple(row) for row in random_array(1, "n", 7, 5).tolist()] == random_words(1, "n", 7, 5)
