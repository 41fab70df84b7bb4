"""Updates of evicted state go where there is room for what they need, and the link has time."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobmem import Blob
from blobmem.net.plan import spaced
from blobmem.net.schedule import Unit
from blobmem.ops.call import call, overwrite

ROOM = 100


def clock_of(loads, held=None):
    """Of steps of 1 ms each, with such loads."""
    units = [Unit(at, at + 1, [call("fill", overwrite(Blob((1,))))], 0, False) for at in range(len(loads))]
    return spaced._Clock(units, np.array(loads), held or {}, SimpleNamespace(ms=lambda each: 1.0), ROOM)


def update(size, least=0, ms=1.0, held=(), beside=0):
    """One that comes, and leaves, in so many ms."""
    return spaced._Update([], [], [], least, size, beside, [*held], [], ms, ms, 0.0)


def places(clock):
    return [(comes, runs) for _, comes, runs in clock.placed]


def test_updates_come_one_behind_another_as_soon_as_the_link_is_free():
    clock = clock_of([10] * 6)
    clock.run([update(20) for _ in range(3)])
    assert places(clock) == [(0, 1), (1, 2), (2, 3)]


def test_updates_wait_for_what_they_read():
    clock = clock_of([10] * 6)
    clock.run([update(20, least=3), update(20, least=4)])
    assert places(clock) == [(0, 3), (1, 4)]


def test_where_there_is_no_room_none_comes():
    """The first has left before the full steps, the second comes behind them."""
    clock = clock_of([10, 10, 95, 95, 10, 10, 10])
    clock.run([update(20), update(20)])
    assert places(clock) == [(0, 1), (4, 5)]


def test_what_an_update_has_beside_it_has_room_too():
    for beside, wanted in ((5, (0, 1)), (15, (1, 2))):
        clock = clock_of([70, 70, 10, 10, 10])
        clock.run([update(20, beside=beside)])
        assert places(clock) == [wanted]


def test_what_has_no_place_before_the_end_comes_behind_it():
    clock = clock_of([95] * 4)
    clock.run([update(20), update(20)])
    assert places(clock) == [(4, 4), (4, 4)]


def test_calls_wait_where_what_updates_hold_would_be_too_much():
    """A gradient of 40 from the second step on, beside 30 for the update: it has run before the full step."""
    gradient = Blob((1,)).data_view.memory
    clock = clock_of([10, 10, 65, 65], {gradient: (40, 1)})
    clock.run([update(30, least=1, ms=5.0, held=[gradient])])
    assert places(clock) == [(0, 2)] and clock._now == pytest.approx(5.0 + 2.0), "it comes, and two steps run"


@given(
    st.lists(st.integers(0, ROOM), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30), st.sampled_from([0.3, 1.0, 2.5])), max_size=20),
)
def test_there_is_never_too_much(loads, asked):
    """Each comes before it runs, in order, behind what it reads, and all have room, but for those behind the end."""
    leasts = sorted(min(least, len(loads)) for _, least, _ in asked)
    updates = [update(size, least, ms) for (size, _, ms), least in zip(asked, leasts, strict=True)]
    clock = clock_of(loads)
    clock.run(updates)
    assert [each for each, *_ in clock.placed] == updates
    assert places(clock) == sorted(places(clock))
    used = np.array(loads)
    for each, comes, runs in clock.placed:
        assert each.least <= runs and comes <= runs <= len(loads)
        used[comes:runs] += each.size
    assert used.max() <= ROOM
