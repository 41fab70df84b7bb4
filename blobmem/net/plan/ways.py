"""The ways that are compared for a net to do with less memory: what its calls make anew, and what may be evicted of the
rest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Parked
from blobmem.net.fusion import UPDATES, ops_of
from blobmem.net.plan import rounds
from blobmem.net.plan.abreast import Abreast
from blobmem.net.plan.again import Again, Less
from blobmem.net.plan.choice import Choice, Pass
from blobmem.net.plan.cuts import Cuts, Without
from blobmem.net.plan.evict import Candidate, candidates, loads, loads_without, lowest
from blobmem.net.plan.places import Draft, draft
from blobmem.net.plan.recompute import usual as usual_set
from blobmem.net.plan.slices import Runs, Sliced
from blobmem.net.plan.times import COPIES, Times
from blobmem.net.plan.uses import Remade, Uses
from blobmem.net.schedule import Schedule, Unit
from blobmem.ops.call import Call, memories
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

PRICES = (0.3, 0.03, 0.1, 1.0, 9.0)
"""What part of their time copies are reckoned to take where the link has time for them, in plans that are compared."""

LARGE = ((0.15, True, 0), (0.3, True, 0), (0.1, True, 1))
"""Prices, and how else `Pass.choose` chooses, of a net of `SEVERAL` arrays, or in slices: few plans of it are
compared."""

SEVERAL = 250
"""Of a net of so many arrays, not in slices, some choices begin with minimum cuts: for fewer searches are as good."""

CUT = 0.15
"""The price where it begins with minimum cuts."""

HOPELESS = 1.25
"""Where plans of the first of these prices seem to take so many times as long as one with rounds, no more are made."""

COMPARED = 2
"""How many plans that are found so, and have room, are laid out, those that may take least time."""

MADE = 8
"""Of how many of them the calls are made to find these."""

AIMS = 2
"""How often one is chosen."""

MANY = 1000
"""Of a net of so many arrays, or calls, there are no rounds, and few levels of state: each plan takes seconds."""

FULL = (0.985, 0.97, 0.94)
"""Which parts of the room rounds may take, in searches that know nothing of each other."""

BESIDE = (*FULL, 0.9)
"""The same beside evicted state, which wants room to come sooner (`sooner`)."""

FEWER = 4
"""How many times fewer walks there are behind the first of these."""

FOUND = 4
"""How many plans with rounds are made of what searches for these have found."""

SEEMS = 1.1
"""How many times as long as the best so far one of these may seem to take, as waits turn out shorter or longer."""

CLOSE = 1.1
"""How many times as long as its calls and those of its rounds a plan may take for rounds in less of the room to be no
better."""

SHARES = (1.0, 0.0, math.inf)
"""How many times the usual share of a pass may be spent to make arrays anew, and the rest is evicted, if none fits."""

APART = 0.75
"""What needs more than such a part of the room, with all evicted that can be, does not run as one where it need not."""

NEAR = 0.9
"""Nor does what needs more than such a part of the most, where that is too much."""

FAR = 1.5
"""Where calls need so many times the room with all evicted that can be, no arrays are chosen to be made anew for it."""

GOOD = 1.05
"""How many times as long as the usual calls a plan may be reckoned to take for no other kind of it to be tried, nor one
with rounds."""


class Recipe(NamedTuple):
    """By what calls came about: whoever has it need search for nothing.

    Attributes:
        less: by which less is in use; None for what is usual.
        abreast: which layers take slices abreast, if any do.
        division: which runs of layers are in slices behind each other, and how.
        rooms: what convolutions of a layer and op may take, in slices.
        away: what is evicted, by position among what may be; None if nothing was to be.
        room, enough: the loads with which that comes back early, and the bytes of an arena that is small enough.
        moves: the loads with which calls go elsewhere, and from where to where (`sooner`); None if none do.
    """

    less: Less | None = None
    abreast: Abreast | None = None
    division: Runs = ()
    rooms: tuple[tuple[tuple[int, Any], int], ...] = ()
    away: tuple[int, ...] | None = None
    room: int = 0
    enough: int = 0
    moves: tuple[int, Mapping[int, int]] | None = None


USUAL = Recipe()


@dataclasses.dataclass(slots=True)
class Made:
    """The calls of a net, and what they became.

    Attributes:
        forward, backward: the calls.
        remade: what backward fills by other calls than its layers'.
        kept: memories that somebody reads after the pass.
        passing: memories that nobody reads but these calls.
        bound: the schedules of forward and backward, once they are made.
        again: what could be made anew.
        absent: memories that forward does not write, as they are.
        drawn: their lifetimes, where the net's arrays take turns.
        homes: of memories that are evicted, where their bytes go.
        fetched: arrays in which they come back, and in which what is evicted of parameters and the like is used.
        evicted: bytes that leave the device in a pass, or come back.
        sliced: how a run of layers takes the batch in slices, if one does.
        own: arrays that the calls have beside those of layers, of slices apart.
        anew: arrays that are made anew for want of room.
        state: which parameters and the like are evicted for it, each but for so many first bytes.
        spread: as the net's for it.
        ms: how long it is reckoned to take.
        recipe: by what it came about.
        before: the same before some of them went elsewhere (`sooner`).
    """

    forward: list[Call]
    backward: list[Call]
    remade: list[Remade]
    kept: list[SyncedMemory]
    passing: set[SyncedMemory]
    bound: tuple[Schedule, Schedule] | None = None
    again: Again | None = None
    absent: Collection[SyncedMemory] = ()
    drawn: Draft | None = None
    homes: Mapping[SyncedMemory, Parked] = dataclasses.field(default_factory=dict)
    fetched: list[Blob] = dataclasses.field(default_factory=list)
    evicted: int = 0
    sliced: Sliced | None = None
    own: Sequence[Blob] = ()
    anew: list[Blob] = dataclasses.field(default_factory=list)
    state: Mapping[SyncedMemory, int] = dataclasses.field(default_factory=dict)
    spread: float = 0.0
    ms: float = 0.0
    recipe: Recipe = USUAL
    before: Made | None = None

    @property
    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of forward and backward, which are made."""
        assert self.bound is not None
        return self.bound

    @property
    def places(self) -> Draft:
        """The lifetimes, which are known."""
        assert self.drawn is not None
        return self.drawn


Tried = tuple[float, bool, int] | tuple[float, bool, int, Without]
"""How `Pass.choose` chooses: the price, whether sparing, the power, and what it begins with."""

Apart = Mapping[tuple[int, Any], int]
"""How many calls may run as one from a layer's calls of an op on."""


class Way(NamedTuple):
    """So much made anew, and the rest evicted.

    Attributes:
        made: the calls, before anything is evicted.
        found: what may be.
        load: bytes in use in each step.
        away: what is evicted first; None if that is open.
    """

    made: Made
    found: list[Candidate]
    load: np.ndarray
    away: set[SyncedMemory] | None = None


def ways(net: Net, room: int, times: Times, best: Callable[[], float]) -> Iterator[Way | float]:
    """The ways that are compared, and behind them those that may take less room, which are the same for any room: what
    an error says would do then does. Before those that are only made for want of others comes how many times as long as
    without a limit one of these may take for that. `best` says how many ms the best takes of those that came before."""
    if room > 0:
        plain, apart = taken_apart(net, APART * room)
        least = lowest(plain.found, plain.load)
        if least <= FAR * room:
            whole = Pass(again_in(net, plain.made), plain.made.places, plain.found, times)
            yield from _chosen_ways(net, whole, apart, room)
            yield GOOD
            if least <= room and len(whole.arrays) < MANY:
                yield from _walked_ways(net, plain.made.places, whole, apart, room, best)
        yield math.inf
    plain, apart = taken_apart(net, 0)
    again = again_in(net, plain.made)
    for way in usual_ways(net, again, apart):
        yield way
        yield math.inf
    for price in PRICES[-1:]:
        choice = Pass(again, plain.made.places, plain.found, times).choose(0, price)
        way = _chosen_way(net, choice, apart)
        yield way
        less = _evicting(net, again, choice, way, apart, 0)
        if less is not way:
            yield less


def glance(net: Net, room: int, times: Times) -> tuple[int, float]:
    """How many bytes a net's calls seem to need too much, and how many ms to take."""
    plain, _ = taken_apart(net, APART * room)
    whole = Pass(again_in(net, plain.made), plain.made.places, plain.found, times)
    if len(whole.arrays) < MANY:
        return rounds.glance(whole, room)
    choice = whole.choose(room, *LARGE[-1])
    return max(0, choice.over), whole.clock[-1] + choice.ms


def _chosen_ways(net: Net, whole: Pass, apart: Apart, room: int) -> Iterator[Way]:
    """Those by which arrays are chosen that are made anew, once each, with room for them: what is reckoned to take
    least time comes first. What turns out to need more than it was chosen for is chosen again, for as much less."""
    cuts = len(whole.arrays) >= SEVERAL and net._abreast is None
    few = not cuts and net._abreast is None
    tries: Iterable[Tried] = itertools.product(PRICES[:1], (False, True), (0, 1)) if few else LARGE
    found = [(whole.choose(room, *each), each) for each in (*tries, *(_cut(whole, room) if cuts else ()))]
    if few and not _is_hopeless(whole, room, [choice for choice, _ in found]):
        tries = itertools.product(PRICES[1:], (False, True), (0, 1))
        found += [(whole.choose(room, *each), each) for each in tries]
    found.sort(key=lambda each: (max(0, each[0].over), each[0].ms))
    seen, most = list[Choice](), COMPARED
    for choice, how in found[:MADE]:
        for _ in range(AIMS):
            if choice in seen:
                break
            seen.append(choice)
            way = _chosen_way(net, choice, apart)
            over = lowest(way.found, way.load) - room
            if over <= 0:
                yield way
                most -= 1
                break
            choice = whole.choose(room - over, *how)
        else:
            way = _evicting(net, whole.again, choice, _chosen_way(net, choice, apart), apart, room)
            if lowest(way.found, way.load) <= room:
                yield way
                most -= 1
        if not most:
            break


def _cut(whole: Pass, room: int) -> list[Tried]:
    """How `Pass.choose` chooses from minimum cuts on."""
    return [(CUT, False, 0, begun) for begun in Cuts(whole).found(room)]


def _is_hopeless(whole: Pass, room: int, choices: Iterable[Choice]) -> bool:
    """Whether a pass that makes each array once takes much longer than one with rounds, by what the first of either
    seem to take."""
    usual = whole.clock[-1]
    ms = usual + min((each.ms for each in choices if each.over <= 0), default=math.inf)
    if ms <= GOOD * usual:
        return False
    over, least = rounds.glance(whole, int(FULL[-1] * room))
    return over <= 0 and ms > HOPELESS * least


def _evicting(net: Net, again: Again, choice: Choice, way: Way, apart: Apart, room: int) -> Way:
    """The way of a choice, with evicted what takes more than the room where it is made anew, while that is of use."""
    least = loads_without(way.found, way.load)
    while least.max() > room:
        layer = [*chain(*way.made.places.units)][int(least.argmax())].calls[0].layer
        there = {memory for memory in choice.anew if again.uses.backward[again.uses.read[memory][0]].layer == layer}
        if not there:
            break
        choice = choice._replace(anew=choice.anew - there, away=choice.away | there)
        other = _chosen_way(net, choice, apart)
        lower = loads_without(other.found, other.load)
        if lower.max() >= least.max():
            break
        way, least = other, lower
    return way


def _chosen_way(net: Net, choice: Choice, apart: Apart) -> Way:
    return way_with(net, Less(choice.anew, choice.held, (), apart))._replace(away=choice.away)


def _walked_ways(
    net: Net, drawn: Draft, whole: Pass, apart: Apart, room: int, best: Callable[[], float]
) -> Iterator[Way]:
    """Those with rounds. Where the calls of the best turn out to need more than it was found for, as evicted state that
    runs again with others stays longer, say, its steps count as that much fuller, and it is gone on from there."""
    walks = rounds.WALKS
    for part in BESIDE if net._evicted else FULL:
        found = rounds.walked(whole, int(part * room), walks)
        for aim in range(AIMS + 1):
            if found[0].over > 0:
                return
            seeming = (each for each in found[:FOUND] if each.ms + whole.clock[-1] < SEEMS * best())
            lacking = np.zeros_like(whole.load)
            for at, each in enumerate(seeming):
                way = way_with(net, Less((), whole.held, each.rounds, apart))._replace(away={*each.away})
                if at == 0:
                    lacking = _lacking(drawn, way, room)
                yield way
            if not lacking.any() or aim == AIMS:
                break
            whole.load += lacking
            found = rounds.walked(whole, int(part * room), rounds.WALKS // FEWER, [each.setting for each in found])
        if best() <= CLOSE * (whole.clock[-1] + found[0].ms):
            return
        walks = rounds.WALKS // FEWER


def _lacking(drawn: Draft, way: Way, room: int) -> np.ndarray:
    """Of each step of a pass in which nothing is made anew, how many bytes more than there are a way's calls need for
    it, with all given away that may be."""
    needed = loads_without(way.found, way.load)[::-1] - room
    result, over = np.zeros(sum(map(len, drawn.units)), np.int64), iter(needed.tolist())
    for at, units in reversed([*enumerate(drawn.units)]):
        begin, step, behind = at * len(drawn.units[0]), len(units) - 1, len(units)
        known = defaultdict[Any, list[int]](list)
        for place, unit in enumerate(units):
            known[_mark(unit)].append(place)
        for unit in reversed(way.made.places.units[at]):  # what makes arrays anew stands before what wants them
            places = known.get(_mark(unit), []) if unit.calls[0].op not in (*COPIES, *UPDATES) else []
            before = bisect_left(places, behind)
            if before:
                step = behind = places[before - 1]
            result[begin + step] = max(result[begin + step], next(over))
    return result


def _mark(unit: Unit) -> Any:
    """What a unit has in common with what became of it."""
    return unit.calls[0].op, unit.calls[0].layer, unit.calls[0].layer_name


def again_in(net: Net, made: Made) -> Again:
    """What could be made anew of these calls."""
    ops, passes = ops_of(net.device), (made.forward, made.backward)
    free, uses = net._free({*memories(chain(*passes))}), Uses(*passes, ops)
    if made.again is None:
        return Again(uses, free, ops)
    uses.changed = made.again.uses.changed  # updates of parameters wait for all that reads these
    return Again(uses, free, ops, pieces=made.again.pieces)


def usual_ways(net: Net, again: Again, apart: Apart, bring: bool = True) -> Iterator[Way]:
    """The usual calls, or with more or nothing made anew, in which anything may be evicted."""
    for share in SHARES:
        yield way_with(net, Less(usual_set(again.uses, again.free, share * again.traffic), apart=apart), bring)


def taken_apart(net: Net, room: float) -> tuple[Way, Apart]:
    """The calls with nothing made anew, and how many of them may run as one, where with all evicted that can be so much
    room does not do for more."""
    apart, best, most = dict[tuple[int, Any], int](), way_with(net, Less()), math.inf
    way, trial = best, apart
    while True:
        least, units = loads_without(way.found, way.load), [*chain(*way.made.places.units)]
        if least.max(initial=0) >= most:
            break  # what is apart since then is no help
        apart, best, most = trial, way, int(least.max(initial=0))
        over = [units[step] for step in np.flatnonzero(least > max(room, NEAR * most))]
        more = {(unit.calls[0].layer, unit.calls[0].op): unit.stop - unit.start - 1 for unit in over}
        trial = apart | {key: number for key, number in more.items() if number > 0}
        if trial == apart:
            break
        way = way_with(net, Less(apart=trial))
    net._have(best.made)
    return best, apart


def way_with(net: Net, less: Less, bring: bool = True) -> Way:
    """The calls by which less is in use; without bringing evicted state if not `bring`."""
    made = net._made(less, 1, bring)  # the copies have streams enough
    made.drawn = draft(net, made.schedules, made.kept)
    return way_of(net, made)


def way_of(net: Net, made: Made) -> Way:
    """The calls, drafted, of which whatever may be is evicted."""
    return Way(made, *candidates_in(net, made.forward, made.backward, made.places))


def candidates_in(
    net: Net, forward: Sequence[Call], backward: Sequence[Call], drawn: Draft
) -> tuple[list[Candidate], np.ndarray]:
    """What may be evicted, and the bytes in use in each step."""
    free = net._free({*memories((*forward, *backward))})
    pieces = [] if net._sliced is None else [piece.data_view.memory for piece in net._sliced.pieces]
    return candidates(forward, backward, drawn, free, table(net.device.family), pieces), loads(drawn)


def least_loads(net: Net, forward: Sequence[Call], backward: Sequence[Call], drawn: Draft) -> np.ndarray:
    """The bytes in use in each step, with all evicted that can be."""
    return loads_without(*candidates_in(net, forward, backward, drawn))
