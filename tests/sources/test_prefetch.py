import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from blobmem.data import prefetch_line
from blobmem.data.prefetch import Prefetcher
from blobmem.data.prefetch_batch import LockableBuffer, specs
from blobmem.errors import NetError

BATCH = 6


def numbers(position, seed, arrays):
    """Items that are their position, and their position times the seed."""
    items = np.arange(position, position + len(arrays[0]))
    arrays[0][...] = items[:, np.newaxis]
    arrays[1][...] = items * seed


class Source:
    """A source that can be slow, fail and be watched."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.bad = set()
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()

    def load(self, position, seed, arrays):
        self.calls.append((position, len(arrays[0]), threading.current_thread().name))
        self.gate.wait(10)
        time.sleep(self.seconds)
        for item in range(position, position + len(arrays[0])):
            if item in self.bad:
                raise NetError(f"item {item} is bad")
        numbers(position, seed, arrays)


def arrays():
    return [np.full((BATCH, 2), np.nan, np.float32), np.full(BATCH, np.nan, np.float64)]


def take(batches, position, seed=3):
    into = arrays()
    batches.take(position, seed, into)
    return into


def check(batches, position, seed=3):
    made = take(batches, position, seed)
    wanted = arrays()
    numbers(position, seed, wanted)
    assert all(np.array_equal(a, b) for a, b in zip(made, wanted, strict=True))


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"blobmem-{name}-")]


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_batches_are_the_same_however_they_are_made(depth, count, seconds):
    source = Source(seconds)
    batches = Prefetcher(source.load, BATCH, depth, threads=count)
    for position in range(0, 40 * BATCH, BATCH):
        check(batches, position)
    assert batches.batches == 40


def test_the_stream_is_made_ahead_by_threads_from_the_second_batch_on():
    source = Source()
    batches = Prefetcher(source.load, BATCH, 4, name="ahead")
    check(batches, 0)
    assert not threads("ahead")
    check(batches, BATCH)
    until(lambda: len(source.calls) == 3)
    assert [call[0] for call in source.calls] == [0, BATCH, 2 * BATCH]
    assert [call[2].startswith("blobmem-ahead-") for call in source.calls] == [False, False, True]


def test_a_taker_in_no_hurry_needs_one_buffer_and_one_thread():
    source = Source()
    batches = Prefetcher(source.load, BATCH, 4, threads=4, name="calm")
    for position in range(0, 10 * BATCH, BATCH):
        check(batches, position)
        if position:
            until(lambda ahead=position + BATCH: source.calls[-1][0] == ahead and not batches._line._running)
    assert len(threads("calm")) == 1
    assert batches.nbytes == 64 + 64  # 48 bytes each, aligned


def test_a_taker_who_waits_gets_buffers_and_threads_up_to_the_limits():
    source = Source(0.003)
    batches = Prefetcher(source.load, BATCH, 3, threads=2, name="hurry")
    for position in range(0, 30 * BATCH, BATCH):
        check(batches, position)
    assert len(threads("hurry")) == 2
    assert 2 * 128 <= batches.nbytes <= 3 * 128
    assert {call[1] for call in source.calls} == {BATCH, BATCH // 2}
    waited = batches.waited
    assert 0.003 < waited < 30 * 0.1


def test_buffers_stay_within_their_bytes(monkeypatch):
    monkeypatch.setattr(prefetch_line, "MOST_BYTES", 250)
    source = Source(0.002)
    batches = Prefetcher(source.load, BATCH, 100, threads=3)
    for position in range(0, 30 * BATCH, BATCH):
        check(batches, position)
        assert batches.nbytes <= 256


def test_an_indivisible_source_gets_whole_batches():
    source = Source(0.002)
    batches = Prefetcher(source.load, BATCH, 4, divisible=False, threads=3)
    for position in range(0, 20 * BATCH, BATCH):
        check(batches, position)
    assert {call[1] for call in source.calls} == {BATCH}


def test_another_position_seed_or_shape_starts_anew():
    batches = Prefetcher(numbers, BATCH, 4, threads=2)
    for position in (0, 6, 12, 18, 100, 106, 112, 0, 6, 12, 6, 12, 18):
        check(batches, position)
    for position, seed in ((24, 4), (30, 4), (36, 4), (42, 5), (48, 4)):
        check(batches, position, seed)
    for position in (54, 60, 66):
        check(batches, position, 4)
    other = [np.zeros((BATCH, 3), np.float64), np.zeros(BATCH, np.float32)]
    for position in (72, 78, 84):
        batches.take(position, 4, other)
        assert other[0].tolist() == [[n] * 3 for n in range(position, position + BATCH)]


def test_the_same_batch_twice_in_succession():
    batches = Prefetcher(numbers, BATCH, 4)
    for position in (0, 6, 12, 12, 12, 18, 24, 24, 30):
        check(batches, position)


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("bad", [20, 23])
def test_an_error_comes_with_its_batch_and_again_with_the_next_try(depth, bad):
    source = Source(0.001)
    batches = Prefetcher(source.load, BATCH, depth, threads=3)
    source.bad = {bad, 23}
    for position in (0, 6, 12):
        check(batches, position)
    for _ in range(3):
        # the earliest bad item, whichever thread was first
        with pytest.raises(NetError, match=f"^item {bad} is bad$"):
            take(batches, 18)
    assert batches.batches == 3
    source.bad = set()
    for position in (18, 24, 30):
        check(batches, position)


def test_the_earliest_of_several_errors_is_told():
    source, position = Source(), 0
    batches = Prefetcher(source.load, BATCH, 4, threads=3)
    source.seconds = 0.003
    deadline = time.monotonic() + 10
    while len(batches._line._threads) < 3:  # which come as batches are waited for
        assert time.monotonic() < deadline
        check(batches, position)
        position += BATCH
    last = position + 23 * BATCH
    source.bad = set(range(last + 2, last + 102))
    for each in range(position, last, BATCH):
        check(batches, each)
    with pytest.raises(NetError, match=f"item {last + 2} is bad"):
        take(batches, last)


def test_an_interrupted_taker_finds_its_batch_again():
    source = Source()
    batches = Prefetcher(source.load, BATCH, 2)
    for position in (0, 6, 12):
        check(batches, position)

    class Interrupting(np.ndarray):
        def __array_function__(self, *args):
            raise KeyboardInterrupt

    into = [array.view(Interrupting) for array in arrays()]
    with pytest.raises(KeyboardInterrupt):
        batches.take(18, 3, into)
    for position in (18, 24, 30):
        check(batches, position)


# ---------------------------------------------------------------- batches of varying shape


def ragged(position, seed, arrays):
    arrays[0][...] = position + seed


def ragged_shapes(position, seed):
    if position == 13:
        raise NetError("item 13 has no shape")
    return [(1, 1 + position * 7 % 5)]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_batches_of_any_shape(depth, seconds):
    def load(position, seed, arrays):
        time.sleep(seconds)
        ragged(position, seed, arrays)

    batches = Prefetcher(load, 1, depth, shapes=ragged_shapes, threads=2)
    for position in [*range(13), *range(5, 13), *range(14, 30)]:
        for _ in range(2):
            shapes = batches.next_shapes(position, 1)
            assert list(shapes) == ragged_shapes(position, 1)
        into = [np.empty(shape, np.float32) for shape in shapes]
        batches.take(position, 1, into)
        assert into[0].tolist() == [[position + 1] * shapes[0][1]]
    assert batches.batches == 37


def test_a_taker_of_varying_batches_who_waits_gets_buffers_and_threads():
    def load(position, seed, arrays):
        time.sleep(0.002)
        ragged(position, seed, arrays)

    batches = Prefetcher(load, 1, 3, shapes=lambda position, seed: [(1, 4)], threads=2, name="ragged")
    for position in range(30):
        batches.next_shapes(position, 1)
        batches.take(position, 1, [np.empty((1, 4))])
    assert len(threads("ragged")) == 2
    assert batches.nbytes >= 2 * 64


@pytest.mark.parametrize("depth", [0, 3])
def test_a_batch_without_a_shape_is_an_error_when_it_is_its_turn(depth):
    batches = Prefetcher(ragged, 1, depth, shapes=ragged_shapes)
    for position in range(9, 13):
        batches.take(position, 0, [np.empty(shape, np.float32) for shape in batches.next_shapes(position, 0)])
    for _ in range(2):
        with pytest.raises(NetError, match="item 13 has no shape"):
            batches.next_shapes(13, 0)
    assert list(batches.next_shapes(14, 0)) == [(1, 4)]


# ---------------------------------------------------------------- threads and processes


def test_threads_end_with_the_prefetcher():
    source = Source()
    batches = Prefetcher(source.load, BATCH, 4, name="ending")
    for position in range(0, 5 * BATCH, BATCH):
        check(batches, position)
    ending = threads("ending")
    assert ending
    del batches
    for thread in ending:
        thread.join(10)
        assert not thread.is_alive()


def test_a_source_does_not_live_for_its_threads_sake():
    class Owner:
        def __init__(self):
            self.batches = Prefetcher(self.load, BATCH, 4, name="owner")

        def load(self, position, seed, arrays):
            if position >= 18:
                raise NetError("bad")
            numbers(position, seed, arrays)

    owner = Owner()
    for position in (0, 6, 12):
        check(owner.batches, position)
    line = owner.batches._line
    until(lambda: line._queue[0].error is not None)
    (thread,) = threads("owner")
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None  # neither the threads nor the error that waits keep it
    finally:
        gc.enable()
    thread.join(10)
    assert not thread.is_alive()


def test_a_source_that_dies_while_a_thread_loads():
    source = Source()
    gate, calls = source.gate, source.calls
    batches = Prefetcher(source.load, BATCH, 4, name="dying")
    check(batches, 0)
    check(batches, 6)
    until(lambda: len(calls) == 3)
    gate.clear()
    check(batches, 12)
    until(lambda: len(calls) == 4)
    (thread,) = threads("dying")
    gone = weakref.ref(source)
    del batches, source
    assert gone() is not None  # the thread is in the midst of its method
    gate.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_system_that_gives_no_thread_leaves_the_work_to_the_taker(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = Source()
    batches = Prefetcher(source.load, BATCH, 4)
    for position in range(0, 5 * BATCH, BATCH):
        check(batches, position)
    assert {call[2] for call in source.calls} == {threading.current_thread().name}


PROCESS = """
import atexit, os, sys, threading, time

def late():
    if "late" in sys.argv:
        for position in range(8, 80, 4):
            check(position)
        print("all taken")

atexit.register(late)  # before blobmem's own, and so run after it

import numpy as np
from blobmem.data.prefetch import Prefetcher

gate = threading.Event()
def load(position, seed, arrays):
    if threading.current_thread() is not threading.main_thread():
        gate.wait()
    arrays[0][...] = np.arange(position, position + len(arrays[0]))

batches = Prefetcher(load, 4, 4, name="x")
def check(position):
    into = np.empty(4)
    batches.take(position, 0, [into])
    assert into.tolist() == [position, position + 1, position + 2, position + 3]

check(0)
check(4)
"""

FORK = """
time.sleep(0.05)
child = os.fork()  # while the thread is at work
gate.set()
for position in range(8, 80, 4):
    check(position)
assert any(thread.name.startswith("blobmem-x") for thread in threading.enumerate())
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run(code, *arguments):
    # forking where threads are is what is tested here
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROCESS + code, *arguments]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_parent_and_forked_child_go_on():
    run(FORK)


def test_a_thread_that_never_ends_does_not_keep_the_process():
    start = time.monotonic()
    run("")
    assert time.monotonic() - start < 30


def test_batches_taken_when_the_threads_have_ended_with_the_process():
    assert run("gate.set()", "late") == "all taken\n"


# ---------------------------------------------------------------- lending


class Copy:
    """An event that is done when somebody says so, or waits for it."""

    def __init__(self):
        self.done, self.waited = False, 0

    def synchronize(self):
        self.done = True
        self.waited += 1


def lend(batches, position, seed=3):
    """The batch at `position`, checked."""
    wanted = arrays()
    numbers(position, seed, wanted)
    batch = batches.lend(position, seed, specs(wanted))
    assert all(np.array_equal(a, b) for a, b in zip(batch.arrays, wanted, strict=True))
    return batch


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_lent_batches_are_the_same(depth):
    batches = Prefetcher(numbers, BATCH, depth, threads=2)
    for position in (*range(0, 20 * BATCH, BATCH), 7, 13, 19):
        batch = lend(batches, position)
        assert isinstance(batch.buffer, LockableBuffer)
        batches.take_back(batch, Copy())
    assert batches.batches == 23


@pytest.mark.parametrize("depth", [0, 4])
def test_a_lent_buffer_comes_back_when_its_event_is_done_and_at_most_two_are_out(depth):
    batches = Prefetcher(numbers, BATCH, depth, threads=1)
    copies, buffers = [], []
    for number in range(12):
        batch = lend(batches, number * BATCH)
        assert all(copy.done for copy, buffer in zip(copies, buffers, strict=True) if buffer is batch.buffer)
        copies.append(Copy())
        buffers.append(batch.buffer)
        batches.take_back(batch, copies[-1])
        if number == 8:
            copies[-1].done = copies[-2].done = True
    # nobody waits before two others are out
    assert [copy.done for copy in copies[-3:]] == [True, False, False]
    assert len(set(map(id, buffers))) <= 2 + max(depth, 1)
    assert batches.nbytes <= (2 + max(depth, 1)) * 128


def test_lent_buffers_count_among_the_bytes(monkeypatch):
    monkeypatch.setattr(prefetch_line, "MOST_BYTES", 4 * 96)
    source = Source(0.002)
    batches = Prefetcher(source.load, BATCH, 100, threads=3)
    for position in range(0, 40 * BATCH, BATCH):
        batches.take_back(lend(batches, position), Copy())
        assert batches.nbytes <= 4 * 128


@pytest.mark.parametrize("depth", [0, 3])
def test_a_batch_that_fails_is_not_lent_and_can_be_passed_over(depth):
    source = Source()
    source.bad = {3 * BATCH + 1}
    batches = Prefetcher(source.load, BATCH, depth, threads=2)
    for position in range(0, 3 * BATCH, BATCH):
        batches.take_back(lend(batches, position), Copy())
    for _ in range(3):
        with pytest.raises(NetError, match="item 19 is bad"):
            lend(batches, 3 * BATCH)
    batches.pass_over(3 * BATCH, 3, specs(arrays()))
    batches.take_back(lend(batches, 4 * BATCH), Copy())
    assert batches.batches == 5


def test_a_source_that_lends_can_be_taken_from_and_the_other_way_round():
    batches = Prefetcher(numbers, BATCH, 3, threads=2)
    for position in range(0, 20 * BATCH, BATCH):
        if position // BATCH % 7 < 3:
            check(batches, position)
        else:
            batches.take_back(lend(batches, position), Copy())


class LockingDevice:
    def __init__(self):
        self.locked = 0

    def pin(self, address, nbytes):
        self.locked += 1
        return True

    def unpin(self, address):
        pass

    def when_idle(self, call):
        call()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_all_buffers_are_locked_before_the_first_batch_is_lent(depth):
    device, wanted = LockingDevice(), specs(arrays())
    source = Source(0.001)
    batches = Prefetcher(source.load, BATCH, depth, threads=2)
    batches.lock(device, wanted)
    locked, buffers = device.locked, set()
    assert locked == max(depth, 1) + 2
    for position in range(0, 30 * BATCH, BATCH):
        batches.lock(device, wanted)
        batch = lend(batches, position)
        batch.buffer.lock(device)
        buffers.add(batch.buffer)
        batches.take_back(batch, Copy())
    assert device.locked == locked and 2 <= len(buffers) <= locked


def test_buffers_that_can_be_locked_grow_in_place_and_are_locked_as_a_whole():
    class Device:
        calls = []  # noqa: RUF012

        def pin(self, address, nbytes):
            self.calls.append((address, nbytes))
            return True

        def unpin(self, address):
            self.calls.append((address, 0))

        def when_idle(self, call):
            call()

    buffer, device = LockableBuffer(), Device()
    (small,) = buffer.arrays([((1000,), np.dtype(np.uint8))])
    buffer.lock(device)
    buffer.lock(device)
    (large,) = buffer.arrays([((300000,), np.dtype(np.uint8))])
    assert large.ctypes.data == small.ctypes.data
    buffer.lock(device)
    address = small.ctypes.data
    page = os.sysconf("SC_PAGESIZE")
    assert device.calls == [(address, page), (address, 0), (address, -(-300000 // page) * page)]
    del small, large, buffer
    gc.collect()
    assert device.calls[3:] == [(address, 0)]
