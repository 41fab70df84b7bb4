"""Batches of bytes made of plain records at once are those made record by record."""

import struct

import numpy as np
import pytest

from blobmem.data import batches
from blobmem.data.batches import BatchLoader, NotBytes
from blobmem.data.database import Records
from blobmem.data.plain import Placer
from blobmem.data.transform import Transformer, random_array, random_words
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2


def leaves(numbers):
    return np.array(numbers, np.int64)


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


def leaf(number, values, size=4096, keys=None):
    """A leaf page of records."""
    page, offsets = bytearray(size), []
    end = size
    for index, value in enumerate(values):
        key = b"%04d" % index if keys is None else keys[index]
        end -= 8 + len(key) + len(value)
        struct.pack_into("<HHHH", page, end, len(value) & 0xFFFF, len(value) >> 16, 0, len(key))
        page[end + 8 : end + 8 + len(key) + len(value)] = key + value
        offsets.append(end)
    struct.pack_into("<QHHHH", page, 0, number, 0, 2, 16 + 2 * len(values), end)
    struct.pack_into(f"<{len(values)}H", page, 16, *offsets)
    return bytes(page)


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
        page = leaf(7, [bytes(value)], size=256)  # the value at its end
        taken = placer.place_leaves(page + b"\xee" * 300, 256, 7, leaves([7]), 0, 1).taken
        assert taken == placer.done
        assert not (data == 0xEE).any() or 0xEE in value
        if placer.done:  # then it is one for protobuf too
            message = caffe_pb2.Datum.FromString(bytes(value))
            assert len(message.data) == message.channels * message.height * message.width
            window = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width)[:2, :2]
            assert np.array_equal(data[0, 0], window) and placer.labels[0] == message.label


def placer_of(count, shape=(1, 4, 5)):
    data, cuts = np.zeros((count, *shape), np.uint8), np.zeros((count, 3), np.int32)
    return Placer(transformer(), data, cuts, np.zeros((0, 4), np.uint64))


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 40, 50)], ids=["in leaves", "in pages of their own"])
def test_values_go_round_and_stop_where_a_batch_is_full(make, shape):
    reader = Records(make(make.pictures(30, shape)))
    for position, count in ((0, 7), (7, 70), (29, 1), (64, 35), (12, 3)):
        placer = placer_of(count, shape)
        reader.place(position, placer)
        assert placer.labels.tolist() == [(position + n) % 30 for n in range(count)]
        # and reading goes on from there
        assert next(reader.items(position + count))[0] == b"%08d" % ((position + count) % 30)


def test_leaves_are_taken_many_at_once(make, monkeypatch):
    """5 records of 800 bytes in a page: 128 in 26 pages, which a batch takes in a few calls."""
    reader, calls = Records(make(make.pictures(400, (1, 28, 28)))), []
    sweep = Placer.place_leaves
    monkeypatch.setattr(Placer, "place_leaves", lambda self, *args: calls.append(sweep(self, *args)) or calls[-1])
    for position in range(0, 1024, 128):
        placer = placer_of(128, (1, 28, 28))
        reader.place(position, placer)
        assert placer.labels.tolist() == [(position + n) % 400 for n in range(128)]
    assert len(calls) < 40 and sum(swept.taken for swept in calls) == 1024


def test_any_position_after_any_other(make):
    reader, rng = Records(make(make.pictures(700, (1, 20, 20)))), np.random.default_rng(0)
    for position in rng.integers(0, 1400, 60).tolist():
        placer = placer_of(3, (1, 20, 20))
        reader.place(position, placer)
        assert placer.labels.tolist() == [(position + n) % 700 for n in range(3)]


def good_leaf(make, number, count=4, first=0):
    items = make.pictures(count, seed=number)
    return leaf(number, [make.datum(values, first + n).SerializeToString() for n, values in enumerate(items)])


def test_a_walk_over_leaves_in_any_order(make):
    block = b"".join(good_leaf(make, number, 4, 10 * number) for number in (5, 6, 7, 8))
    placer = placer_of(10)
    assert placer.place_leaves(block, 4096, 5, leaves([7, 5, 8, 6]), 1, 16) == (10, 2, 8)
    assert placer.labels.tolist() == [71, 72, 73, 50, 51, 52, 53, 80, 81, 82]
    assert placer.place_leaves(block, 4096, 5, leaves([6]), 0, 16) == (0, 0, 0)
    assert placer_of(10).place_leaves(block, 4096, 5, leaves([7, 4, 5]), 0, 16) == (4, 0, 0)
    assert placer_of(10).place_leaves(block, 4096, 5, leaves([7, 9, 5]), 0, 16) == (4, 0, 0)
    assert placer_of(10).place_leaves(block[:-1], 4096, 5, leaves([7, 8]), 0, 16) == (4, 0, 0)
    assert placer_of(10).place_leaves(block, 4096, 5, leaves([7, 2**48 - 1]), 0, 16) == (4, 0, 0)
    # more records than the database has
    assert placer_of(10).place_leaves(block, 4096, 5, leaves([7, 5, 8]), 0, 11) == (8, 1, 4)


def test_leaves_that_are_skipped(make):
    block = b"".join(good_leaf(make, number) for number in (5, 6, 7))
    for most, expected in ((0, (0, 0)), (3, (0, 0)), (4, (1, 0)), (11, (2, 4)), (12, (3, 8)), (99, (3, 8))):
        assert Placer.skip_leaves(block, 4096, 5, leaves([6, 5, 7, 8]), most) == expected
    wrong = block[:4096] + bytes(4096) + block[8192:]
    assert Placer.skip_leaves(wrong, 4096, 5, leaves([5, 6, 7]), 99) == (1, 0)
    assert (
        Placer.skip_leaves(wrong, 4096, 5, leaves([]), 99)
        == Placer.skip_leaves(b"", 4096, 5, leaves([5]), 99)
        == (0, 0)
    )


DAMAGES = {
    "another page": (0, "<Q", 66, 0),
    "a number beyond all": (0, "<Q", 2**64 - 1, 0),
    "a branch": (10, "<H", 1, 0),
    "two kinds": (10, "<H", 6, 0),
    "lower below the header": (12, "<H", 14, 0),
    "lower odd": (12, "<H", 21, 0),
    "lower beyond upper": (14, "<H", 16, 0),
    "upper beyond the page": (14, "<H", 4098, 0),
    "no records": (12, "<H", 16, 0),
    "a node beyond the end": (20, "<H", 4089, 2),
    "a long key": (None, "<H", 512, 2, 6),
    "a value beyond the end": (None, "<H", 4096, 2, 0),
    "a large value beyond the end": (None, "<H", 0xFFFF, 2, 2),
    "a value elsewhere": (None, "<H", 1, 2, 4),
    "duplicates": (None, "<H", 4, 2, 4),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_nothing_is_taken_from_where_a_page_is_wrong(make, damage):
    """Its third record, or all of it; the leaf before it is taken as a whole."""
    at, kind, value, left, *field = damage
    pages = [bytearray(good_leaf(make, number)) for number in (5, 6, 7)]
    if at is None:
        at = struct.unpack_from("<H", pages[1], 16 + 2 * 2)[0] + field[0]
    struct.pack_into(kind, pages[1], at, value)
    block = b"".join(map(bytes, pages))
    placer = placer_of(12)
    assert placer.place_leaves(block, 4096, 5, leaves([5, 6, 7]), 0, 12) == (4 + left, int(left > 0), 4 if left else 0)
    assert placer_of(12).place_leaves(block, 4096, 5, leaves([6, 7]), 0, 12).taken == left


def test_whatever_bytes_a_page_has_nothing_beyond_it_is_read(make):
    """Bytes of the pages beside it are 0xEE, those of records are not."""
    rng, count = np.random.default_rng(0), 0
    values = [make.datum(np.minimum(picture, 200), n).SerializeToString() for n, picture in enumerate(make.pictures(4))]
    page = leaf(1, values, size=256)
    for _ in range(4000):
        damaged = bytearray(page)
        for _ in range(rng.integers(1, 4)):
            place = int(rng.choice([*range(8, 24), *range(256 - 4 * 42, 256)]))
            damaged[place] = rng.choice([0, 1, 2, 4, 16, 127, 128, 200])
        placer = placer_of(6)
        swept = placer.place_leaves(b"\xee" * 256 + bytes(damaged) + b"\xee" * 256, 256, 0, leaves([1]), 0, 4)
        assert 0 <= swept.taken == placer.done <= 4
        assert not (placer._batch[0] == 0xEE).any()
        count += swept.taken
    assert 4000 < count < 12000


def test_random_numbers_as_an_array():
    assert [tuple(row) for row in random_array(1, "n", 7, 5).tolist()] == random_words(1, "n", 7, 5)
