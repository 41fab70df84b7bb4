"""Rounds: what is made anew as often as it takes, so that few arrays are there at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_nets import DATA, assert_same, conv, iterate, layer, loss, made

from blobmem import SimulatedDevice
from blobmem.errors import OutOfDeviceMemory
from blobmem.net.plan import rounds, times
from blobmem.net.plan.again import Less
from blobmem.net.plan.choice import Pass
from blobmem.net.plan.evict import loads
from blobmem.net.plan.rounds import walked
from blobmem.net.plan.times import Times
from blobmem.net.plan.walk import NONE, Tables, change
from blobmem.net.plan.ways import again_in, way_with

BLOCKS = 9
CHAIN = DATA + "".join(
    conv(f"c{at}", f"l{at - 1}" if at else "data") + layer("LRN", f"l{at}", f"c{at}", f"l{at}") for at in range(BLOCKS)
)
"""Convolutions and what is made of each, of which backward reads all."""


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


@pytest.mark.parametrize("part, most", [(0.5, 3), (0.25, 23)])
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


def test_the_same_bits_at_the_least():
    with pytest.raises(OutOfDeviceMemory) as caught:
        built(1).compiled()
    nets = [built(), built(caught.value.requested)]
    assert_same(*([*iterate(net), *iterate(net)] for net in nets))
    held = [net.device.statistics.peak_bytes for net in nets]
    assert held[1] <= caught.value.requested < held[0] // 2


# -------------------------------------------------------------------- how walks are found quickly


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
def test_the_next_use_of_an_array_is_that_of_what_is_gone_and_made_of_it_too(drawn):
    takes, reads, changes = drawn
    count, rows = len(takes), rounds.behind_each_other
    take, take_of = rows(takes, 5)
    nodes = [({source, same, count + maker} - {-1}) for source, maker, _, same, _ in take.tolist()]
    use = rows([at for at, own in enumerate(nodes) if node in own] for node in range(2 * count))
    own, none = rows([at] for at in range(count)), np.zeros(0, np.int64)
    tables = Tables(
        0, np.arange(11.0), none, none, none, none, none, none, none, none, *rows(reads), none, np.zeros(0),
        np.arange(count), np.zeros(0, bool), *own, take, take_of, none.reshape(0, 3), none, *use,
        np.repeat(np.arange(count), np.diff(take_of)), np.zeros(0, bool), none, np.zeros(0), none, count,
    )  # fmt: skip
    gone, uses = np.zeros(count, bool), np.array(needed_next(takes, [False] * count, reads))
    wanted = np.array([source if own else NONE if stays else count + maker if same < 0 else same
                       for source, maker, stays, same, own in take.tolist()], np.int64)  # fmt: skip
    wants, waiting = np.full(count, np.inf), np.zeros(4 * len(take) + 2 * count, np.int64)
    for memory in changes:
        change(tables, gone, tables.read_of[:-1].copy(), uses, wants, wanted, waiting, memory)
        assert uses.tolist() == needed_next(takes, gone, reads)
