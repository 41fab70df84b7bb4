"""Rounds: what is made anew as often as it takes, so that few arrays are there at a time."""

import math

import numpy as np
import pytest
from plan_nets import DATA, assert_same, iterate, loss, made, scaled_chain

from blobmem import SimulatedDevice
from blobmem.errors import OutOfDeviceMemory
from blobmem.net.plan import times, ways
from blobmem.net.plan.again import Less
from blobmem.net.plan.choice import Pass
from blobmem.net.plan.evict import loads, loads_without, lowest
from blobmem.net.plan.fitting import fitting
from blobmem.net.plan.places import draft
from blobmem.net.plan.rounds import _Numbered, walked
from blobmem.net.plan.times import Times
from blobmem.net.plan.ways import again_in, way_with

BLOCKS = 9
CHAIN = DATA + scaled_chain(BLOCKS)


def built(capacity=None):
    return made(CHAIN + loss(f"l{BLOCKS - 1}"), SimulatedDevice(capacity), "train", passes=())


def way(net, rounds=()):
    return way_with(net, Less((), (), rounds))


def whole(net, evicts=False):
    plain = way(net)
    found = plain.found if evicts else ()
    return Pass(again_in(net, plain.made), plain.made.places, found, Times(net.device))


def test_with_room_enough_there_are_none():
    every = whole(built())
    assert walked(every, int(every.load.max()))[0][:4] == ([], [], 0.0, 0)


@pytest.mark.parametrize("part, most", [(0.5, 2), (0.25, 19)])
def test_no_more_is_in_use_than_there_is_room_for(part, most):
    """To half and to a quarter of the bytes by so few convolutions again, of as many as there are blocks."""
    net = built()
    every = whole(net)
    room = int(part * every.load.max())
    found = walked(every, room)[0]
    drawn = way(net, found.rounds).made
    assert found.over == 0 and loads(drawn.places).max() <= room
    assert sum(each.op == "conv_forward" for each in drawn.backward) == most
    if most >= BLOCKS:
        assert every.choose(room, 1.0).over > 0, "what is made once has no room"


def test_searches_find_the_same_whoever_is_first():
    """They run in threads."""
    every = whole(built(), evicts=True)
    room = int(0.25 * every.load.max())
    assert walked(every, room) == walked(every, room)


def test_walks_of_the_same_calls_are_the_same_wherever_these_are_in_memory():
    """So that plans are the same in every process."""
    tables = [_Numbered(whole(built(), evicts=True)).tables for _ in range(5)]
    assert all(np.array_equal(*each) for other in tables[1:] for each in zip(tables[0], other, strict=True))


def test_what_spares_most_calls_is_evicted_while_the_link_has_time(monkeypatch):
    every = whole(built(), evicts=True)
    room = int(0.25 * every.load.max())
    monkeypatch.setattr(times, "LINK", 1.0)
    alone = walked(every, room)[0]
    monkeypatch.setattr(times, "LINK", 1e15)
    found = walked(every, room)[0]
    assert not alone.away and found.away and found.ms < alone.ms


def test_copies_back_take_no_time_where_they_have_it_beside_calls(monkeypatch):
    """All bytes of the fullest step take the link a hundredth of what the calls take, or 20 times as long."""
    every = whole(built(), evicts=True)
    room, rate = int(0.25 * every.load.max()), every.load.max() / (every.clock[-1] / 1e3)
    monkeypatch.setattr(times, "LINK", 100 * rate)
    found = walked(every, room)[0]
    assert found.away and not found.rounds and found.ms == 0.0
    monkeypatch.setattr(times, "LINK", rate / 20)
    assert not walked(every, room)[0].away


def test_copies_of_state_take_the_link_too(monkeypatch):
    """All through backward, where it has time for what is evicted otherwise."""
    every = whole(built(), evicts=True)
    room = int(0.25 * every.load.max())
    monkeypatch.setattr(times, "LINK", 100 * every.load.max() / (every.clock[-1] / 1e3))
    assert walked(every, room)[0].ms == 0.0
    steps = np.arange(every.turn, len(every.load))
    every.brought = steps, np.zeros_like(steps), np.diff(every.begins)[steps]
    assert walked(every, room)[0].ms > 0.0


@pytest.mark.parametrize("best, evicts, parts", [
    (0.0, False, (0.985,)), (math.inf, False, (0.985, 0.97, 0.94)), (math.inf, True, (0.985, 0.97, 0.94, 0.9)),
])  # fmt: skip
def test_they_have_nearly_all_of_the_room_and_less_while_copies_are_waited_for(monkeypatch, best, evicts, parts):
    """The `best` so far takes no longer than calls do, so that it has none, or is not there."""
    net, rooms = built(), list[int]()
    net.evict_state({net.params["c0"][0].data_view.memory: 0} if evicts else {})
    room = int(0.5 * whole(net).load.max())
    monkeypatch.setattr(ways.rounds, "walked", lambda of, part, *near: rooms.append(part) or walked(of, part, *near))
    assert [*ways.ways(net, room, Times(net.device), lambda: best)]
    assert rooms == [int(part * room) for part in parts]


def test_where_nearly_all_of_the_room_does_not_do_less_is_not_tried(monkeypatch):
    net, rooms = built(), list[int]()
    room = int(0.5 * whole(net).load.max())

    def too_much(of, part, *near):
        rooms.append(part)
        return [each._replace(over=1) for each in walked(of, part, *near)]

    monkeypatch.setattr(ways.rounds, "walked", too_much)
    assert [*ways.ways(net, room, Times(net.device), lambda: math.inf)]
    assert rooms == [int(ways.FULL[0] * room)]


def test_searches_go_on_from_what_others_have_begun():
    every = whole(built(), evicts=True)
    room = int(0.25 * every.load.max())
    found = walked(every, room)
    begun = [each.setting for each in found]
    assert walked(every, room, 0, begun) == found
    assert walked(every, room, walks=0)[0].ms > walked(every, room, 64, begun)[0].ms <= found[0].ms


def test_what_calls_turn_out_to_need_beside_is_made_room_for(monkeypatch):
    """A tenth of the room more than they seem to in each step, with which no plan fits that was found without; nothing
    may be evicted."""
    net, rooms, needed = built(), list[int](), list[int]()
    room = int(0.5 * whole(net).load.max())

    def fuller(*given):
        way = way_with(*given)
        return way._replace(found=[], load=way.load + room // 10) if given[1].rounds else way

    monkeypatch.setattr(times, "LINK", 1.0)
    monkeypatch.setattr(ways, "way_with", fuller)
    monkeypatch.setattr(ways.rounds, "walked", lambda of, part, *near: rooms.append(part) or walked(of, part, *near))
    for each in ways.ways(net, room, Times(net.device), lambda: math.inf):
        if not isinstance(each, ways.Way):
            continue
        needed += [lowest(each.found, each.load)] if each.made.recipe.less and each.made.recipe.less.rounds else []
    assert needed[0] > room >= min(needed) and rooms.count(int(ways.FULL[0] * room)) > 1


def test_what_a_way_lacks_is_of_the_steps_that_want_it():
    """Those that make arrays anew stand before the one that does."""
    net = built()
    plain, room = way(net), int(0.25 * whole(net).load.max())
    drawn, alone = plain.made.places, loads_without(plain.found, plain.load)
    np.testing.assert_array_equal(ways._lacking(drawn, plain, room), np.maximum(alone - room, 0))
    another = way(net, walked(whole(net), room)[0].rounds)
    most = lowest(another.found, another.load)
    assert not ways._lacking(drawn, another, most).any() and len(another.load) > len(alone)
    lacking = ways._lacking(drawn, another, most - 1)
    assert lacking.max() == 1 and lacking[: whole(net).turn].sum() == 0


def test_what_takes_longer_than_another_plan_is_not_laid_out(monkeypatch):
    """Though it would fit."""
    with pytest.raises(OutOfDeviceMemory) as caught:
        built(1).compiled()
    net = built(caught.value.requested)
    net.compiled()
    ms = fitting(net, net._made(streams=1), 0.0)[0].ms
    assert fitting(net, net._made(streams=1), 0.0, most_ms=1.01 * ms)[0].ms == ms
    monkeypatch.setattr("blobmem.net.plan.fitting._evicted", None)
    with pytest.raises(OutOfDeviceMemory):
        fitting(net, net._made(streams=1), 0.0, most_ms=ms / 2)


def test_a_slow_way_does_not_keep_others_from_being_tried(monkeypatch):
    """Though another plan is faster than what would do without them."""
    with pytest.raises(OutOfDeviceMemory) as caught:
        built(1).compiled()
    net = built(int(1.2 * caught.value.requested))
    net.compiled()

    def ms_by(*found, most_ms=math.inf):
        monkeypatch.setattr("blobmem.net.plan.fitting.ways", lambda *_: iter(found))
        try:
            return fitting(net, net._made(streams=1), 0.0, most_ms=most_ms)[0].ms
        except OutOfDeviceMemory:
            return math.inf

    tried = ways.ways(net, net.device.most_bytes, Times(net.device), lambda: math.inf)
    found = {ms_by(each): each for each in tried if isinstance(each, ways.Way)}
    fast, slow = min(found), max(found.keys() - {math.inf})
    assert fast < 0.95 * slow
    monkeypatch.setattr("blobmem.net.plan.fitting.least_ms", lambda *_: 0.0)  # as if its copies could be sooner
    usual = net._made(streams=1)
    usual_ms = times.reckon(draft(net, usual.schedules, usual.kept), Times(net.device)).ms
    more = 0.99 * slow / usual_ms  # so many times as long may one take for others not to be tried
    assert ms_by(found[slow], more, found[fast], most_ms=1.01 * fast) == fast
    assert ms_by(found[slow], 1.02 * more, found[fast]) == slow


def test_the_same_bits_at_the_least():
    with pytest.raises(OutOfDeviceMemory) as caught:
        built(1).compiled()
    nets = [built(), built(caught.value.requested)]
    assert_same(*([*iterate(net), *iterate(net)] for net in nets))
    held = [net.device.statistics.peak_bytes for net in nets]
    assert held[1] <= caught.value.requested < held[0] // 2
