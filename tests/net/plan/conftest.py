"""Plain second computations, which the plan is held to."""

from bisect import bisect, insort

import pytest


def _largest_load(lifetimes):
    """The largest sum of bytes that live at one moment, moment by moment."""
    begin, end = {}, {}
    for life in lifetimes:
        begin[life.first] = begin.get(life.first, 0) + life.nbytes
        end[life.last] = end.get(life.last, 0) + life.nbytes
    held = largest = 0
    for moment in sorted({*begin, *end}):
        held += begin.get(moment, 0)
        largest = max(largest, held)
        held -= end.get(moment, 0)
    return largest


def _check(lifetimes, plan, alignment=512):
    """Offsets are aligned, within the arena, and no two arrays that live at one moment overlap."""
    assert len(plan.offsets) == len(lifetimes)
    assert all(offset >= 0 and offset % alignment == 0 for offset in plan.offsets)
    placed = [(*life, offset) for life, offset in zip(lifetimes, plan.offsets, strict=True) if life.nbytes]
    assert max((offset + nbytes for _, nbytes, *_, offset in placed), default=0) == plan.nbytes
    events = [(first, 1, offset, offset + nbytes) for _, nbytes, first, _, offset in placed]
    events += [(last + 1, 0, offset, offset + nbytes) for _, nbytes, _, last, offset in placed]
    alive = []
    for _, begins, start, stop in sorted(events):
        if begins:
            at = bisect(alive, (start, stop))
            assert at == 0 or alive[at - 1][1] <= start
            assert at == len(alive) or stop <= alive[at][0]
            insort(alive, (start, stop))
        else:
            alive.remove((start, stop))
    assert not alive and plan.nbytes >= _largest_load(lifetimes)


@pytest.fixture(scope="session")
def largest_load():
    return _largest_load


@pytest.fixture(scope="session")
def check():
    return _check


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    """Nets of tests are so small that what a copy takes beside its bytes is more than many calls."""
    monkeypatch.setattr("blobmem.net.plan.times.QUEUED", 0.0)
