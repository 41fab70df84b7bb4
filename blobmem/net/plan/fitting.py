"""Whether a net's arena fits into what its device has for it, and if not, by which calls it does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.devices.base import readable_bytes
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Parked
from blobmem.memory.views import ALIGNMENT
from blobmem.net.layouts import channels_last
from blobmem.net.needs import Need
from blobmem.net.plan.again import Again, Less
from blobmem.net.plan.choice import Choice, Pass
from blobmem.net.plan.evict import (
    Candidate,
    ahead,
    candidates,
    choose,
    evict,
    lingering,
    loads,
    loads_without,
    lowest,
    travelling,
)
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.places import Draft, draft, drafted
from blobmem.net.plan.recompute import usual as usual_set
from blobmem.net.plan.rooms import with_room
from blobmem.net.plan.rounds import walked
from blobmem.net.plan.slices import Division, Sliced, Slicer, in_the_way
from blobmem.net.plan.times import Times, reckon
from blobmem.net.plan.uses import Remade, Uses
from blobmem.net.schedule import Schedule, Unit
from blobmem.ops.call import Call, memories
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

PRICES = (0.03, 0.1, 0.3, 1.0, 9.0)
"""What part of their time copies are reckoned to take where the link has time for them, in plans that are compared."""

FAIR = 0.15
"""That for a net of `MANY` arrays, of which plans are not compared."""

COMPARED = 2
"""Of how many plans that are found so, those that may take least time, the calls are made and laid out."""

MANY = 1000
"""Of a net of so many arrays, or calls, no plans are compared: each takes seconds."""

SOME = 300
"""Of a net of so many arrays there are no rounds: each walk takes seconds."""

MANY_LIVES, GAPS = 2000, 64
"""Of a net of so many lifetimes such a part of the room is left for gaps: to lay its arrays out anew takes seconds."""

SHARES = (1.0, 0.0, math.inf)
"""How many times the usual share of a pass may be spent to make arrays anew, and the rest is evicted, if none fits."""

APART = 0.75
"""What needs more than such a part of the room, with all evicted that can be, does not run as one where it need not."""

NEAR = 0.9
"""Nor does what needs more than such a part of the most, where that is too much."""

TRIES = 8
"""How often a plan that came out too large, for the gaps in it, is made again with more evicted."""

KEPT = 3
"""How many numbers of slices to keep are tried, the largest that may fit and fewer."""

IDLE = 2
"""So many numbers of slices that are little better than those before it are the last."""

GOOD = 1.15
"""How many times as long as the usual calls a plan may be reckoned to take for no other kind of it to be tried, nor one
with rounds."""

SPREAD = 0.9
"""How much of the room arrays may take where pieces of state come and go all the while."""

EARLY = 0.97
"""How much of the room arrays may take that come back early: there have to be gaps."""

LINGERING = (1.0, 0.95, 0.9)
"""How much of it they may take that stay until they have left: the most with which all find a place."""


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
        anew: arrays that are made anew for want of room.
        state: which parameters and the like are evicted for it.
        ms: how long it is reckoned to take.
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
    anew: list[Blob] = dataclasses.field(default_factory=list)
    state: Sequence[SyncedMemory] = ()
    ms: float = 0.0

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


def fitting(net: Net, made: Made, good: float, slices: Sequence[Division] | None = None) -> Made:
    """The calls, drafted; by others, if they need more than the device may hold.

    Of all ways that fit, the one that is reckoned to take least time for what it does beside the usual calls; or with
    `slices` of the batch, of those in which a run of layers takes these, and the first that takes no more than `good`
    ms. Raises OutOfDeviceMemory, naming the least that would do, if none does.
    """
    made.drawn = draft(net, made.schedules, made.kept)
    most, times = net.device.most_bytes, Times(net.device)
    if most is None or net.forward_only:
        return made
    beside = _beside(net, made)
    room, usual = most - beside, made
    others, who = max(_sharers(net), key=itemgetter(0))
    if max(made.places.layout.nbytes, others) <= room and slices is None:
        made.ms = reckon(made.places, times).ms
        return made
    smallest, best, usual_ms = usual, None, reckon(usual.places, times).ms
    tight = int((SPREAD if net.spreads else 1.0 if slices is None else EARLY) * room)
    tight -= tight // GAPS if len(usual.places.lives.arena) >= MANY_LIVES else 0
    search = _Slices(net, tight if net.spreads else room, good)
    for way in _ways(net, tight, times) if slices is None else search.ways(slices):
        if not isinstance(way, _Way):
            if best is not None and best.ms <= way * usual_ms:
                break
            continue
        if lowest(way.found, way.load) > max(room, smallest.places.layout.nbytes):
            continue  # neither fits nor needs less than others
        for fitted in _evicted(net, way, (tight, room), 0 if slices is None else room, times):
            if max(fitted.places.layout.nbytes, others) <= room:
                fitted.ms = reckon(fitted.places, times).ms
                best = min(best or fitted, fitted, key=attrgetter("ms"))
                search.best = best.ms
                break
            smallest = min(smallest, fitted, key=lambda each: each.places.layout.nbytes)
    if best is not None:
        return best
    if others > smallest.places.layout.nbytes:
        raise _too_little_for(who, others, net, most, beside)
    raise _too_little(net, smallest, usual, most, beside)


def _sharers(net: Net) -> Iterator[tuple[int, str]]:
    """What others need of its arena, who have no other way, and who these are: nets that run forward alone, and updates
    that come after backward, with whose needs those of these nets are."""
    for other in net.group.members:
        if other.forward_only and other._arena is net._arena:
            other.compiled()
            yield other.plan_bytes, str(other.identity)
    arena, needs = net.arena_memory(), net.beside()
    yield (
        max((need.nbytes for need in (() if needs is None else needs()) if need.memory is arena), default=0),
        "updates",
    )


Apart = Mapping[tuple[int, Any], int]
"""How many calls may run as one from a layer's calls of an op on."""


class _Way(NamedTuple):
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


def _ways(net: Net, room: int, times: Times) -> Iterator[_Way | float]:
    """The ways that are compared, and behind them those that may take less room, which are the same for any room: what
    an error says would do then does. Before those that are only made for want of others comes how many times as long as
    without a limit one of these may take for that."""
    if room > 0:
        plain, apart = _apart(net, APART * room)
        whole = Pass(_again(net, plain.made), plain.made.places, plain.found, times)
        yield from _chosen_ways(net, whole, apart, room)
        yield GOOD
        if lowest(plain.found, plain.load) <= room and len(whole.arrays) < SOME:
            found = walked(whole, room)
            if found.over <= 0:
                yield _way(net, Less((), whole.held, found.rounds, apart))._replace(away={*found.away})
        yield math.inf
    plain, apart = _apart(net, 0)
    again = _again(net, plain.made)
    for way in _usual_ways(net, again, apart):
        yield way
        yield math.inf
    for price in PRICES[-1:]:
        yield _chosen_way(net, Pass(again, plain.made.places, plain.found, times).choose(0, price), apart)


def _chosen_ways(net: Net, whole: Pass, apart: Apart, room: int) -> Iterator[_Way]:
    """Those by which arrays are chosen that are made anew, once each, with room for them as far as is known: what is
    reckoned to take least time comes first."""
    if len(whole.arrays) < MANY:
        ways = itertools.product(PRICES, (False, True), (0, 1))
        found = [whole.choose(room, price, sparing, power) for price, sparing, power in ways]
    else:
        found = [whole.choose(room, FAIR, True)]
    found.sort(key=lambda each: (max(0, each.over), each.ms))
    seen: list[Choice] = []
    for choice in found:
        if choice not in seen and len(seen) < COMPARED:
            seen.append(choice)
            way = _chosen_way(net, choice, apart)
            if lowest(way.found, way.load) > room:
                break  # nor has any other
            yield way


def _chosen_way(net: Net, choice: Choice, apart: Apart) -> _Way:
    return _way(net, Less(choice.anew, choice.held, (), apart))._replace(away=choice.away)


def _again(net: Net, made: Made) -> Again:
    """What could be made anew of these calls."""
    ops, passes = table(net.device.family), (made.forward, made.backward)
    free, uses = net._free({*memories(chain(*passes))}), Uses(*passes, ops)
    if made.again is not None:  # updates of parameters wait for all that reads these
        uses.changed = made.again.uses.changed
    return Again(uses, free, ops)


def _usual_ways(net: Net, again: Again, apart: Apart, bring: bool = True) -> Iterator[_Way]:
    """The usual calls, or with more or nothing made anew, in which anything may be evicted."""
    for share in SHARES:
        yield _way(net, Less(usual_set(again.uses, again.free, share), apart=apart), bring)


def _apart(net: Net, room: float) -> tuple[_Way, Apart]:
    """The calls with nothing made anew, and how many of them may run as one, where with all evicted that can be so much
    room does not do for more."""
    apart, best, most = dict[tuple[int, Any], int](), _way(net, Less()), math.inf
    way, trial = best, apart
    while True:
        least, units = loads_without(way.found, way.load), [*chain(*way.made.places.units)]
        if least.max(initial=0) >= most:
            return best, apart  # what is apart since then is no help
        apart, best, most = trial, way, int(least.max(initial=0))
        over = [units[step] for step in np.flatnonzero(least > max(room, NEAR * most))]
        more = {(unit.calls[0].layer, unit.calls[0].op): unit.stop - unit.start - 1 for unit in over}
        trial = apart | {key: number for key, number in more.items() if number > 0}
        if trial == apart:
            return best, apart
        way = _way(net, Less(apart=trial))


def _way(net: Net, less: Less, bring: bool = True) -> _Way:
    """The calls by which less is in use; without bringing evicted state if not `bring`."""
    made = net._made(less, 1, bring)  # the copies have streams enough
    made.drawn = draft(net, made.schedules, made.kept)
    return _Way(made, *_candidates(net, made.forward, made.backward, made.places))


def _candidates(
    net: Net, forward: Sequence[Call], backward: Sequence[Call], drawn: Draft
) -> tuple[list[Candidate], np.ndarray]:
    """What may be evicted, and the bytes in use in each step."""
    free = net._free({*memories((*forward, *backward))})
    return candidates(forward, backward, drawn, free, table(net.device.family)), loads(drawn)


def least_loads(net: Net, forward: Sequence[Call], backward: Sequence[Call], drawn: Draft) -> np.ndarray:
    """The bytes in use in each step, with all evicted that can be."""
    return loads_without(*_candidates(net, forward, backward, drawn))


class _Slices:
    """Ways in which a run of layers next to the fullest moment takes the batch in slices.

    Args:
        net: whose calls these are.
        room: bytes that there are.
        good: so many ms are good enough.

    Attributes:
        best: the ms of the best that has been found to fit.
    """

    def __init__(self, net: Net, room: int, good: float) -> None:
        self._net, self._room, self._good, self.best = net, room, good, math.inf

    def ways(self, given: Sequence[Division]) -> Iterator[_Way]:
        """Those that are `given`; if none is, the fewest slices first, those that are reckoned to fit into the room
        without scratch, while more take less time, or else the one that needs least."""
        net = self._net
        again = _again(net, _way(net, Less()).made)
        usual = min(_usual_ways(net, again, {}, bring=False), key=lambda way: lowest(way.found, way.load)).made
        net._have(usual)
        if given:
            yield from chain.from_iterable(self._both(usual, division) for division in given)
            return
        slicer, layer, tried = _slicer(net, usual), _fullest(net, usual)[1], list[tuple[int, Sliced]]()
        before, idle = math.inf, 0
        for count in slicer.counts(layer):
            own, fastest = [*slicer.runs(layer, count, lambda found: _fullest(net, usual, found))], self.best
            tried += own
            # what lies last need not end where another could begin
            runs = [each for each in own if each[0] - self._room < ALIGNMENT]
            if len(runs) > 1:  # the shortest, that which needs least, and one more layer than that
                least = min(range(1, len(runs)), key=lambda at: runs[at][0])
                runs = [runs[0], *runs[least : least + 2]]
            for _, found in runs:
                yield from self._both(usual, (*found.layers, count))
            if self.best <= self._good:
                return
            reached = min(map(itemgetter(0), own), default=math.inf)
            idle = idle + 1 if 0.97 * fastest < self.best < math.inf else 0
            if reached >= before or idle == IDLE:
                break  # smaller slices are no help
            before = reached
        if tried and self.best == math.inf:
            yield _way_in_slices(net, usual, min(tried, key=itemgetter(0))[1], self._room, 0.0)

    def _both(self, usual: Made, division: Division) -> Iterator[_Way]:
        """The usual calls so divided, and with more made anew of what layers beside these make, where that does."""
        for made in (usual, self._with_anew(*division[:2])):
            self._net._have(made)
            found = _slicer(self._net, made).sliced(*division)
            if found is None:
                continue
            for part in (1.0, 0.5):
                before = self.best
                try:
                    way = _way_in_slices(self._net, made, found, self._room, part)
                except OutOfDeviceMemory:  # convolutions of so many items have not been timed, and cannot be now
                    break
                yield way
                if self.best < before:
                    yield from self._with_kept(made, division, found.nbytes, way)
                    break

    def _with_kept(self, made: Made, division: Division, nbytes: int, way: _Way) -> Iterator[_Way]:
        """The calls so divided, which fit as a way, with as many slices kept as fit, too, each of which takes so many
        bytes."""
        load = loads_without(way.found, way.load)[_kept_while(way.made)]
        kept = min(division[2] - 1, int(self._room - load.max(initial=0)) // max(nbytes, 1))
        for fewer in range(min(kept, KEPT)):
            before = self.best
            self._net._have(made)
            found = _slicer(self._net, made).sliced(*division, kept - fewer)
            assert found is not None
            yield _way_in_slices(self._net, made, found, self._room, 1.0)
            if self.best < before:
                return

    def _with_anew(self, first: int, last: int) -> Made:
        """The calls, with what layers other than these make anew where that takes less time than to evict it."""
        choice, maker = self._choice
        anew = {memory for memory in choice.anew if not first <= maker[memory] <= last}
        return _way(self._net, Less(anew, choice.held), bring=False).made

    @functools.cached_property
    def _choice(self) -> tuple[Choice, dict[SyncedMemory, int]]:
        """What is made anew of the whole batch where copies are not welcome, and by which layers."""
        plain = _way(self._net, Less(), bring=False)
        again = _again(self._net, plain.made)
        choice = Pass(again, plain.made.places, plain.found, Times(self._net.device)).choose(self._room, 1.0)
        calls = again.uses.forward
        return choice, {memory: calls[again.uses.last_write(memory)].layer for memory in choice.anew}


def _slicer(net: Net, made: Made) -> Slicer:
    free, ops = net._free({*memories((*made.forward, *made.backward))}), table(net.device.family)
    return Slicer(made.forward, made.backward, made.remade, free, ops, bool(net._images_last))


def longer(net: Net, layers: tuple[int, int]) -> list[tuple[int, int]]:
    """The run of layers that goes on to where less crosses its end, if there is one."""
    first, last = layers
    end = _slicer(net, net._made(Less(), 1, bring=False)).longer(last)
    return [] if end is None else [(first, end)]


def _way_in_slices(net: Net, made: Made, sliced: Sliced, room: int, part: float) -> _Way:
    """The calls in slices, with those that bring evicted state; convolutions may take such a part of what arrays
    leave."""
    made = net._bring(_with_slices(made, sliced))
    net._have(made)
    if hasattr(net.device, "workspace_limit"):
        load, forward = _reckoned(net, made), len(made.forward)
        most = int(load.max()) + int(part * max(0, room - int(load.max())))
        calls = with_room([*made.forward, *made.backward], load, most, few=True)
        made.forward, made.backward = calls[:forward], calls[forward:]
    made.bound = net._scheduled(made.forward, made.backward, made.passing)
    made.drawn = draft(net, made.schedules, made.kept)
    return _Way(made, *_candidates(net, made.forward, made.backward, made.places))


def _kept_while(made: Made) -> slice:
    """The steps from the end of the slices of forward to their beginning in backward."""
    assert made.sliced is not None
    first, last = made.sliced.layers
    units = [*chain(*made.places.units)]
    inside = [step for step, unit in enumerate(units) if first <= unit.calls[0].layer <= last]
    turn = len(made.places.units[0])
    begin = max((step + 1 for step in inside if step < turn), default=turn)
    return slice(begin, min((step for step in inside if step >= turn), default=begin))


def _with_slices(made: Made, sliced: Sliced) -> Made:
    return dataclasses.replace(
        made, forward=sliced.forward, backward=sliced.backward, remade=sliced.remade, sliced=sliced
    )


def _fullest(net: Net, made: Made, sliced: Sliced | None = None) -> tuple[int, int]:
    """The most bytes in use, scratch apart, with all evicted that can be, and the layer whose call uses them; with a
    run of layers in slices, if one is given."""
    made = net._bring(made if sliced is None else _with_slices(made, sliced), anywhere=True)
    net._have(made)
    load = _reckoned(net, made)
    step = int(load.argmax())
    return int(load[step]), [*made.forward, *made.backward][step].layer


def _reckoned(net: Net, made: Made) -> np.ndarray:
    """The bytes in use at each call, scratch apart, with all evicted that can be; the calls are taken one by one, none
    of them bound to the device: that may choose algorithms."""
    ops, last = table(net.device.family), net._images_last
    passes = [channels_last(calls) if last else calls for calls in (made.forward, made.backward)]
    units = [[Unit(at, at + 1, [each], 0, each.op not in ops) for at, each in enumerate(calls)] for calls in passes]
    return least_loads(net, made.forward, made.backward, drafted(net, units, made.kept))


def room_of(net: Net, made: Made) -> int:
    """Bytes that there are for the arena, on a device that has a limit."""
    assert net.device.most_bytes is not None
    return net.device.most_bytes - _beside(net, made)


def _beside(net: Net, made: Made) -> int:
    """Bytes that all but the arena takes of the device, by the time that the nets have run."""
    assert net._arena is not None
    arena = net._arena.memory(net.device)
    within = {arena, *(life.key for life in _own(made.places))}
    needs = net.beside()
    taking = [_outside(made.schedules, within), _most(needs() if needs is not None else (), within)]
    for other in net.group.members:
        if other is not net and other.device is net.device and (other.forward_only or other._schedules is not None):
            taking.append(_outside(other.compiled(), {arena}))
    taken = {memory: max(each.get(memory, 0) for each in taking) for memory in chain.from_iterable(taking)}
    more = sum(max(0, nbytes - memory.gpu_capacity) for memory, nbytes in taken.items())
    return net.device.statistics.bytes_held - arena.gpu_capacity + more


def _outside(schedules: Iterable[Schedule], arena: Container[Any]) -> dict[SyncedMemory, int]:
    """Bytes on the device of each memory that is not in the arena."""
    return _most((need for schedule in schedules for need in schedule.blob_needs()), arena)


def _most(needs: Iterable[Need], arena: Container[Any]) -> dict[SyncedMemory, int]:
    taken: dict[SyncedMemory, int] = {}
    for memory, side, nbytes in needs:
        if side is Side.DEVICE and memory not in arena:
            taken[memory] = max(taken.get(memory, 0), nbytes)
    return taken


def _evicted(net: Net, way: _Way, rooms: tuple[int, int], most: int, times: Times) -> Iterator[Made]:
    """The calls with as little evicted as makes them fit into the first of the rooms by their loads; then with more and
    more, for the gaps in a plan, and at last with all. Each time with what comes back early, and without. If none can
    fit, the least. If `most` is not 0, an arena of so many bytes is small enough, but the last is as small as can be.
    """
    floor, room = lowest(way.found, way.load), rooms[0]
    target, chosen = max(room, floor), None
    for _ in range(TRIES):
        before, chosen = chosen, choose(way.found, way.load, target, way.away or ())
        if chosen != before:
            if floor <= room:
                yield _without(net, way, chosen, times, most, rooms)
            trial = _without(net, way, chosen, times, most)
            yield trial
        if target == floor:
            break
        target = max(floor, target - max(trial.places.layout.nbytes - room, room // 64))
    else:
        yield _without(net, way, choose(way.found, way.load, floor, way.away or ()), times, most)
    yield _without(net, way, way.found, times)  # as small as can be


def _without(
    net: Net, way: _Way, chosen: Sequence[Candidate], times: Times, most: int = 0, rooms: tuple[int, int] = (0, 0)
) -> Made:
    """The calls with these arrays evicted; in the first of the rooms by their loads, and the second as they are laid
    out, these come back as early as their copies want, and stay until they have left."""
    made, device = way.made, net.device
    first, starts = len(made.places.units[0]), [unit.start for unit in made.places.units[1]]
    soon = ahead(chosen, way.load, made.places, times, int(EARLY * rooms[0]))
    early = {each: starts[step - first] for each, step in soon.items()}
    places = made.schedules[0].joints(), made.schedules[1].joints()
    found = evict(made.forward, made.backward, chosen, places, made.remade, device, early)
    fetched = [*made.fetched, *found.fetched]
    net._have(dataclasses.replace(made, fetched=fetched))
    schedules = net._scheduled(found.forward, found.backward, made.passing)
    drawn = draft(net, schedules, made.kept)
    drawn.enough = most
    if rooms[0]:
        longer = (lingering(drawn, times, int(part * rooms[0])) for part in LINGERING)
        drawn = next((each for each in longer if each.layout.nbytes <= rooms[1]), drawn)
    return dataclasses.replace(
        made, forward=found.forward, backward=found.backward, remade=found.remade, bound=schedules, drawn=drawn,
        homes=found.homes, fetched=fetched, evicted=travelling(chosen),
    )  # fmt: skip


def _too_little(net: Net, least: Made, usual: Made, most: int, beside: int) -> OutOfDeviceMemory:
    """What to say where no plan fits into the `most` bytes that there may be; `least` is the smallest of them, and
    `usual` are the calls of a whole batch."""
    needed = beside + least.places.layout.nbytes
    units = list(chain.from_iterable(least.places.units))
    load = loads(least.places)
    step = int(load.argmax())
    here = [life for life in _own(least.places) if life.first <= step <= life.last]
    largest = max(here, key=lambda life: life.nbytes)
    layer = units[step].calls[0].layer_name
    what = f"'{largest.key.name}'" if isinstance(largest.key, SyncedMemory) else "its scratch"
    how, why = _about_slices(net, least, usual, units[step].calls[0].layer)
    return OutOfDeviceMemory(
        f"{net.identity} needs at least {needed} bytes on the {net.device.name} device, which may hold {most}, even "
        f"with all evicted that can be{how}: beside {readable_bytes(beside)} that stay there, layer '{layer}' sets "
        f"that, whose largest array is {what} ({readable_bytes(largest.nbytes)}).{why} Grant that much, or take a "
        "smaller batch",
        needed, most - net.device.statistics.bytes_held, most, net.device.holders(),
    )  # fmt: skip


def _about_slices(net: Net, least: Made, usual: Made, layer: int) -> tuple[str, str]:
    """How the batch is taken in slices, and which layer is in the way of more, if one is; `layer` needs most."""
    how = ""
    found = in_the_way(usual.forward, usual.backward, layer, table(net.device.family))
    if least.sliced is not None:
        first, last = least.sliced.layers
        run = f"layers '{net.layer_names[first]}' to '{net.layer_names[last]}'"
        how = f" and {run} in {least.sliced.number} slices of the batch"
        if found is not None and found.layer != layer and not first - 1 <= found.layer <= last + 1:
            found = None  # it has not come to that
    if found is None or "slices" not in net.passes:
        return how, ""
    return how, f" Layer '{found.layer_name}' takes no slices of the batch, for '{found.op}'."


def _too_little_for(who: str, nbytes: int, net: Net, most: int, beside: int) -> OutOfDeviceMemory:
    """What to say where others need more of a net's arena than there may be."""
    needed = beside + nbytes
    return OutOfDeviceMemory(
        f"{who}, beside {net.identity}, needs at least {needed} bytes on the {net.device.name} device, which may hold "
        f"{most}: {readable_bytes(nbytes)} for its arrays, and {readable_bytes(beside)} that stay there. Grant that "
        f"much, or take a smaller batch there",
        needed, most - net.device.statistics.bytes_held, most, net.device.holders(),
    )  # fmt: skip


def _own(drawn: Draft) -> Iterator[Lifetime]:
    """The lifetimes, of arrays that take over each other's bytes one by one."""
    for life in drawn.lives.arena:
        yield from drawn.lives.turns.get(life.key, [life])
