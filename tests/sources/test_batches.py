import logging
import tracemalloc

import numpy as np
import pytest

from blobmem.data.batches import BatchLoader
from blobmem.data.transform import Transformer
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2


def loader(path, train=True, name="data", **fields):
    def fail(field, expected, got=None):
        return NetError(f"{field}: expected {expected}, got {got}")

    made = Transformer(caffe_pb2.TransformationParameter(**fields), train, np.float32, fail)
    return BatchLoader(path, made, name, "net.prototxt: layer 'data' (Data), source")


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
    again = loader(source._records.path, name="other", crop_size=4, mirror=True)
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
        "is no image|no image in JPEG|Pillow": caffe_pb2.Datum(encoded=True, data=b"GIF89a"),
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


@pytest.mark.parametrize("encoded", [False, True])
def test_loading_takes_no_new_memory(make, encoded):
    items = list(make.pictures(8, (3, 64, 64)))
    if encoded:
        image = pytest.importorskip("PIL.Image")
        import io

        for n, item in enumerate(items):
            file = io.BytesIO()
            image.fromarray(item.transpose(1, 2, 0)).save(file, "PNG")
            items[n] = caffe_pb2.Datum(encoded=True, data=file.getvalue())
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
