"""What a pass does without where there is not room for all."""

import pytest
from plan_nets import BLOCKS, BRIDGED, CHAIN, drafted, loss, made, whole

from blobmem import SimulatedDevice
from blobmem.net.plan import times
from blobmem.net.plan.evict import loads


@pytest.fixture(scope="module")
def net():
    return made(CHAIN + loss(f"p{BLOCKS - 1}"), SimulatedDevice(), "train")


def test_a_chain_is_made_anew_in_stretches(net, monkeypatch):
    """With no link to speak of: an array is kept now and then, the others made of it, and loads are what was thought."""
    monkeypatch.setattr(times, "LINK", 1.0)
    every = whole(net)
    most = int(every.load.max())
    size = max(array.size for array in every.arrays.values())
    kept = []
    for room in (most - size, most - 4 * size, most - 7 * size):
        choice = every.choose(room, 1.0)
        assert choice.over <= 0 and not choice.away and choice.anew
        _, drawn = drafted(net, choice.anew)
        assert loads(drawn).max() <= room
        kept.append(len(every.arrays) - len(choice.anew))
    assert kept == sorted(kept, reverse=True) and kept[-1] > 0


@pytest.mark.parametrize("part, anew", [(0.65, 11), (0.8, 8)])
def test_of_all_made_anew_in_stretches_what_there_is_room_for_is_kept(monkeypatch, part, anew):
    """With no link to speak of: one by one no array but an evicted one saves any, as all would be made at once."""
    monkeypatch.setattr(times, "LINK", 1.0)
    net = made(BRIDGED + loss(f"x{BLOCKS - 1}"), SimulatedDevice(), "train")
    every = whole(net)
    room = int(part * every.load.max())
    choice, other = every.choose(room, 1.0, True), every.choose(room, 1.0)
    assert choice.over <= 0 and not choice.away and len(choice.anew) == anew
    assert not other.anew and other.away and choice.ms < every.clock[-1] < other.ms
    drawn = drafted(net, choice.anew, choice.held)[1]
    assert loads(drawn).max() <= room


def test_what_is_cheap_to_copy_is_evicted(net, monkeypatch):
    monkeypatch.setattr(times, "LINK", 1e15)
    monkeypatch.setattr(times, "MEMORY", 1.0)
    every = whole(net)
    choice = every.choose(int(every.load.max() * 0.6), 1.0)
    assert choice.over <= 0 and not choice.anew and choice.away


def test_with_room_enough_nothing_is_done(net):
    every = whole(net)
    choice = every.choose(int(every.load.max()), 1.0)
    assert not choice.anew and not choice.away
