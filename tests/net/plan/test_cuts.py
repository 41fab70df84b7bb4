"""Mixes of what is made anew, evicted and kept that minimum cuts give to begin with."""

import itertools
import random

import numpy as np
import pytest
from plan_nets import BRIDGED, CHAIN, drafted, loss, made, whole

from blobmem import SimulatedDevice
from blobmem.net.plan import times
from blobmem.net.plan.choice import ANEW, AWAY
from blobmem.net.plan.cuts import ASIDE, BUSY, GB, Cuts
from blobmem.net.plan.evict import loads

NETS = {"chain": (CHAIN, "p"), "bridged": (BRIDGED, "x")}


def passing(which, blocks):
    """The pass of the first so many blocks."""
    text, top = NETS[which]
    last = f'name: "{top}{blocks}"' if which == "bridged" else f'name: "c{blocks}"'
    end = text.find(f"layer {{ {last}")
    if which == "bridged":
        end = text.find(f'layer {{ name: "p{blocks}"')
    return made(text[:end] + loss(f"{top}{blocks - 1}"), SimulatedDevice(), "train")


def again_ms(every, anew):
    """What the calls take that run again where these are made anew."""
    runs = set().union(*(every.chain(memory, anew)[0] for memory in anew))
    return sum(every.cost[at] for at in {every.unit[at] for at in runs})


@pytest.mark.parametrize("which", NETS)
@pytest.mark.parametrize("seed", range(4))
def test_a_cut_pays_the_least_of_all_mixes(which, seed):
    every = whole(passing(which, 5))
    cuts, draws = Cuts(every), random.Random(seed)
    prices = np.array([draws.choice((0.0, 0.0, 1e3, 1e4)) for _ in every.load])
    link, sums = draws.choice((0.0, 0.1, 3.0)), np.concatenate([[0.0], np.cumsum(prices)])

    def paid(array):
        start = array.start.get(ANEW, array.start.get(AWAY, array.first))
        kept = away = array.size / GB * (sums[array.first] - sums[start])
        if AWAY not in array.start:
            return kept
        copy = every.times.copy_ms(array.size)
        back = max(array.start[AWAY], np.searchsorted(every.clock, every.clock[array.first] - copy, side="right") - 1)
        away -= array.size / GB * (sums[back] - sums[array.start[AWAY]])
        return min(kept, away + (link / BUSY + ASIDE) * copy)

    may = [memory for memory, array in every.arrays.items() if ANEW in array.start]
    rest = sum(paid(array) for array in every.arrays.values() if ANEW not in array.start)
    least = min(
        again_ms(every, {*anew}) + sum(paid(every.arrays[memory]) for memory in may if memory not in anew)
        for count in range(len(may) + 1)
        for anew in itertools.combinations(may, count)
    )
    assert len(may) > 3
    assert cuts._cut(prices, link).paid == pytest.approx(least + rest, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("which", NETS)
@pytest.mark.parametrize("part", [0.7, 0.85])
def test_what_begins_with_a_cut_fits_and_takes_no_longer(which, part, monkeypatch):
    """With no link to speak of."""
    monkeypatch.setattr(times, "LINK", 1.0)
    net = passing(which, 16)
    every = whole(net)
    room = int(part * every.load.max())
    found = [every.choose(room, 1.0, begun=begun) for begun in Cuts(every).found(room)]
    others = [every.choose(room, 1.0, sparing) for sparing in (False, True)]
    best = min((each for each in found if each.over <= 0), key=lambda each: each.ms)
    assert best.ms <= min(each.ms for each in others if each.over <= 0)
    drawn = drafted(net, best.anew, best.held)[1]
    assert loads(drawn).max() <= room or best.away


def test_with_room_enough_nothing_is_done():
    every = whole(passing("chain", 5))
    assert Cuts(every).found(int(every.load.max())) == [{}]


def test_where_there_is_no_room_all_is_done_that_can_be():
    every = whole(passing("chain", 5))
    best = Cuts(every).found(0)[0]
    assert {memory for memory, array in every.arrays.items() if array.start.keys() & {ANEW, AWAY}} == {*best}
