"""What is evicted comes before it is needed, in as much of the room as there are places in."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from plan_nets import DATA, assert_same, conv, draft_of, iterate, loss, made

from blobmem import Blob, SimulatedDevice
from blobmem.memory.parked import Parked
from blobmem.net.plan import levels, moments, sooner, times
from blobmem.net.plan.ways import Made
from blobmem.net.schedule import Unit
from blobmem.ops.call import call, overwrite, read

pytestmark = pytest.mark.usefixtures("few_plans")
NET = DATA + "".join(conv(f"c{at}", f"c{at - 1}" if at else "data") for at in range(12)) + loss("c11")


def copies(calls):
    """Of each copy back the calls between it and the first that uses what it brings."""
    result = []
    for at, each in enumerate(calls):
        if each.op == "fetch":
            array = each.operand(0).memory
            uses = (later for later, other in enumerate(calls) if array in {one.memory for one in other.present()})
            result.append(next(later for later in uses if later > at) - at - 1)
    return result


def test_arrays_come_sooner_where_copies_take_long(monkeypatch):
    """With the bits, and in the bytes, that they have when each comes just before it is used."""
    monkeypatch.setattr(times, "LINK", 1e10)
    monkeypatch.setattr("blobmem.net.plan.fitting.ahead", lambda *_: {})
    need, expected = None, None
    ahead = list[int]()
    for parts in (sooner.PARTS[:0], sooner.PARTS[:0], (0.98, 0.9)):
        monkeypatch.setattr(sooner, "PARTS", parts)
        device = SimulatedDevice(None if need is None else need * 2 // 3)
        net = made(NET, device, "train", passes=())
        found = iterate(net)
        if need is None:
            need, expected = device.statistics.peak_bytes, found
            continue
        assert_same(found, expected)
        assert device.statistics.peak_bytes <= need * 2 // 3
        ahead.append(sum(copies(net.compiled()[1].calls)))
    assert ahead[0] < ahead[1]


def steps_of(*passes):
    return [Unit(at, at + 1, [each], 0, False) for calls in passes for at, each in enumerate(calls)]


def copy(op, home, sums=False):
    array = Blob(8)
    return call(op, overwrite(array) if op == "fetch" else read(array), home=home, start=0, sums=sums)


def test_before_which_step_copies_may_come():
    """Not before what they bring was sent, nor before their pass; but what is not added to may cross the turn."""
    device = SimulatedDevice()
    state, sent, added = (Blob(8, device=device).data_view.memory for _ in range(3))
    parked = Parked(32, device, "array")
    make = call("fill", overwrite(Blob(1)))
    forward = [make, copy("fetch", sent), copy("evict", sent), copy("evict", parked), make]
    backward = [make, make, copy("fetch", state), copy("fetch", sent), copy("fetch", added, True),
                copy("fetch", parked), copy("evict", state), make, copy("fetch", state)]  # fmt: skip
    steps = steps_of(forward, backward)
    behind = {7: 5, 8: 5, 9: 5, 10: 5, 13: 12}
    assert sooner._earliest(steps, 5, False, []) == {1: 0, **behind}
    assert sooner._earliest(steps, 5, True, []) == {1: 0, **behind, 7: 0, 8: 3, 10: 4, 13: 12}
    assert sooner._earliest(steps, 5, True, [3])[10] == 5, "it leaves behind the turn"


def test_what_forward_has_used_up_may_leave_in_backward(monkeypatch):
    """Its end does not wait for it then; the bits are the same."""
    sent = []

    def late(net, made, most_ms=math.inf):
        """The plan in which the last that leaves in forward does so in backward, with room for it as long."""
        at = max((at for at, each in enumerate(made.forward) if each.op == "evict"), default=None)
        if at is None:
            return made
        net._have(made)
        net.device.capacity += 2048
        room = sooner.room_of(net, made)
        found = sooner.with_moves(net, made, (room, room), times.Times(net.device), {at: len(made.forward)})
        sent.append(made.forward[at].operand(0).memory.name if found and found.backward[0].op == "evict" else None)
        return made if found is None else replace(found, ms=0.0)  # that is taken

    monkeypatch.setattr(times, "LINK", 1e10)
    monkeypatch.setattr(levels, "sooner", late)
    monkeypatch.setattr(levels, "refined", lambda net, made: made)
    need = None
    for part in (None, 0.85, 0.75):
        device = SimulatedDevice(None if part is None else int(part * need))
        net = made(NET, device, "train", passes=())
        found = [iterate(net) for _ in range(3)]
        if part is None:
            need, expected, whole = device.statistics.peak_bytes, found, made(NET, SimulatedDevice(), "keep")
            for _ in range(3):
                iterate(whole)
            continue
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        assert net.compiled()[1].calls[0].op == "evict"
        np.testing.assert_array_equal(net.blobs[sent[-1]].cpu_data(), whole.blobs[sent[-1]].cpu_data())


def test_an_end_that_would_wait_for_what_leaves():
    """What comes back in forward, or is used there once more, leaves in it."""
    arrays = [Blob(1 << 20) for _ in range(4)]
    homes = [Parked(4 << 20, SimulatedDevice(), "array") for _ in arrays]
    out = [
        call("evict", read(array), home=home, start=0, sums=False) for array, home in zip(arrays, homes, strict=True)
    ]
    back = [call("fetch", overwrite(Blob(1 << 20)), home=home, start=0, sums=False) for home in homes]
    make = [call("fill", overwrite(array), value=1.0) for array in arrays]
    again = call("relu_forward", read(arrays[2]), overwrite(Blob(1 << 20)), negative_slope=0.0)
    forward = [*make, *out, back[1], again]
    backward = [*(back[at] for at in (0, 2, 3)), call("fill", overwrite(Blob(1)), value=1.0)]
    clock = moments.Clock(draft_of(forward, backward), times.Times(SimulatedDevice()))
    assert sooner._late(clock, 1 << 30) == [4, 7]


@pytest.fixture
def told(monkeypatch):
    """A plan of one copy, of which a clock says that it takes 5 ms in all of the room and 1 more in each part less; and
    how many ms plans with it come to, if they have places, by the part of the room that is asked for."""
    asked, places = [], {}

    class Clock:
        updates = leaving = ()
        steps, turn = steps_of([copy("fetch", Parked(32, SimulatedDevice(), "array"))] * 2), 2

        def __init__(self, drawn, times, updates):
            pass

        def annealed(self, first, to, room, tries, heat):
            asked.append((room, to.tolist(), tries))
            return np.minimum(to + 1, 1)[::-1].copy()

        def run(self, room, to):
            return SimpleNamespace(ms=5.0 + (100 - room) / 10)

    def with_moves(net, made, rooms, times, moves):
        assert rooms[1] == 100 and moves
        ms = places.get(rooms[0])
        return None if ms is None else replace(made, ms=ms, before=made)

    units = [Clock.steps, []]
    monkeypatch.setattr(sooner, "Clock", Clock)
    monkeypatch.setattr(sooner, "with_moves", with_moves)
    monkeypatch.setattr(sooner, "room_of", lambda net, made: 100)
    monkeypatch.setattr(sooner, "least_ms", lambda drawn, times: 4.0)
    monkeypatch.setattr(sooner, "PARTS", (1.0, 0.9, 0.8, 0.7))
    monkeypatch.setattr(sooner, "movable", lambda drawn: [])
    drawn = SimpleNamespace(units=units, lasting=lambda until: None)
    net = SimpleNamespace(device=SimulatedDevice(), updates_in_backward=True, _have=lambda made: None)
    calls = [step.calls[-1] for step in Clock.steps]
    return net, Made(calls, [], [], [], set(), drawn=drawn, ms=20.0), asked, places


def test_there_is_less_room_until_there_are_places(told):
    """And until what the clock says is no less than what was found."""
    net, plain, asked, places = told
    places |= {90: 9.0, 80: 7.0, 70: 6.0}
    assert sooner.sooner(net, plain).ms == 7.0
    assert [room for room, *_ in asked] == [100, 90, 80, 70], "the last has 8 ms by the clock, and is not laid out"
    assert asked[0][1] == [0, 1] != asked[1][1], "it goes on from where the one before has ended"


def test_what_cannot_take_less_is_not_looked_for(told):
    net, plain, asked, places = told
    places |= {100: 5.0}
    assert sooner.sooner(net, plain, 4.0) is plain and not asked
    assert sooner.sooner(net, plain, 5.0) is plain and len(asked) == 1, "by the clock it takes as long"


def test_the_best_is_looked_at_longer(told):
    net, plain, asked, places = told
    places |= {100: 6.0, 90: 5.5}
    best = replace(plain, ms=5.8, before=plain, recipe=plain.recipe._replace(moves=(100, {1: 0})))
    assert sooner.refined(net, best, 1e-3) is best, "none is better"
    assert asked[0] == (100, [0, 0], min(sooner.TRIES, sooner.MORE // 2)), "from where its copies come"
    places[100] = 5.1
    assert sooner.refined(net, best, 1e-3).ms == 5.1
    assert sooner.refined(net, plain, 1e-3) is plain, "of which nothing has come sooner"


def test_a_plan_without_copies_is_as_it_was(told, monkeypatch):
    net, plain, asked, _ = told
    monkeypatch.setattr(sooner.Clock, "steps", steps_of([call("fill", overwrite(Blob(1)))] * 2))
    assert sooner.sooner(net, plain, math.inf) is plain and not asked


def test_who_looks_between_layers_has_nothing_come_before(monkeypatch):
    """With a callback a net is planned as it would be if all came just before it is used."""
    seen = []
    monkeypatch.setattr(levels, "sooner", lambda net, each, most_ms: seen.append(each) or each)
    for watched in (False, True):
        device = SimulatedDevice(None)
        net = made(NET, device, "train", passes=())
        iterate(net)
        tight = made(NET, SimulatedDevice(device.statistics.peak_bytes * 2 // 3), "train", passes=())
        if watched:
            tight.before_forward(lambda layer: None)
        iterate(tight)
        assert bool(seen) is not watched
        seen.clear()
