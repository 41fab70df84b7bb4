"""When what is evicted comes back, and gives its bytes away, by a clock."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_nets import draft_of

from blobmem import SimulatedDevice
from blobmem.memory.blob import Blob
from blobmem.net.plan import clockwork, moments, times
from blobmem.net.plan.evict import Candidate
from blobmem.net.plan.moments import Clock, ahead, lingering
from blobmem.net.plan.movable import movable
from blobmem.net.plan.sooner import HEAT
from blobmem.net.plan.times import reckon
from blobmem.ops.call import Call, call, overwrite, read, write

SIZE = 1024
DEVICE = SimulatedDevice()


class Told(times.Times):
    """Of a device on which a call takes what its attribute says."""

    def ms(self, call):
        return call.attributes["ms"]


TOLD = Told(DEVICE)


def array(name):
    return Blob((SIZE // 4,), device=DEVICE, name=name)


def leaving(waits=False):
    """A pass in which `a` leaves from 1 to 4 ms while calls go on, or wait for what comes until 11 ms."""
    a, b, back, *rest = map(array, ("a", "b", "back", "c", "d", "e"))
    calls = [
        call("make", overwrite(a), ms=1.0),
        call("evict", read(a), home=object(), ms=3.0),
        call("fetch", overwrite(back), home=object(), ms=10.0),
        *(call("make", overwrite(each), ms=1.5) for each in (b, *rest)),
    ]
    calls.insert(3 if waits else 6, call("use", read(back), ms=1.0))
    return draft_of(calls), a.data_view.memory


def last_of(drawn, key):
    return next(life.last for life in drawn.lives.arena if life.key is key)


@pytest.mark.parametrize(("waits", "last"), [(False, 5), (True, 2)])
def test_what_leaves_stays_while_it_is_under_way(monkeypatch, waits, last):
    """By when calls run: with one that waits for a copy back in between, the next ones need its bytes later."""
    drawn, a = leaving(waits)
    assert last_of(drawn, a) == 1
    assert last_of(lingering(drawn, TOLD, 1 << 20), a) == last
    assert last_of(lingering(drawn, TOLD, 2 * SIZE), a) == 2, "there is no room for more"
    assert last_of(lingering(replace(drawn, enough=2 * SIZE), TOLD, 1 << 20), a) == 2, "nor a place"
    monkeypatch.setattr(moments, "MANY", len(drawn.units[0]))
    monkeypatch.setattr(moments, "MORE", 20.0)
    assert last_of(lingering(drawn, TOLD, 1 << 20), a) == len(drawn.units[0]) - 1


def test_who_has_no_room_waits_for_what_leaves_first():
    """For what was sent first; with no room for both, all wait."""
    a, b, c = map(array, "abc")
    calls = [
        call("make", overwrite(a), ms=1.0),
        call("evict", read(a), home=object(), ms=4.0),
        call("make", overwrite(b), ms=1.0),
        call("evict", read(b), home=object(), ms=1.0),
        call("make", overwrite(c), ms=1.0),
    ]
    clock = Clock(draft_of(calls), TOLD)
    for room, begin, gone in ((3, 2, [5, 5]), (2, 5, [4, 5]), (1, 7, [2, 4])):
        ran = clock.run(room * SIZE)
        assert (ran.begin[4], ran.gone.tolist()) == (begin, gone)


def a_pass(draw, homes, ahead):
    """Calls that make arrays and use them, copies out of those and back, in this order."""
    calls, there = [], []
    for _ in range(draw(st.integers(1, 12))):
        ms = float(draw(st.integers(1, 9)))
        what = draw(st.sampled_from(["make", "use", "evict", "fetch"]))
        if what == "make" or not there:
            there.append(array("made"))
            calls.append(call("make", overwrite(there[-1]), ms=ms))
        elif what == "use":
            calls.append(call("use", read(draw(st.sampled_from(there))), ms=ms))
        elif what == "evict":
            homes.append(SimpleNamespace(start=None))
            calls.append(call("evict", read(there.pop()), home=homes[-1], ms=ms))
        elif homes:
            there.append(array("back"))
            calls.append(call("fetch", overwrite(there[-1]), home=draw(st.sampled_from(homes)), ms=ms))
            ahead.append(calls[-1])
            calls.append(call("use", read(there[-1]), ms=1.0))
    return calls


@st.composite
def two_passes(draw):
    homes, ahead = [], []
    return draft_of(a_pass(draw, homes, ahead), a_pass(draw, homes, ahead))


def needed(drawn):
    """Bytes in use in the fullest step."""
    steps = range(sum(map(len, drawn.units)))
    return max(sum(life.nbytes for life in drawn.lives.arena if life.first <= at <= life.last) for at in steps)


@settings(deadline=None)  # the first compiles
@given(two_passes())
def test_with_all_the_room_it_is_as_if_bytes_were_free(drawn):
    ran, wanted = Clock(drawn, TOLD).run(1 << 30), reckon(drawn, TOLD, bytes_free=True)
    np.testing.assert_allclose(ran.begin, wanted.begin)
    np.testing.assert_allclose(ran.end, wanted.end)
    assert ran.ms == pytest.approx(wanted.ms)


@settings(deadline=None)  # the first compiles
@given(two_passes(), st.integers(0, 3))
def test_who_has_the_bytes_of_what_left_waits_no_longer_than_the_clock_says(drawn, more):
    """And no more of them are in use than there is room for, if there is any for what is there at least."""
    room = needed(drawn) + more * SIZE
    found = lingering(drawn, TOLD, room)
    assert needed(found) <= room
    ran = Clock(drawn, TOLD).run(room)
    assert np.all(ran.begin >= reckon(drawn, TOLD, bytes_free=True).begin - 1e-9)
    if room >= needed(lingering(drawn, TOLD, 1 << 30)):
        assert reckon(found, TOLD).ms == pytest.approx(ran.ms)


@settings(deadline=None)  # the first compiles
@given(two_passes(), st.data())
def test_what_comes_goes_where_all_takes_no_longer(drawn, data):
    """Between the first step before which it may, and where it is; the same each time."""
    clock, room = Clock(drawn, TOLD), needed(drawn) + SIZE
    copies = [at for at, step in enumerate(clock.steps) if step.calls[-1].op == "fetch"]
    first = {at: data.draw(st.integers(0, at)) for at in copies}
    if not first:
        return
    stays = np.arange(len(clock.steps))
    to = clock.annealed(first, stays, room, 300, HEAT)
    assert all(to[at] == at if at not in first else first[at] <= to[at] <= at for at in stays)
    assert np.array_equal(to, clock.annealed(first, stays, room, 300, HEAT))
    before, after = clock.run(room), clock.run(room, to)
    assert sorted(after.order) == [*stays]
    slack = moments.SLACK * len(copies) * len(stays)
    assert after.ms <= before.ms + 0.01 * slack


@st.composite
def pass_with_updates(draw):
    """Forward, and a backward with updates of state that comes and goes for them; after some of them calls."""
    forward = a_pass(draw, [], [])
    calls = list[Call]()
    for _ in range(draw(st.integers(1, 4))):
        gradient, state = array("gradient"), array("state")
        home = {"home": array("state").data_view.memory, "start": 0, "sums": False}
        made = draw(st.sampled_from(["inner_product_backward_weights", "conv_backward_weights"]))
        calls += [
            call(made, overwrite(gradient), ms=1.0),
            call("fetch", overwrite(state), **home, ms=float(draw(st.integers(1, 9)))),
            call("sgd_update", read(gradient), write(state), ms=1.0),
            call("evict", read(state), **home, ms=float(draw(st.integers(1, 9)))),
            *(call("make", overwrite(array("made")), ms=2.0) for _ in range(draw(st.integers(0, 4)))),
        ]
    return draft_of(forward, calls)


@settings(deadline=None)  # the first compiles
@given(pass_with_updates(), st.integers(0, 3))
def test_updates_go_where_all_takes_no_longer(drawn, more):
    """Behind what makes their gradient and brings their arrays, before these leave; and a pass of the calls in that
    order takes what the clock says."""
    room, updates = needed(drawn) + more * SIZE, movable(drawn)
    clock = Clock(drawn, TOLD, updates)
    first = {at: clock.turn for each in updates for at in each.fetches}
    before, to = clock.run(room), clock.annealed(first, np.arange(len(clock.steps)), room, 500, HEAT)
    ran = clock.run(room, to)
    slack = moments.SLACK * 2 * len(clock.steps)
    assert ran.ms <= before.ms * (1 + clockwork.HELD) + clockwork.SHORT * slack
    place = {step: at for at, step in enumerate(ran.order)}
    for each in updates:
        assert all(place[at] < place[each.step] for at in each.fetches)
        assert all((place[at] < place[each.step]) == (at < each.step) for at in each.others)
        assert all(to[at] >= clock.turn for at in (*each.fetches, each.step, *each.others))
    calls = [clock.steps[at].calls[-1] for at in ran.order]
    found = draft_of(calls[: clock.turn], calls[clock.turn :])
    if needed(found) <= room:
        assert Clock(found, TOLD).run(room).ms == pytest.approx(ran.ms)


def test_what_is_needed_late_comes_early_where_there_is_room():
    """Each behind the one before it on the link, and no sooner than there is room."""
    a, b, *rest = map(array, ("a", "b", "c", "d", "e"))
    wide = Blob((3 * SIZE // 4,), device=DEVICE, name="wide")
    calls = [call("make", overwrite(each), ms=2.0) for each in (*rest, wide)]
    calls += [call("fetch", overwrite(a), home=1, ms=2.0), call("use", read(a), ms=1.0)]
    calls += [call("fetch", overwrite(b), home=2, ms=2.0), call("use", read(b), ms=1.0)]
    clock = Clock(draft_of(calls), TOLD)
    first = {4: 0, 6: 0}
    found = {room: clock.annealed(first, np.arange(8), room * SIZE, 3000, HEAT) for room in (3, 4, 5)}
    ms = {room: clock.run(room * SIZE, to).ms for room, to in found.items()}
    assert clock.run(5 * SIZE).ms == 14 and ms[5] == 10
    assert (ms[4], ms[3]) == (11, 13), "one comes behind the wide one, or both"
    assert all(to[4] <= 4 and to[6] <= 6 for to in found.values())


def test_arrays_come_back_when_their_copies_want_it():
    """In their order on the link, with time to spare, where they are not yet away and there is room."""
    calls = [call("make", overwrite(array("x")), ms=1.0) for _ in range(8)]
    drawn, load = draft_of(calls[:4], calls[4:]), np.zeros(8, np.int64)
    x = array("x").data_view.memory
    each = [Candidate(x, read(array("x")), [], [], 0, SIZE, left, back) for left, back in ((0, 6), (1, 7))]
    told = SimpleNamespace(ms=lambda call: 1.0, copy_ms=lambda nbytes: 1.5)
    load[2:6] += SIZE  # which is away then
    load[2:7] += SIZE
    assert [*ahead(each, load, drawn, told, 1 << 20).values()] == [4, 5]
    assert [*ahead(each, load, drawn, told, 0).values()] == [6, 7]
