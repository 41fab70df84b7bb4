"""Threads of our own: pieces, errors, nesting, several callers, forks, scratch."""

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from blobmem.ops.host import parallel
from blobmem.ops.host.parallel import num_threads, parallel_for, scratch, set_num_threads


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("n, grain", [(1, 1), (7, 1), (100, 1), (100, 30), (100, 1000)])
def test_pieces_cover_the_range_once(threads, count, n, grain):
    threads(count)
    seen, pieces = np.zeros(n, int), []

    def kernel(start, stop, array):
        pieces.append(stop - start)
        array[start:stop] += 1

    parallel_for(kernel, n, seen, grain=grain)
    assert (seen == 1).all()
    assert len(pieces) == 1 or min(pieces) >= grain


def test_nothing_to_do(threads):
    threads(2)
    parallel_for(pytest.fail, 0)


def test_pieces_run_in_several_threads(threads):
    threads(2)
    both = threading.Barrier(2)
    parallel_for(lambda start, stop: both.wait(10) if start in (0, 1) else None, 2)


def test_errors_are_raised_in_the_caller(threads):
    threads(2)
    ran = []

    def kernel(start, stop):
        ran.append(start)
        if start == 3:
            raise ValueError("piece 3")

    with pytest.raises(ValueError, match="piece 3"):
        parallel_for(kernel, 8)
    assert sorted(ran) == list(range(8))


def test_a_kernel_may_itself_run_in_pieces(threads):
    threads(2)
    total = np.zeros(6, int)

    def inner(start, stop, row):
        total[row] += stop - start

    parallel_for(lambda start, stop: [parallel_for(inner, 10, row) for row in range(start, stop)], 6)
    assert (total == 10).all()


def test_two_callers_at_once(threads):
    threads(3)
    results = [np.zeros(1000, int) for _ in range(4)]

    def kernel(start, stop, array):
        array[start:stop] += 1

    def caller(array):
        for _ in range(200):
            parallel_for(kernel, 1000, array)

    callers = [threading.Thread(target=caller, args=(array,)) for array in results]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert all((array == 200).all() for array in results)


def test_idle_threads_keep_no_array_alive(threads):
    threads(3)
    array = np.zeros(100)
    gone = weakref.ref(array)
    parallel_for(lambda start, stop, x: None, 100, array)
    del array
    gc.collect()
    assert gone() is None


def test_read_only_arrays_come_as_writable_ones(threads):
    threads(2)
    x = np.arange(4.0)
    x.flags.writeable = False
    seen = []
    parallel_for(lambda start, stop, x: seen.append((x.flags.writeable, x[start:stop].tolist())), 2, x)
    assert all(writable for writable, _ in seen) and not x.flags.writeable


def test_scratch_is_private_aligned_and_kept(threads):
    threads(2)
    both, places = threading.Barrier(2), []

    def kernel(start, stop, room):
        both.wait(10)
        places.append((room.ctypes.data, room.size, room.dtype))

    parallel_for(kernel, 2, scratch_of=(1000, np.float32))
    assert len({address for address, _, _ in places}) == 2
    assert all(address % 64 == 0 and size >= 1000 and dtype == np.float32 for address, size, dtype in places)
    first = scratch(10, np.uint8)
    assert scratch(5, np.float64).ctypes.data == first.ctypes.data
    assert scratch(first.size + 1, np.uint8).size > first.size


def test_number_of_threads(threads, monkeypatch):
    assert set_num_threads(5) == 5 == num_threads()
    monkeypatch.setenv("BLOBMEM_NUM_THREADS", "3")
    assert set_num_threads(0) == 3
    monkeypatch.delenv("BLOBMEM_NUM_THREADS")
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda pid: {0, 4}, raising=False)
    assert set_num_threads(0) == 2
    with pytest.raises(ValueError, match="-1"):
        set_num_threads(-1)


@pytest.mark.parametrize("text", ["0", "two", "-3", "1.5"])
def test_wrong_number_in_the_environment(threads, monkeypatch, text):
    monkeypatch.setenv("BLOBMEM_NUM_THREADS", text)
    with pytest.raises(ValueError, match="BLOBMEM_NUM_THREADS is .* positive number"):
        set_num_threads(0)


@pytest.mark.skipif(not hasattr(parallel.os, "fork"), reason="no fork here")
def test_works_in_a_forked_child():
    code = """
import os, warnings, numpy as np
from blobmem.ops.host.parallel import parallel_for, set_num_threads
set_num_threads(2)
def kernel(start, stop, x): x[start:stop] += 1
x = np.zeros(100)
parallel_for(kernel, 100, x)
warnings.simplefilter("ignore")
child = os.fork()
parallel_for(kernel, 100, x)
if child == 0:
    os._exit(0 if (x == 2).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and (x == 2).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
