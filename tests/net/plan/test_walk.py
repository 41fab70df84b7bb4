"""Walks through a pass: what they know of when arrays are needed next."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem.net.plan.rounds import behind_each_other
from blobmem.net.plan.walk import NONE, Tables, change, waits


@st.composite
def chains(draw):
    """Calls, each of which makes an array of some of those before it: as they were found, as others that have the same
    numbers, or only by the call that made them; the steps that read each; and which are gone, or there again, after
    which of these steps."""
    count = draw(st.integers(1, 8))
    flags, steps = st.booleans(), st.lists(st.integers(0, 9), max_size=3, unique=True).map(sorted)
    takes = [
        [
            (maker, maker, draw(flags), draw(st.integers(-1, maker - 1)), draw(flags))
            for maker in draw(st.lists(st.integers(0, at - 1), max_size=3))
        ]
        if at
        else []
        for at in range(count)
    ]
    return takes, [draw(steps) for _ in takes], draw(st.lists(st.integers(0, count - 1), max_size=12))


def needed_next(takes, gone, reads):
    """When each array is needed next, by steps, or to make of it what is gone."""
    wanted = [min(map(float, own), default=math.inf) for own in reads]

    def visit(call, when):
        for source, maker, stays, same, own in takes[call]:
            there = same >= 0 and not gone[same]
            if own:
                source = same if gone[source] and there else source
                wanted[source] = min(wanted[source], when)
            elif not stays and there:
                wanted[same] = min(wanted[same], when)
            elif not stays:
                visit(maker, when)

    before = None
    while before != wanted:
        before = [*wanted]
        for call, when in enumerate(before):
            if gone[call] and when < math.inf:
                visit(call, when)
    return wanted


@given(chains())
@settings(deadline=None)
def test_the_next_use_of_an_array_is_that_of_what_is_gone_and_made_of_it_too(drawn):
    takes, reads, changes = drawn
    count, rows = len(takes), behind_each_other
    take, take_of = rows(takes, 5)
    nodes = [({source, same, count + maker} - {-1}) for source, maker, _, same, _ in take.tolist()]
    use = rows([at for at, own in enumerate(nodes) if node in own] for node in range(2 * count))
    own, none = rows([at] for at in range(count)), np.zeros(0, np.int64)
    tables = Tables(
        0, np.arange(11.0), none, none, none, none, none, none, none, none, *rows(reads), none, np.zeros(0),
        np.arange(count), np.zeros(0, bool), *own, take, take_of, none.reshape(0, 3), none, *use,
        np.repeat(np.arange(count), np.diff(take_of)), np.zeros(0, bool), none, np.zeros(0), none, np.zeros(0, bool), count,
    )  # fmt: skip
    gone, uses = np.zeros(count, bool), np.array(needed_next(takes, [False] * count, reads))
    wanted = np.array([source if own else NONE if stays else count + maker if same < 0 else same
                       for source, maker, stays, same, own in take.tolist()], np.int64)  # fmt: skip
    wants, waiting = np.full(count, np.inf), np.zeros(4 * len(take) + 2 * count, np.int64)
    for memory in changes:
        change(tables, gone, tables.read_of[:-1].copy(), uses, wants, wanted, waiting, memory)
        assert uses.tolist() == needed_next(takes, gone, reads)


@st.composite
def copies(draw):
    """Copies, by the event that wants each; how long events take; bytes in use in each; and the first of backward."""
    ms = draw(st.lists(st.integers(0, 8), min_size=1, max_size=12))
    load = draw(st.lists(st.integers(0, 20), min_size=len(ms), max_size=len(ms)))
    turn = draw(st.integers(0, len(ms) - 1))
    events = sorted(draw(st.lists(st.integers(turn, len(ms) - 1), max_size=6)))
    sizes = draw(st.lists(st.integers(1, 10), min_size=len(events), max_size=len(events)))
    return events, sizes, np.cumsum([0, *ms])[:-1], load, turn


def waited(events, sizes, begin, load, turn, room):
    array, load = partial(np.array, dtype=np.int64), np.array(load, np.int64)
    found = waits(array(events), array(sizes), np.array(sizes, float), np.array(begin, float), load, room, turn)
    return found, load


@given(copies())
@settings(deadline=None)
def test_copies_are_waited_for_where_they_lack_room_or_time(drawn):
    """Of so many ms as bytes."""
    events, sizes, begin, load, turn = drawn
    ample, _ = waited(*drawn, 1 << 30)
    end = most = 0  # with room for all from the beginning of backward on they run one after the other
    for event, size in zip(events, sizes, strict=True):
        end = max(end, begin[turn]) + size
        most = max(most, end - begin[event])
    assert ample == pytest.approx(most)
    none, unchanged = waited(*drawn, 0)
    assert none == pytest.approx(sum(sizes)) and (unchanged == load).all()  # each begins when it is wanted
    for room in (15, 25, 35):
        found, filled = waited(*drawn, room)
        assert ample - 1e-9 <= found <= sum(sizes) + 1e-9
        assert (filled[filled > load] <= room).all()
