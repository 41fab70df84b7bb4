import mmap
import sys

import numpy as np
import pytest

from blobmem.devices import pages as module
from blobmem.devices.pages import LEAST_RESERVED, PAGE, Pages, can_reserve, default_reservation


def resident(pages):
    """Bytes of the mapping that are in memory, as Linux tells."""
    address = np.ndarray((1,), np.uint8, buffer=pages.buffer).ctypes.data
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(address // PAGE * 8)
        entries = np.frombuffer(table.read(pages.reserved // PAGE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's page table")


def test_zero_at_first_and_writable():
    pages = Pages(1000)
    assert not pages.bytes(0, 1000).any()
    pages.bytes(10, 20)[:] = 7
    assert pages.bytes(0, 1000).sum() == 70
    assert pages.bytes(5, 5).size == 0


def test_reservation_scales_with_size():
    assert default_reservation(1) == LEAST_RESERVED
    assert default_reservation(1 << 30) == 16 << 30
    assert default_reservation(1 << 41) == 1 << 41
    if can_reserve():
        assert Pages(1).reserved == LEAST_RESERVED
        assert Pages(64 << 20).reserved == 1 << 30
    assert Pages(5000, 5000).reserved == -(-5000 // PAGE) * PAGE


@linux
def test_committed_only_when_touched():
    pages = Pages(64 << 20)
    assert resident(pages) == 0
    pages.use(100)
    pages.bytes(0, 100)[:] = 1
    assert 0 < resident(pages) < 2 << 20


@linux
def test_discard_gives_pages_back_and_zeroes_exactly_its_bytes():
    pages = Pages(20 * PAGE)
    pages.bytes(0, 20 * PAGE)[:] = 9
    before = resident(pages)
    pages.discard(PAGE + 100, 10 * PAGE + 50)
    assert before - resident(pages) == 8 * PAGE
    expected = np.full(20 * PAGE, 9, np.uint8)
    expected[PAGE + 100 : 10 * PAGE + 50] = 0
    assert np.array_equal(pages.bytes(0, 20 * PAGE), expected)
    pages.discard(100, 300)
    expected[100:300] = 0
    assert np.array_equal(pages.bytes(0, 20 * PAGE), expected)


def test_discard_zeroes_where_pages_cannot_be_given_back(monkeypatch):
    monkeypatch.setattr(sys, "platform", "elsewhere")
    pages = Pages(4 * PAGE)
    pages.bytes(0, 4 * PAGE)[:] = 9
    pages.discard(10, 3 * PAGE)
    assert not pages.bytes(10, 3 * PAGE).any()
    assert pages.bytes(0, 10).all() and pages.bytes(3 * PAGE, 4 * PAGE).all()


def test_arrays_outlive_the_pages_object():
    pages = Pages(1000)
    array = pages.bytes(0, 1000)
    part = array[10:20]
    del pages, array
    part[:] = 3
    assert part.sum() == 30


def test_exact_size_where_reserving_is_not_free(monkeypatch):
    monkeypatch.setattr(module, "can_reserve", lambda: False)
    assert Pages(PAGE + 1).reserved == 2 * PAGE


def test_smaller_reservation_where_the_system_refuses(monkeypatch):
    asked = []

    def refuse_large(fileno, length, **flags):
        asked.append(length)
        if length > 1 << 20:
            raise OSError(12, "Cannot allocate memory")
        return mmap_(fileno, length, **flags)

    mmap_ = mmap.mmap
    monkeypatch.setattr(module.mmap, "mmap", refuse_large)
    if can_reserve():
        assert 5000 <= Pages(5000).reserved <= 1 << 20
        assert len(asked) > 1
    with pytest.raises(MemoryError, match="no address space for 2097152 more bytes"):
        Pages(2 << 20)


def test_advice_on_page_size_follows_use(monkeypatch):
    """Small reservations are kept from huge pages where these come unasked; large ones in use ask for them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no huge pages here")

    class Recorder:
        def __init__(self):
            self.advice = []

        def madvise(self, advice):
            self.advice.append(advice)

    for habit, expected in (
        ("always", [mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE]),
        ("madvise", [mmap.MADV_HUGEPAGE]),
        ("never", []),
    ):
        monkeypatch.setattr(module, "_huge_pages", lambda habit=habit: habit)
        pages = Pages(100)
        pages.buffer = Recorder()
        for nbytes in (100, 200, 3 << 20, 4 << 20, 8 << 20, 100):
            pages.use(nbytes)
        assert pages.buffer.advice == expected
