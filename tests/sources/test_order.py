import threading

import numpy as np
import pytest

from blobmem.data.order import Orders, permutation


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_every_number_comes_once(count):
    order = permutation(3, "layer/", 5, count)
    assert np.array_equal(np.sort(order), np.arange(count))


def test_seed_name_and_epoch_all_count():
    orders = [permutation(*what, 50).tolist() for what in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1))]
    assert len({tuple(order) for order in orders}) == 4
    assert permutation(1, "a", 0, 50).tolist() == orders[0]


RECORDED = [[5, 6, 7, 3, 1, 0, 4, 2], [1, 2, 0, 7, 6, 4, 3, 5]]


def test_the_order_is_the_same_for_all_time():
    # recorded: data restored from an old snapshot must come in the order in which it would have come
    assert permutation(1, "data/", 0, 8).tolist() == RECORDED[0]
    assert permutation(1, "data/", 1, 8).tolist() == RECORDED[1]


def test_orders_are_uniform():
    firsts = np.bincount([permutation(0, "x", epoch, 4)[0] for epoch in range(2000)], minlength=4)
    assert np.abs(firsts - 500).max() < 100


def test_kept_orders_are_those_made_anew():
    orders = Orders("data")
    wanted = {epoch: permutation(4, "data/", epoch, 30).tolist() for epoch in range(10)}
    for epoch in (0, 1, 0, 5, 9, 3, 2, 1, 0):
        assert orders.order(4, epoch, 30).tolist() == wanted[epoch]
    assert orders.order(4, 0, 30, "rows/1").tolist() == permutation(4, "data/rows/1", 0, 30).tolist() != wanted[0]


def test_threads_get_the_same():
    orders = Orders("data")
    found = []

    def ask():
        found.extend((epoch, tuple(orders.order(1, epoch, 40).tolist())) for epoch in range(12))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 48 and len(set(found)) == 12
