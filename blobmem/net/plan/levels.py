"""How much of a net's state and inputs is evicted, and when it comes, where its plan would not fit, or is slow."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Container, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blobmem.devices.base import readable_bytes
from blobmem.devices.pages import round_up
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import SyncedMemory
from blobmem.memory.slot import Slot
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.divisions import longer, runs_abreast, splits
from blobmem.net.plan.fitting import fits, fitting, forward_fitting, room_of, settle
from blobmem.net.plan.places import draft
from blobmem.net.plan.recipes import Kept
from blobmem.net.plan.slices import Runs, times_as_many
from blobmem.net.plan.sooner import refined, sooner
from blobmem.net.plan.state import is_torn, staying, whiles_of
from blobmem.net.plan.times import COPIES, Times, reckon
from blobmem.net.plan.ways import GOOD, MANY, Made, glance
from blobmem.ops.call import Call
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

log = logging.getLogger("blobmem")

FROM = 1 << 12
"""Bytes of an array from which it may be evicted."""

LEVELS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the bytes of all that may be evicted that are tried."""

MOST = 0.9
"""The same, where a plan need not give the same bits: the last tenth may have room where it takes long to copy."""

FEWER = (1, 2, 4, 8)
"""So many times fewer slices of the batch than are known to fit are tried where updates are spread."""

LITTLE = 10
"""All of it is little where so many times as much is less than the bytes that are lacking."""

SOME = 0.75
"""The part of little state that is tried, with updates where they are."""

PART = 0.8
"""What part of the time that copies of state take they are reckoned to add, where a plan of it is not made yet."""

NEARLY = 1.1
"""So many times as long as the least so far may what is reckoned take for a plan of it to be made and laid out, too, or
one with some of its state staying."""

ABREAST = 2
"""How many plans with slices abreast are made."""

REFINED, CLOSE = 4, 1.05
"""How many plans that take no more than so many times as long as the best are looked at longer."""

WARM, COOLER = 1e-3, 5e-4
"""The heat of that (`sooner.refined`), and of a look from the best of these on."""

SPREADS = (0.9, 0.8)
"""How much of the room arrays may take where pieces of state come and go all the while: the first, or any where some of
it stays."""

ALL = 1.0
"""The same beside slices abreast, as rounds take less of it (`ways.BESIDE`)."""

STAYING = (0.125, 0.25, 0.375)
"""Parts of the room that are tried for state that stays, while more makes it less."""

MUCH = 0.4
"""Copies that take such a part of a step are worth making fewer."""

WORTH = 1.02
"""How many times as long as reckoned a plan that evicts state counts as taking: it has to be better by that."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """What may be evicted.

    Attributes:
        memory, size: which, and its bytes in an arena.
        ms: what its copies take in an iteration.
    """

    memory: SyncedMemory
    size: int
    ms: float


def fit(net: Net, made: Made) -> Made:
    """`fitting` of a net's calls; where none of these fits, or they would take long, with part of its state evicted, or
    a run of layers in slices of the batch.

    Raises OutOfDeviceMemory, naming the least that would do, if not even all of it is enough.
    """
    if net.forward_only:
        return forward_fitting(net, made)
    found = _fitted(net, made)
    if found is not made:
        _tell(net, found, made.places.layout.nbytes)
        net.streams, net.open_streams = 1, None  # which is not to be tried on two
    if net.device.most_bytes is not None:
        settle(net, found)
        net.trim_arena(room_of(net, found))  # a plan with less beside it may have had more
    return found


def _tell(net: Net, found: Made, wanted: int) -> None:
    """Log what is done for want of memory; without a limit the arena would take so many bytes."""
    log.info(
        "%s has room for %s of the %s that it would take: %d arrays are made anew, %s leave the device or come back in "
        "a pass, which is reckoned to take %.1f ms",
        net.identity, readable_bytes(room_of(net, found)), readable_bytes(wanted), len(found.anew),
        readable_bytes(found.evicted), found.ms,
    )  # fmt: skip
    if found.sliced is not None:
        log.info(
            "%s takes %s of the batch, for want of memory: its numbers are those of the whole batch to rounding",
            net.identity, found.sliced.told(net.layer_names),
        )  # fmt: skip
    if found.state:
        log.info(
            "%s has %d arrays of its parameters, solver state and inputs on the device only while they are used",
            net.identity, len(found.state),
        )  # fmt: skip


def _fitted(net: Net, made: Made) -> Made:
    """Of the calls that fit, those that are reckoned to take least time, with slices of the batch if those without are
    not good; where bits matter more than that, slices are for where nothing else fits."""
    if fits(net, made):
        return made
    if net.take_sources():
        made = net._made()
    made.drawn = made.drawn or draft(net, made.schedules, made.kept)
    kept = Kept(net, made, [*_state_of(net)]) if hasattr(net.device, "model") else None
    best = None if kept is None else kept.find()
    if best is None:
        best = _searched(net, made)
        if kept is not None:
            kept.keep(best)
    net.evict_state(best.state)
    net.brings = {*best.state}
    return best


def _searched(net: Net, made: Made) -> Made:
    """The best that a search finds."""
    best = _fits(net, made)
    try:
        if best is not made:
            best = _Search(net, made, best).run()
        if isinstance(best, OutOfDeviceMemory):
            net.evict_state({})
            raise best
        return best
    finally:
        del best  # which would keep itself, if it is an error, by its frames


class _Search:
    """For the best that a net's calls come to with some of its state evicted.

    Args:
        net, made: whose calls these are.
        best: what they come to with none.
    """

    def __init__(self, net: Net, made: Made, best: Made | OutOfDeviceMemory) -> None:
        self._net, self._made, self._best = net, made, best
        self._exact = getattr(net.device, "deterministic", True)
        self._slices = "slices" in net.passes and not net._dynamic
        self._many = len(made.forward) + len(made.backward) >= MANY
        self._good = GOOD * reckon(made.places, Times(net.device)).ms
        candidates, lacking = _candidates(net, made), made.places.layout.nbytes - room_of(net, made)
        inputs = {net.blobs[name].data_view.memory for name in net.inputs}
        self._state = state = [each for each in candidates if each.memory not in inputs]
        self._much = sum(each.size for each in state) * LITTLE > lacking
        self._levels = [*dict.fromkeys(_first(state, part) for part in LEVELS)]
        self._some, self._most = _first(state, SOME), _first(state, MOST)
        self._all = self._levels[-1] if len(state) == len(candidates) else tuple(candidates)
        self._found = {id(best): best} if isinstance(best, Made) else {}  # the best of each that was tried, if it fits

    def run(self) -> Made | OutOfDeviceMemory:
        """The best; of errors that which needs least."""
        net, good = self._net, self._good
        if self._slices and not self._exact and self._is_slow and not (self._is_found and self._many):
            self._best = self._best_of([_in_less(net, good, self._best)])
        for sliced in (False, True) if self._slices else (False,):
            if self._may_be(sliced):
                self._try_levels(sliced)
        if not self._exact and self._is_slow:
            fastest = dict[int, Made]()  # by how much state they evict
            for each in self._near(NEARLY):
                fastest[len(each.state)] = min(fastest.get(len(each.state), each), each, key=attrgetter("ms"))
            self._best = self._best_of([_staying(net, each, good) for each in fastest.values()])
            if isinstance(self._best, Made) and not self._many:
                self._best = self._best_of([_split(net, self._best, good)])
        if self._slices and self._is_slow and not (self._is_found and (self._exact or self._many)):
            states = dict.fromkeys(((), *(self._levels if self._much else self._levels[1::2]), self._all))
            self._best = self._best_of(_abreast(net, self._made, [*states], good, self._best))
        if isinstance(self._best, Made) and self._is_slow:
            self._refine()
        return self._best

    def _best_of(self, found: Sequence[Made | OutOfDeviceMemory]) -> Made | OutOfDeviceMemory:
        """The best of these and of what was found before."""
        self._found |= {id(each): each for each in found if isinstance(each, Made)}
        return min([self._best, *found], key=self._rank)

    def _near(self, times: float) -> list[Made]:
        """Those that were found which take no more than so many times as long as the best."""
        return [each for each in self._found.values() if each.ms <= times * getattr(self._best, "ms", math.inf)]

    def _refine(self) -> None:
        """Look longer at what is near the best, which then is one of these, and longer still at that."""
        for each in sorted(self._near(CLOSE), key=self._rank)[:REFINED]:
            self._look_longer(each, WARM)
        assert isinstance(self._best, Made)  # as before
        self._look_longer(self._best, COOLER)

    def _look_longer(self, made: Made, heat: float) -> None:
        """Look longer from one of these on, which is the best if that makes it so."""
        self._net.evict_state(made.state, made.spread)
        self._best = min(self._best, refined(self._net, made, heat), key=self._rank)

    @property
    def _is_found(self) -> bool:
        """Whether any fits."""
        return isinstance(self._best, Made)

    @property
    def _is_slow(self) -> bool:
        """Whether the best does not fit, or takes long."""
        return not isinstance(self._best, Made) or self._best.ms > self._good

    def _may_be(self, sliced: bool) -> bool:
        """Whether there may be a better one in slices, or without: not if the best is of the other kind, but where that
        is slow."""
        if not isinstance(self._best, Made) or sliced == (self._best.sliced is not None):
            return True
        return self._is_slow and self._much and not self._many and not self._exact

    def _try_levels(self, sliced: bool) -> None:
        """Evict more and more state: with updates spread, and where they are, too, but of many calls only if that was a
        help; where it is little, with updates where they are. If nothing fits, all of it first, which needs least, and
        with updates where they are if spread ones are no help; of many calls less and less then, while that helps."""
        if sliced and self._exact:
            self._try((), False, sliced)
        needed = self._best.requested if isinstance(self._best, OutOfDeviceMemory) else 0
        if needed:
            self._try(self._all, False, sliced)
        most = [] if self._exact else [self._most]
        compared = [*self._levels[:-1], *most, *dict.fromkeys([self._levels[-1], self._all])]
        less, first = self._many and not sliced and needed > 0, self._best
        if less:  # what takes longest to plan, as most is made anew, is then seldom tried
            compared.reverse()
        for level in (compared if self._much else [self._some]) if self._is_found else ():
            if isinstance(self._best, Made) and not (less or self._is_slow) and len(self._best.state) <= len(level):
                break
            if needed - sum(each.size for each in level) > (self._net.device.most_bytes or 0):
                continue
            better = self._try(level, self._much, sliced)
            both = better or not self._many if not needed else not better and level is not self._all
            if self._much and both:
                self._try(level, False, sliced)
            if self._many and not sliced and not better and (not less or self._best is not first):
                break  # to evict more, or less, would take longer still
        if self._much and not self._exact and isinstance(self._best, Made):
            self._try_between(self._best, sliced)

    def _try_between(self, best: Made, sliced: bool) -> None:
        """Evict what is half way from the state that the best evicts to the next that was tried, less and more."""
        parts = sorted({*LEVELS, MOST})
        known = [len(_first(self._state, part)) for part in parts]
        if not self._is_slow or sliced != (best.sliced is not None) or len(best.state) not in known:
            return
        at = known.index(len(best.state))
        for near in (*parts[:at][-1:], *parts[at + 1 :][:1]):
            level = _first(self._state, (parts[at] + near) / 2)
            if len(level) not in known:
                self._try(level, best.spread > 0, sliced)

    def _try(self, level: Sequence[_Candidate], spread: bool, sliced: bool) -> bool:
        """Whether with so much evicted there is a better one, which then is the best."""
        self._net.evict_state({each.memory: 0 for each in level}, SPREADS[0] if spread else 0.0)
        near = NEARLY * getattr(self._best, "ms", math.inf)
        found, before = _in_less(self._net, self._good, self._best if sliced else None, near), self._best
        self._best = self._best_of([found])
        return self._best is not before

    def _rank(self, found: Made | OutOfDeviceMemory) -> tuple[bool, float, int]:
        return _rank(found, self._good)


def _split(net: Net, found: Made, good: float) -> Made:
    """The calls, with runs in slices as several, each in as many as it wants, while that makes them take less time."""
    best = found
    while best.sliced is not None and best.ms > good:
        net.evict_state(best.state, best.spread)
        better = best
        for several in splits(net, best.sliced.runs):
            before = math.inf
            for runs in several:
                tried = _fits(net, net._made(streams=1), good, [runs], NEARLY * best.ms)
                if not isinstance(tried, Made) or tried.ms >= before:
                    break  # still fewer slices need more
                before = tried.ms
                if not is_torn([*tried.forward, *tried.backward]):
                    better = min(better, tried, key=lambda each: _rank(each, good))
        if better is best:
            break
        best = better
    return best


def _staying(net: Net, found: Made, good: float) -> Made:
    """The calls, with some of the state that comes and goes in pieces on the device for good, where copies take much of
    the time and that makes it less."""
    if not found.state or not net.updates_in_backward:
        return found
    times = Times(net.device)
    copies = [unit.calls[-1] for unit in chain(*found.places.units) if unit.calls[-1].op in COPIES]
    if max(sum(times.ms(each) for each in copies if each.op == way) for way in COPIES) < MUCH * found.ms:
        return found
    room, state, slices, best = room_of(net, found), dict.fromkeys(found.state, 0), None, found
    if found.sliced is not None:
        slices = _or_longer(net, [times_as_many(found.sliced.runs, more) for more in (1, 2)], True)
    for spread in SPREADS if found.spread else (0.0,):
        before = math.inf
        for part in STAYING:
            stays = staying(copies, part * room)
            if not any(stays.values()):
                continue
            net.evict_state(state | stays, spread)
            tried = _fits(net, net._made(streams=1), good, slices, NEARLY * best.ms)
            if not isinstance(tried, Made) or tried.ms >= before or is_torn([*tried.forward, *tried.backward]):
                break  # there is too little room beside
            before, best = tried.ms, min(best, tried, key=lambda each: _rank(each, good))
    return best


def _abreast(
    net: Net, made: Made, levels: Sequence[Sequence[_Candidate]], good: float, best: Made | OutOfDeviceMemory
) -> list[Made | OutOfDeviceMemory]:
    """`_fits` with a run of layers in slices abreast, and those levels of state evicted with which it seems best, where
    they may be better than the `best` so far; if none fits, and that does not, as it needs least too."""
    seen, room, times = list[tuple[int, float, int]](), room_of(net, made), Times(net.device)
    for at, level in enumerate(levels):
        trial = _take_abreast(net, level, ALL, room + sum(each.size for each in level))
        if trial is not None:
            trial.drawn = draft(net, trial.schedules, trial.kept)
            over, ms = glance(net, room_of(net, trial), times)
            seen.append((over, ms + PART * sum(each.ms for each in level), at))
    result, most_ms = list[Made | OutOfDeviceMemory](), getattr(best, "ms", math.inf)
    seen.sort()
    for at in [at for over, ms, at in seen[:ABREAST] if (over, ms) <= (seen[0][0], NEARLY * seen[0][1])]:
        trial = _take_abreast(net, levels[at], ALL, room + sum(each.size for each in levels[at]))
        assert trial is not None  # as before
        result.append(_fits(net, trial, good, most_ms=most_ms))
        most_ms = min(most_ms, getattr(result[-1], "ms", math.inf))
    if most_ms == math.inf:
        trial = _take_abreast(net, levels[-1], 0.0, 0)  # spread updates need more
        if trial is not None:
            result.append(_fits(net, trial, good))
    net.take_abreast(None)
    return result


def _take_abreast(net: Net, level: Sequence[_Candidate], spread: float, room: int) -> Made | None:
    """The calls with so much state evicted, `spread` as `Net.spread`, and a run of layers in slices abreast as it fits
    such a room; None if no layers may."""
    net.evict_state({each.memory: 0 for each in level}, spread)
    for which in runs_abreast(net, max(0, room)):
        net.take_abreast(which)
        made = net._made(streams=1)
        if made.sliced is not None:
            return made
    return None


def _in_less(
    net: Net, good: float, best: Made | OutOfDeviceMemory | None, most_ms: float = math.inf
) -> Made | OutOfDeviceMemory:
    """`_fits` with the state that is evicted now; in slices if there is a best so far: in just such, if that is, or in
    fewer and longer ones too where updates are spread, as their gradients leave room."""
    slices: list[Runs] | None = None
    if best is not None:
        sliced = best.sliced if isinstance(best, Made) else None
        slices = [] if sliced is None else _or_longer(net, _fewer(sliced.runs, net.spread), net.spread > 0)
    return _fits(net, net._made(streams=1), good, slices, most_ms)


def _or_longer(net: Net, several: Sequence[Runs], longer_too: bool) -> list[Runs]:
    """The same runs of layers, or the last one longer, too."""
    ends = longer(net, several[0][-1]) if longer_too and several else []
    return [*several, *((*runs[:-1], runs[-1]._replace(last=end)) for end in ends for runs in several)]


def _fewer(runs: Runs, spread: float) -> list[Runs]:
    """The same runs in the numbers of slices that are tried where so many fit."""
    parts = FEWER if spread else FEWER[:1]
    fewer = [times_as_many(runs, 1 / part) for part in parts if all(each.number % part == 0 for each in runs)]
    return [each for each in fewer if each]


def _fits(
    net: Net, made: Made, good: float = 0.0, slices: Sequence[Runs] | None = None, most_ms: float = math.inf
) -> Made | OutOfDeviceMemory:
    """`fitting` of the calls, what it brings in time, or what it raises: without the frames, which would keep arrays,
    and these their bytes."""
    try:
        found = fitting(net, made, good, slices, most_ms)
    except OutOfDeviceMemory as error:
        return error.with_traceback(None)
    for each in found:
        each.state = {memory: memory.staying for memory in net._evicted}
        each.spread = net.spread
    best = found[0]
    for each in () if net._is_watched() else found:  # who looks in between layers may write what has come
        best = min(best, sooner(net, each, min(most_ms, best.ms)), key=_rank)
    return best


def _rank(found: Made | OutOfDeviceMemory, good: float = 0.0) -> tuple[bool, float, int]:
    """What is better comes first: what fits, in less time, or with less state evicted; of errors what needs less."""
    if isinstance(found, Made):
        return False, max(found.ms * (WORTH if found.state else 1), good), len(found.state)
    return True, found.requested, 0


def _first(candidates: Sequence[_Candidate], part: float) -> tuple[_Candidate, ...]:
    """The first of them that are such a part of all bytes."""
    sizes = np.cumsum([0, *(each.size for each in candidates)])
    return tuple(candidates[: int(np.searchsorted(sizes, part * sizes[-1]))])


class _Pass(NamedTuple):
    """What runs in an arena by itself.

    Attributes:
        calls: all of them.
        places: the positions at which others may be put in.
        together: the first and the last of layers that only run together, in parts of the batch.
    """

    calls: Sequence[Call]
    places: Sequence[int]
    together: Sequence[tuple[int, int]] = ()

    def alone(self, layer: int) -> bool:
        """Whether a layer may run by itself."""
        return not any(first <= layer <= last for first, last in self.together)


def _passes(net: Net, made: Made) -> list[_Pass]:
    """A net's forward and backward pass, what its solver runs after these, and the test nets that share its arena."""
    both = made.forward, made.backward
    found = [_Pass(*each) for each in zip(both, net._joints(*both, made.passing), strict=True)]
    others = [each for each in net.group.members if each.forward_only and each._arena is net._arena]
    found += [_Pass(calls, range(len(calls) + 1)) for calls in net.updates_after()]
    for each in others:
        calls, parts = each.compiled()[0].calls, each._parts
        found.append(_Pass(calls, range(len(calls) + 1), () if parts is None else [parts.layers]))
    return found


def _state_of(net: Net) -> dict[SyncedMemory, int]:
    """A net's parameters, what its solver keeps, gradients, and inputs that are at the host, and the bytes of each."""
    params = [blob for blobs in net.params.values() for blob in blobs]
    updates = [*(net._updates or ()), *chain.from_iterable(net.updates_after())]
    kept = [operand.blob for each in updates for operand in each.operands[1:] if operand is not None]
    sizes = {blob.data_view.memory: blob.nbytes for blob in (*params, *kept)}
    if net._loss_scale is None:  # else all gradients are looked at together
        sizes.update((blob.diff_view.memory, blob.nbytes) for blob in params if blob.has_diff)
    for view in (net.blobs[name].data_view for name in net.inputs):
        if view.memory.is_at_host(view.offset, view.nbytes):  # else there may be no room to fill it there again
            sizes[view.memory] = view.nbytes
    return sizes


def _candidates(net: Net, made: Made) -> list[_Candidate]:
    """What may be evicted, what frees most for the time that its copies take first."""
    sizes = _state_of(net)
    stays = {*net.read_after(), *(life.key for life in made.places.lives.arena)}
    ops, passes, found = table(net.device.family), _passes(net, made), []
    whiles = [whiles_of(each.calls, each.places, sizes, each.together) for each in passes]
    times = Times(net.device)
    for memory, size in sizes.items():
        own = [(each, of_pass.get(memory, ())) for each, of_pass in zip(passes, whiles, strict=True)]
        users = [each.calls[at] for each, of_pass in own for one in of_pass for at in one.uses]
        # a layer by itself would not bring what another one's call does
        fit = all(
            each.calls[one.before].layer == each.calls[one.uses[0]].layer
            for each, of_pass in own
            for one in of_pass
            if each.alone(each.calls[one.uses[0]].layer)
        )
        fit = fit and bool(users) and all(_is_usual(user, memory, size, ops) for user in users)
        if size < FROM or memory in stays or not fit:
            continue
        copies = sum(1 + one.changes for _, of_pass in own for one in of_pass)
        found.append(_Candidate(memory, round_up(size, ALIGNMENT), copies * times.copy_ms(size)))
    return sorted(found, key=lambda each: (each.ms / each.size, -each.size))


def _is_usual(user: Call, memory: SyncedMemory, nbytes: int, ops: Container[str]) -> bool:
    """Whether a call uses all of the memory, on the device, as it lies."""
    if user.once or user.op not in ops or isinstance(memory, Slot) or memory.reordered is not None:
        return False
    views = [operand.view for operand in user.present() if operand.memory is memory]
    return all(view.offset == 0 and view.nbytes == nbytes for view in views)
