"""The ways in which runs of layers take the batch in slices, for a net to do with less memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import SyncedMemory
from blobmem.memory.views import ALIGNMENT
from blobmem.net.layouts import channels_last
from blobmem.net.plan.abreast import Abreast, run_about
from blobmem.net.plan.again import Again, Less
from blobmem.net.plan.bringing import bring_state
from blobmem.net.plan.choice import Choice, Pass
from blobmem.net.plan.evict import loads_without, lowest
from blobmem.net.plan.parts import MOST_PARTS
from blobmem.net.plan.places import draft, drafted
from blobmem.net.plan.rooms import LEAST, in_rooms, rooms_of
from blobmem.net.plan.slicer import Slicer
from blobmem.net.plan.slices import Division, Runs, Sliced, Undivided, by_item
from blobmem.net.plan.times import Times
from blobmem.net.plan.ways import Made, Way, again_in, least_loads, usual_ways, way_of, way_with
from blobmem.net.schedule import Unit
from blobmem.ops.call import memories
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

KEPT = 3
"""How many numbers of slices to keep are tried, the largest that may fit and fewer."""

LARGE = 0.5
"""A layer is to take slices abreast with others where it needs more than such a part of the room."""

FEW = 0.125
"""But not where it needs no more than such a part of what is needed most."""

NEAR = 16
"""How many layers a run of such may be longer for less to cross its ends."""

CALLS = 4000
"""Of slices that go abreast, the calls of all layers: to plan more takes minutes."""

ENDS = 4
"""How many ends of a run are tried for one at which it can be divided."""

SMALL = 0.09
"""The part of the room that a slice of the largest array may take, and a convolution's workspace."""

TWICE = 0.25
"""The part of the room from which on what a batch norm reads is made twice."""

WELCOME = 0.3
"""What part of their time copies are reckoned to take where arrays beside the slices leave for their sake."""

SPLITS = 2
"""At how many places a run is split in two."""

PARTS = (2, 4, 8)
"""So many times fewer slices has the latter."""

HARDLY = 1.001
"""How many times as much a run may need that begins where less crosses."""

IDLE = 2
"""So many numbers of slices that are little better than those before it are the last."""


class Divisions:
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
        self._ends = set[Runs]()  # those to the end that were tried
        self._endings: dict[tuple[int, int], Division] = {}  # by where others begin, and in how many slices
        self._given = False  # whether divisions are, of which more is tried

    def ways(self, given: Sequence[Runs]) -> Iterator[Way]:
        """Those that are `given`; if none is, the fewest slices first, those that are reckoned to fit into the room
        without scratch, while more take less time, or else the one that needs least."""
        net = self._net
        again = again_in(net, net._made(Less(), 1))
        usual = min(usual_ways(net, again, {}, bring=False), key=lambda way: lowest(way.found, way.load)).made
        net._have(usual)
        if given:
            self._given = True
            yield from chain.from_iterable(self._both(usual, runs) for runs in given)
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
            ended = [*self._to_the_end(usual, slicer, [found.runs[0] for _, found in own])]
            tried += ended
            shortest = min(ended, key=itemgetter(0), default=None)
            if shortest is not None and shortest[0] <= self._room:
                yield from self._ended(usual, shortest[1].runs)
            for _, found in runs:
                yield from self._both(usual, found.runs)
            if self.best <= self._good:
                return
            reached = min(map(itemgetter(0), (*own, *ended)), default=math.inf)
            idle = idle + 1 if 0.97 * fastest < self.best < math.inf else 0
            if reached >= before or idle == IDLE:
                break  # smaller slices are no help
            before = reached
        if tried and self.best == math.inf:
            yield _way_in_slices(net, usual, min(tried, key=itemgetter(0))[1], self._room, 0.0)

    def _to_the_end(self, usual: Made, slicer: Slicer, runs: Sequence[Division]) -> Iterator[tuple[int, Sliced]]:
        """The calls in slices from where each of these runs begins to the end, with their gradients, and what they
        need: that may be less than the run itself does, as what they are given may leave."""
        for run in dict.fromkeys(self._ending(usual, each) for each in runs):
            found = slicer.sliced([run])
            if found is not None:
                yield _fullest(self._net, usual, found)[0], found

    def _ending(self, usual: Made, run: Division) -> Division:
        """As that begins, to the end, with gradients; or from a layer before it where less crosses, and would leave and
        come back, if that needs hardly more."""
        key = run.first, run.number
        if key not in self._endings:
            slicer = _slicer(self._net, usual)
            ending = Division(run.first, len(self._net.layer_names) - 1, run.number, 0, True)
            earlier = slicer.earlier(run.first)
            if earlier is not None:
                both = ending, ending._replace(first=earlier)
                least, need = (self._need(usual, slicer, each) for each in both)
                ending = both[need <= HARDLY * least and need < math.inf]
            self._endings[key] = ending
        return self._endings[key]

    def _need(self, usual: Made, slicer: Slicer, run: Division) -> float:
        """What the calls need with that run in slices; infinite if they allow none, or it cannot be told."""
        self._net._have(usual)
        found = slicer.sliced([run])
        if found is None:
            return math.inf
        try:
            way = _way_in_slices(self._net, usual, found, self._room, 0.0)
        except OutOfDeviceMemory:  # convolutions of so many items have not been timed, and cannot be now
            return math.inf
        return lowest(way.found, way.load)

    def _ended(self, usual: Made, runs: Runs) -> Iterator[Way]:
        """The calls so divided to the end, if they were not before."""
        if runs not in self._ends:
            self._ends.add(runs)
            yield from self._divided(usual, runs)

    def _both(self, usual: Made, runs: Runs) -> Iterator[Way]:
        """The calls so divided; first, once for each beginning of an only run, with slices to the end, each with its
        gradients, from a layer before it, too, where that may be better."""
        if len(runs) == 1:
            ending = self._ending(usual, runs[0])
            for first in dict.fromkeys((ending.first, runs[0].first)):
                yield from self._ended(usual, (ending._replace(first=first),))
        yield from self._divided(usual, runs)

    def _divided(self, usual: Made, runs: Runs) -> Iterator[Way]:
        """The usual calls so divided; with more made anew of what layers beside these make, where that does; and with
        as much of it made anew or evicted as the slices want."""
        layers = {layer for run in runs for layer in range(run.first, run.last + 1)}
        tried, failed = set[tuple[Any, ...]](), False  # the rooms that convolutions had
        most = list[int]()  # bytes that slices have in use with all that lies beside, of the usual calls first
        for made, away in self._bases(usual, layers, most):
            if made.anew or usual.anew:
                tried, failed = set(), False
            elif failed:
                continue  # these are just the same calls
            self._net._have(made)
            slicer = _slicer(self._net, made)
            found = slicer.sliced(runs)
            if found is None:
                continue
            calls = _InSlices(self._net, made, found, self._room)
            for part in (1.0, 0.5):
                before, rooms = self.best, calls.rooms(part)
                if rooms in tried:
                    continue  # which was no better, or is the best
                tried.add(rooms)
                try:
                    way = calls.way(rooms)
                except OutOfDeviceMemory:  # convolutions of so many items have not been timed, and cannot be now
                    failed = True
                    break
                most.append(int(way.load[_within(way.made, layers)].max(initial=0)))
                yield way._replace(away=away)
                if self.best < before:
                    if not runs[-1].at_once:
                        yield from self._with_kept(made, slicer, runs, found.nbytes, way)
                    break

    def _with_kept(self, made: Made, slicer: Slicer, runs: Runs, nbytes: int, way: Way) -> Iterator[Way]:
        """The calls so divided, which fit as a way, with as many slices of the first run kept as fit, too; one has so
        many bytes to be kept."""
        load = loads_without(way.found, way.load)[_kept_while(way.made)]
        kept = min(runs[0].number - 1, int(self._room - load.max(initial=0)) // max(nbytes, 1))
        for fewer in range(min(kept, KEPT)):
            before = self.best
            self._net._have(made)
            found = slicer.sliced([runs[0]._replace(kept=kept - fewer), *runs[1:]])
            if found is None:
                return  # the order of slices would not do
            yield _way_in_slices(self._net, made, found, self._room, 1.0)
            if self.best < before:
                return

    def _bases(
        self, usual: Made, layers: Container[int], most: Sequence[int]
    ) -> Iterator[tuple[Made, set[SyncedMemory] | None]]:
        """The calls that are divided, and what is evicted first of them; `most` is filled in meanwhile."""
        yield usual, None
        yield self._with_anew(layers), None
        if self._given:
            yield self._with_less(layers, next(iter(most), self._room))

    def _with_anew(self, layers: Container[int]) -> Made:
        """The calls, with what layers other than these make anew where that takes less time than to evict it."""
        choice, maker = self._choice
        anew = {memory for memory in choice.anew if maker[memory] not in layers}
        return self._net._made(Less(anew, choice.held), 1, bring=False)

    def _with_less(self, layers: Container[int], most: int) -> tuple[Made, set[SyncedMemory]]:
        """The calls, with what layers other than these make anew for want of room, where these, in slices, have `most`
        bytes in use with all that lies beside; and what is evicted for it."""
        net, plain, again = self._net, self._plain, self._again()
        inside = {at for at, each in enumerate(again.uses.forward) if each.layer in layers}
        again.offers = [memory for memory in again.offers if again.uses.last_write(memory) not in inside]
        found = [each for each in plain.found if inside.isdisjoint(each.written)]
        whole = Pass(again, plain.made.places, found, Times(net.device))
        within = _within(plain.made, layers)
        whole.load[within] = np.minimum(whole.load[within], most)
        choice = whole.choose(self._room, WELCOME)
        return net._made(Less(choice.anew, choice.held), 1, bring=False), choice.away

    @functools.cached_property
    def _plain(self) -> Way:
        """The whole batch, with nothing made anew."""
        return way_with(self._net, Less(), bring=False)

    def _again(self) -> Again:
        """What could be made anew of that."""
        self._net._have(self._plain.made)
        return again_in(self._net, self._plain.made)

    @functools.cached_property
    def _choice(self) -> tuple[Choice, dict[SyncedMemory, int]]:
        """What is made anew of the whole batch where copies are not welcome, and by which layers."""
        plain, again = self._plain, self._again()
        choice = Pass(again, plain.made.places, plain.found, Times(self._net.device)).choose(self._room, 1.0)
        calls = again.uses.forward
        return choice, {memory: calls[again.uses.last_write(memory)].layer for memory in choice.anew}


def runs_abreast(net: Net, room: int) -> list[Abreast]:
    """Runs of the layers that take more than a part of so many bytes, with all evicted that can be, and those between
    them, in slices that go abreast: so many that those of the largest array are small beside the room. Where least
    crosses their end comes first."""
    net.take_abreast(None)
    emitted, ops = net._emitted_with({}), table(net.device.family)
    made = net._made(Less(), 1, bring=False)
    load, calls = _reckoned(net, made), [*made.forward, *made.backward]
    about = run_about(emitted.forward, emitted.backward, calls[int(load.argmax())].layer, ops)
    most = max(LARGE * room, FEW * int(load.max()))
    over = [each.layer for each, nbytes in zip(calls, load, strict=True) if nbytes > most and each.layer in about]
    if not over:
        return []
    slicer, first, last = _slicer(net, made), min(over), max(over)
    first = min(reversed(range(max(about.start, first - NEAR), first + 1)), key=slicer.crossing)
    ends = sorted(range(last, min(about.stop, last + NEAR)), key=lambda at: slicer.crossing(at + 1))
    inside = [each for each in calls if first <= each.layer <= last]
    largest = max((operand.nbytes for each in inside for operand in by_item(each)), default=0)
    counts = [count for count in slicer.counts(inside[0].layer) if count <= min(MOST_PARTS, CALLS // len(inside))]
    small = int(SMALL * room)
    number = next((count for count in counts if largest <= small * count), max(counts, default=1))
    wide = 1 << max(LEAST, small).bit_length() - 1  # a power of two: each size wants searches
    scratch = wide if hasattr(net.device, "workspace_limit") else 0
    twice = int(TWICE * room)
    return [Abreast(first, end, number, twice, scratch, small) for end in ends[:ENDS]] if number > 1 else []


def _slicer(net: Net, made: Made) -> Slicer:
    free, ops = net._free({*memories((*made.forward, *made.backward))}), table(net.device.family)
    calls = made.forward, made.backward, made.remade
    return Slicer(Undivided(*calls, free, ops, Times(net.device), bool(net._images_last)))


def longer(net: Net, run: Division) -> list[int]:
    """To where a run of layers goes on for less to cross its end, if it can."""
    end = _slicer(net, net._made(Less(), 1, bring=False)).longer(run.last)
    return [] if end is None else [end]


def splits(net: Net, runs: Runs) -> Iterator[list[Runs]]:
    """The runs with one of them as two, where little crosses from one to the other: for each such place with the
    latter, of smaller arrays, in fewer and fewer slices, or whole."""
    slicer = _slicer(net, net._made(Less(), 1, bring=False))
    for at, run in enumerate(runs):
        crossing = [slicer.crossing(layer) for layer in range(run.first, run.last + 2)]
        places = range(1, len(crossing) - 1)
        ends = [run.first + each - 1 for each in places if crossing[each - 1] > crossing[each] <= crossing[each + 1]]
        for end in sorted(ends, key=slicer.crossing)[:SPLITS]:
            numbers = [run.number // part for part in PARTS if run.number % part == 0]
            rests = [[Division(end + 1, run.last, number)] if number > 1 else [] for number in numbers]
            yield [(*runs[:at], Division(run.first, end, run.number), *rest, *runs[at + 1 :]) for rest in rests]


def way_divided(net: Net, made: Made, division: Runs, rooms: tuple[tuple[Any, int], ...]) -> Way | None:
    """The calls in slices, and convolutions with rooms, as a `Recipe` has them; None if they cannot be."""
    net._have(made)
    found = _slicer(net, made).sliced(division)
    return None if found is None else _InSlices(net, made, found, 0).way(rooms)


def _way_in_slices(net: Net, made: Made, sliced: Sliced, room: int, part: float) -> Way:
    """The calls in slices, with those that bring evicted state; convolutions may take such a part of what arrays
    leave."""
    calls = _InSlices(net, made, sliced, room)
    return calls.way(calls.rooms(part))


class _InSlices:
    """The calls in slices, with those that bring evicted state, where there are so many bytes."""

    def __init__(self, net: Net, made: Made, sliced: Sliced, room: int) -> None:
        self._net, self._room = net, room
        self._made = bring_state(net, _with_slices(made, sliced))
        self._calls = [*self._made.forward, *self._made.backward]
        net._have(self._made)
        self._load = _reckoned(net, self._made) if hasattr(net.device, "workspace_limit") else None

    def rooms(self, part: float) -> tuple[tuple[Any, int], ...]:
        """What convolutions may take of each layer, by op, where they have such a part of what arrays leave."""
        if self._load is None:
            return ()
        least = int(self._load.max())
        most = least + int(part * max(0, self._room - least))
        return tuple(rooms_of(self._calls, self._load, most, few=True).items())

    def way(self, rooms: tuple[tuple[Any, int], ...]) -> Way:
        """These calls, convolutions with those rooms."""
        net, forward = self._net, len(self._made.forward)
        calls = in_rooms(self._calls, dict(rooms))
        sliced = self._made.sliced
        assert sliced is not None
        made = dataclasses.replace(
            self._made, forward=calls[:forward], backward=calls[forward:],
            recipe=self._made.recipe._replace(division=sliced.runs, rooms=rooms),
        )  # fmt: skip
        net._have(made)
        made.bound = net._scheduled(made.forward, made.backward, made.passing)
        made.drawn = draft(net, made.schedules, made.kept)
        return way_of(net, made)


def _within(made: Made, layers: Container[int]) -> list[int]:
    """The steps of these layers."""
    return [step for step, unit in enumerate(chain(*made.places.units)) if unit.calls[0].layer in layers]


def _kept_while(made: Made) -> slice:
    """The steps from the end of the first run's slices of forward to their beginning in backward."""
    assert made.sliced is not None
    first, last = made.sliced.layers[0]
    inside = _within(made, range(first, last + 1))
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
    made = bring_state(net, made if sliced is None else _with_slices(made, sliced), anywhere=True)
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
