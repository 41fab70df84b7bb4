import io
import logging
import threading
import tracemalloc

import numpy as np
import PIL.Image
import pytest

from blobmem.data.batches import BatchLoader
from blobmem.data.transform import Transformer
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

WHERE = "net.prototxt: layer 'data' (Data), source"


def loader(path, train=True, name="data", skip=False, **fields):
    def fail(field, expected, got=None):
        return NetError(f"{field}: expected {expected}, got {got}")

    made = Transformer(caffe_pb2.TransformationParameter(**fields), train, np.float32, fail)
    return BatchLoader(path, made, name, WHERE, skip_damaged=skip)


def batch(source, position, count=4, seed=1):
    data = np.full((count, *source.shape(position)), np.nan, np.float32)
    labels = np.full(count, np.nan, np.float32)
    source.load(position, seed, data, labels)
    return data, labels


def test_batches_wrap_around(make):
    items = make.pictures(10)
    source = loader(make(items), scale=0.5)
    for position in (0, 4, 8, 12, 3):
        data, labels = batch(source, position)
        wanted = np.arange(position, position + 4) % 10
        assert np.array_equal(labels, wanted)
        assert np.array_equal(data, items[wanted] * np.float32(0.5))


def test_a_batch_larger_than_the_database(make):
    items = make.pictures(3)
    data, labels = batch(loader(make(items)), 2, count=8)
    assert np.array_equal(labels, [2, 0, 1, 2, 0, 1, 2, 0])
    assert np.array_equal(data, items[labels.astype(int)])


def test_items_larger_than_a_block_and_blocks_that_do_not_divide_the_batch(make):
    for shape, count in (((1, 300, 300), 3), ((1, 100, 200), 7)):
        items = make.pictures(count, shape)
        data, _ = batch(loader(make(items, f"db{count}"), mean_value=[3], scale=2), 0, count)
        assert np.array_equal(data, (items - np.float32(3)) * 2)


def test_without_labels(make):
    items = make.pictures(4)
    data = np.empty((4, 1, 4, 5), np.float32)
    loader(make(items)).load(0, 1, data)
    assert np.array_equal(data, items)


def test_random_choices_belong_to_the_position_not_to_the_batch(make):
    source = loader(make(make.pictures(10, (2, 9, 9))), crop_size=4, mirror=True)
    whole, _ = batch(source, 0, 24)
    parts = np.concatenate([batch(source, 0, 5)[0], batch(source, 5, 12)[0], batch(source, 17, 7)[0]])
    assert np.array_equal(whole, parts)
    # the second time round the same records are cropped elsewhere
    assert not np.array_equal(whole[:10], whole[10:20])
    assert not np.array_equal(whole, batch(source, 0, 24, seed=2)[0])
    again = loader(source.path, name="other", crop_size=4, mirror=True)
    assert not np.array_equal(whole, batch(again, 0, 24)[0])


def test_items_of_any_size_where_a_crop_makes_them_equal(make):
    items = [np.arange(6 * (n + 5), dtype=np.uint8).reshape(1, 6, n + 5) for n in range(4)]
    data, _ = batch(loader(make(items), train=False, crop_size=3), 0)
    for n, item in enumerate(items):
        left = (n + 2) // 2
        assert np.array_equal(data[n], item[:, 1:4, left : left + 3])


def test_bytes_and_floats_in_one_database(make):
    floats = np.random.default_rng(0).normal(size=(1, 4, 5)).astype(np.float32)
    picture = make.pictures(1)[0]
    data, labels = batch(loader(make([picture, floats]), mean_value=[1]), 0, 2)
    assert np.array_equal(data, np.stack([picture - np.float32(1), floats - np.float32(1)]))
    assert np.array_equal(labels, [0, 1])


def bad_records(make):
    good = make.datum(make.pictures(1)[0], 5).SerializeToString()
    return {
        "no Datum": good[:-4],
        "are no Datum": b"\xff" * 30,
        "makes an item of 1 x 4 x 4, and the batch has 1 x 4 x 5": make.datum(np.zeros((1, 4, 4), np.uint8)),
        "3 bytes of data, expected 20": caffe_pb2.Datum(channels=1, height=4, width=5, data=b"123"),
        "0 x 0 x 0": b"",
        "no image in JPEG": caffe_pb2.Datum(encoded=True, data=b"GIF89a"),
    }


@pytest.mark.parametrize("case", range(6))
def test_a_bad_record_is_an_error_naming_key_and_database(make, case):
    said, bad = list(bad_records(make).items())[case]
    items = list(make.pictures(5))
    path = make([*items[:3], bad, *items[3:]])
    source = loader(path)
    batch(source, 0, 3)
    for _ in range(2):
        with pytest.raises(NetError, match=said) as raised:
            batch(source, 0, 5)
        assert str(raised.value).startswith("net.prototxt: layer 'data' (Data), source: record b'00000003' of " + path)
    data, _ = batch(source, 4, 2)
    assert np.array_equal(data, items[3:])


def test_one_bad_first_record_shows_in_the_shape_already(make):
    with pytest.raises(NetError, match="record b'00000000'"):
        loader(make([b"\xff\xff"])).shape(0)


def test_a_database_that_cannot_be_opened_says_for_which_layer(tmp_path):
    with pytest.raises(NetError, match=r"net\.prototxt: layer 'data' \(Data\), source: .* is no LMDB database"):
        loader(str(tmp_path))


# ---------------------------------------------------------------- leaving out damaged records


def holed(make, bad, count=10, shape=(1, 4, 5)):
    """Pictures, and a database of them in which those numbers are damaged."""
    items = make.pictures(count, shape)
    return items, make([b"\xff\xff" if n in bad else item for n, item in enumerate(items)])


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    "bad", [{3}, {3, 4, 5}, {0}, {9}, {8, 9, 0, 1}, set(range(9))], ids=lambda bad: str(sorted(bad))
)
def test_the_next_good_record_takes_a_damaged_ones_place(make, bad, caplog):
    items, path = holed(make, bad)
    source = loader(path, skip=True)
    stream = [next(q % 10 for q in range(p, p + 11) if q % 10 not in bad) for p in range(40)]
    for position, count in ((0, 4), (4, 4), (8, 4), (12, 20), (2, 1), (3, 1), (9, 25)):
        data = np.full((count, 1, 4, 5), np.nan, np.float32)
        labels = np.full(count, np.nan, np.float32)
        source.load(position, 1, data, labels)
        assert labels.tolist() == stream[position : position + count]
        assert np.array_equal(data, items[stream[position : position + count]])
    said = warnings(caplog)
    assert len(said) == len(bad)
    assert all(text.startswith(WHERE + ": record b'0000000") and path in text for text in said)
    assert [text.rsplit("(", 1)[1] for text in said] == [f"{n + 1} so far)" for n in range(len(bad))]


def test_replacements_are_cropped_by_the_place_that_they_take(make):
    items, path = holed(make, {3}, 10, (1, 9, 9))
    options = {"crop_size": 4, "mirror": True}
    data, _ = batch(loader(path, skip=True, **options), 0, 10)
    repaired = make([*items[:3], items[4], *items[4:]], "repaired")
    assert np.array_equal(data, batch(loader(repaired, **options), 0, 10)[0])
    assert not np.array_equal(data[3], data[4])


@pytest.mark.parametrize("scale", [1, 0.5])
def test_replacements_in_batches_of_many_blocks(make, scale):
    items, path = holed(make, {2, 3, 5}, 7, (1, 300, 300))
    data, labels = batch(loader(path, skip=True, scale=scale, mean_value=[3]), 0, 7)
    assert labels.tolist() == [0, 1, 4, 4, 4, 6, 6]
    assert np.array_equal(data, (items[labels.astype(int)] - np.float32(3)) * np.float32(scale))


def test_a_database_without_a_good_record_is_an_error(make, caplog):
    source = loader(make([b"\xff", b"\xfe", b"\xfd"]), skip=True)
    for attempt in (lambda: source.shape(1), lambda: batch_of(source, (1, 4, 5))):
        with pytest.raises(NetError, match=r"all 3 records of .* are damaged; the last: its 1 bytes are no Datum"):
            attempt()
    assert len(warnings(caplog)) == 3


def batch_of(source, shape, count=4):
    data = np.empty((count, *shape), np.float32)
    source.load(0, 1, data)
    return data


def test_a_whole_record_that_does_not_fit_is_an_error_all_the_same(make):
    items = list(make.pictures(4))
    items[2] = np.zeros((1, 4, 4), np.uint8)
    with pytest.raises(NetError, match="record b'00000002' .* makes an item of 1 x 4 x 4"):
        batch_of(loader(make(items), skip=True), (1, 4, 5))
    with pytest.raises(NetError, match="record b'00000000' .* too small for crop_size 5"):
        loader(make(items, "b"), skip=True, crop_size=5).shape(0)


@pytest.mark.parametrize("case", [0, 1, 3, 4, 5])
def test_every_kind_of_damage_is_left_out(make, case):
    bad = list(bad_records(make).values())[case]
    items = list(make.pictures(3))
    data, labels = batch(loader(make([items[0], bad, items[2]]), skip=True), 0, 3)
    assert labels.tolist() == [0, 2, 2]
    assert np.array_equal(data, np.stack([items[0], items[2], items[2]]))


def png(values):
    file = io.BytesIO()
    PIL.Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def test_shapes_are_those_of_the_records_that_are_taken(make):
    whole = png(np.random.default_rng(0).integers(0, 256, (30, 40), dtype=np.uint8))
    # its header is good, its pixels are not
    cut = caffe_pb2.Datum(encoded=True, data=whole[:200])
    source = loader(make([np.zeros((1, 4, 5), np.uint8), cut, np.zeros((1, 6, 7), np.uint8)]), skip=True)
    assert [source.shape(position) for position in range(4)] == [(1, 4, 5), (1, 6, 7), (1, 6, 7), (1, 4, 5)]
    data = np.empty((1, 1, 6, 7), np.float32)
    source.load(1, 1, data)


def test_damage_of_the_database_itself_is_an_error_all_the_same(make):
    path = make(list(make.pictures(200)))
    with open(path + "/data.mdb", "r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xff" * 16)
    with pytest.raises(NetError, match=r"^net\.prototxt: layer 'data' \(Data\), source: .* is damaged: page 3"):
        batch_of(loader(path, skip=True), (1, 4, 5), 200)


# ---------------------------------------------------------------- threads


def test_any_number_of_threads_load_at_once(make):
    _, path = holed(make, {17, 18, 60}, 97, (2, 9, 9))
    source = loader(path, skip=True, crop_size=4, mirror=True)
    whole, numbers = batch(source, 0, 300)
    data, labels = np.empty_like(whole), np.empty_like(numbers)
    starts = list(range(0, 300, 5))
    failures = []

    def work():
        try:
            while starts:
                start = starts.pop()
                source.load(start, 1, data[start : start + 5], labels[start : start + 5])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert np.array_equal(data, whole)
    assert np.array_equal(labels, numbers)
    assert 1 <= len(source._readers) <= 5


def test_readers_go_on_where_they_are(make):
    source = loader(make(make.pictures(50)))
    for position in (0, 4, 8):
        batch(source, position)
    with source._reader(12, 4), source._reader(0, 4), source._reader(40, 4):
        pass
    assert sorted(start for start, _ in source._readers) == [4, 16, 44]
    for position, left in ((16, [4, 44]), (8, [20, 44]), (50, [12, 20])):
        with source._reader(position, 4):
            assert sorted(start for start, _ in source._readers) == left


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("encoded", [False, True])
def test_loading_takes_no_new_memory(make, encoded):
    items = list(make.pictures(8, (3, 64, 64)))
    if encoded:
        items = [caffe_pb2.Datum(encoded=True, data=png(item.transpose(1, 2, 0))) for item in items]
    source = loader(make(items), mirror=True, crop_size=60, mean_value=[1, 2, 3])
    data, labels = np.empty((64, 3, 60, 60), np.float32), np.empty(64, np.float32)
    for position in (0, 64):
        source.load(position, 1, data, labels)
    tracemalloc.start()
    try:
        source.load(128, 1, data, labels)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for position in range(192, 192 + 10 * 64, 64):
            source.load(position, 1, data, labels)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 640 records of 12 kB went by; Python's own caches grow a little with Pillow's attribute names
    assert now - before < 2**17
    assert peak - before < 2**18


def test_resident_memory_does_not_grow(make):
    psutil = pytest.importorskip("psutil")
    source = loader(make(make.pictures(20, (3, 100, 100))))
    data = np.empty((20, 3, 100, 100), np.float32)
    source.load(0, 1, data)
    process = psutil.Process()
    before = process.memory_info().rss
    for position in range(0, 4000, 20):
        source.load(position, 1, data)
    # 4000 records of 30 kB went by
    assert process.memory_info().rss - before < 20 * 2**20


def test_nothing_is_logged_by_batches(make, caplog):
    with caplog.at_level(logging.DEBUG):
        batch(loader(make(make.pictures(4))), 0)
    assert not caplog.records
