import logging
import threading

import numpy as np
import pytest

from blobmem import TRAIN, Net, NetError
from blobmem.data.source import Batched, Damaged
from blobmem.layers.base import register_layer
from blobmem.proto.text import read_net


@register_layer
class CountedItems(Batched):
    """Items that are their position; a batch of 1 is as long as that."""

    type = "CountedItems"

    def setup(self, bottom, top):
        batch = self.param.data_param.batch_size
        self.start(batch, [(batch, 2)], position=5, varies=batch == 1)

    def shapes(self, position, seed):
        return [(1, position)]

    def load(self, position, seed, arrays):
        arrays[0][...] = np.arange(position, position + len(arrays[0]))[:, np.newaxis]


def net(batch=3):
    text = f'layer {{ name: "items" type: "CountedItems" top: "data" data_param {{ batch_size: {batch} }} }}'
    return Net(read_net(text), TRAIN, seed=1)


def test_a_source_says_its_shapes_and_makes_its_items():
    made = net()
    assert made.blobs["data"].shape == (3, 2)
    for first in range(5, 50, 3):
        assert made.forward()["data"].tolist() == [[n, n] for n in range(first, first + 3)]
    layer = made.layers[0]
    assert layer.state_dict() == {"position": 50}
    layer.load_state_dict({"position": 8})
    assert made.forward()["data"][0].tolist() == [8, 8]


def test_batches_of_one_may_vary():
    made = net(1)
    for n in range(5, 20):
        made.prepare()
        assert made.blobs["data"].shape == (1, n)
        assert made.forward()["data"].tolist() == [[n] * n]


def test_a_batch_of_none():
    with pytest.raises(NetError, match=r"layer 'items' \(CountedItems\), batch_size: expected 1 or more, got 0"):
        net(0)


def test_damage_is_told_once_for_each_item_with_its_number(caplog):
    damaged = Damaged("net.prototxt: layer 'x' (Data), source")
    for key in (b"b", b"a", b"b", b"a", b"c"):
        damaged.skip(key, f"record {key!r} is torn")
    assert len(damaged) == 3
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"net.prototxt: layer 'x' (Data), source: record {key!r} is torn; it is skipped ({n} so far)")
        for n, key in enumerate((b"b", b"a", b"c"), 1)
    ]


def test_threads_tell_of_damage_once(caplog):
    damaged = Damaged("here")
    threads = [threading.Thread(target=lambda: [damaged.skip(n, f"item {n}") for n in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({record.getMessage().split(";")[0] for record in caplog.records}) == len(caplog.records) == 50
