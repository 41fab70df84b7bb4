import threading
import time

import pytest

from blobmem.data.convert import Converted, in_order


def test_results_come_in_order_whoever_is_first():
    def slow_at_first(number):
        time.sleep(0.002 * (number % 5 == 0))
        return number, threading.current_thread().name

    found = list(in_order(slow_at_first, range(60)))
    assert [number for number, _ in found] == list(range(60))
    assert all(name.startswith("blobmem-convert") for _, name in found)


def test_an_exception_comes_in_its_turn_and_items_are_not_taken_far_ahead():
    taken = []

    def items():
        for number in range(10_000):
            taken.append(number)
            yield number

    def fail_at_7(number):
        if number == 7:
            raise KeyError(number)
        return number

    results = in_order(fail_at_7, items())
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(KeyError):
        next(results)
    assert len(taken) < 1000


def test_what_was_made_is_measured(tmp_path):
    (tmp_path / "db").mkdir()
    for name in "ab":
        (tmp_path / "db" / name).write_bytes(b"123")
    assert Converted.of(tmp_path / "db", 4) == (tmp_path / "db", 4, 6)
    assert Converted.of(tmp_path / "db" / "a", 1).nbytes == 3
