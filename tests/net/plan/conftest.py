"""Plain second computations, which the plan is held to."""

from bisect import bisect, insort

import pytest

from blobmem.net.plan import arena, levels, rounds, sooner, ways


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


@pytest.fixture(scope="module")
def few_plans():
    """Of the plans that are compared where there is no room for all, which take most of the time, few are made, and
    layouts are looked for less long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "WORK", arena.WORK // 10)
        patch.setattr(arena, "LEAST", arena.LEAST // 10)
        patch.setattr(levels, "LEVELS", levels.LEVELS[1::2])
        patch.setattr(sooner, "PARTS", sooner.PARTS[1::3])
        patch.setattr(sooner, "WORK", sooner.WORK // 30)
        patch.setattr(sooner, "MORE", sooner.MORE // 30)
        patch.setattr(levels, "STAYING", ())
        patch.setattr(rounds, "WALKS", rounds.WALKS // 32)
        patch.setattr(ways, "PRICES", ways.PRICES[-1:])
        patch.setattr(ways, "MADE", 2)
        patch.setattr(ways, "COMPARED", 1)
        yield


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    """Nets of tests are so small that what a copy takes beside its bytes is more than many calls."""
    monkeypatch.setattr("blobmem.net.plan.times.QUEUED", 0.0)
