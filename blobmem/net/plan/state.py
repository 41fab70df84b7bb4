"""A pass over calls, where it is not enough to give away arrays that live between forward and backward: parameters, the
gradients of them that last, and what a solver keeps are on the device only while calls use them.

The truth of such a memory is at its own host side (`SyncedMemory.evicted`). It is brought into an array of the arena
before the calls of a layer that use it, and copied out behind them if they change it. What is large is updated in
pieces, and so is the gradient of an inner product made, each piece right before its update. So the memory has no device
side of its own, and whoever else looks at it does so as ever. Every net with an arena that uses it brings it, test nets
too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.devices import Device
from blobmem.devices.base import readable_bytes
from blobmem.devices.pages import round_up
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Parked
from blobmem.memory.slot import Slot
from blobmem.memory.views import ALIGNMENT
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.arena import layout
from blobmem.net.plan.evict import lingering, loads, with_others
from blobmem.net.plan.fitting import EARLY, GOOD, MANY, Made, fitting, room_of
from blobmem.net.plan.liveness import lifetimes
from blobmem.net.plan.places import draft
from blobmem.net.plan.slices import Division
from blobmem.net.plan.times import COPIES, LINK, QUEUED, Times, reckon
from blobmem.net.plan.uses import moved
from blobmem.net.schedule import Schedule, Unit
from blobmem.ops.call import Call, call, like, memories, overwrite, read, redirected
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

log = logging.getLogger("blobmem")

FROM = 1 << 12
"""Bytes of an array from which it may be evicted."""

LEVELS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the bytes of all that may be evicted that are tried."""

FEWER = (1, 2, 4)
"""So many times fewer slices of the batch than are known to fit are tried where updates are spread."""

LITTLE = 8
"""Nothing of it is evicted where all is less than such a part of the bytes that are lacking, and others will do."""

PIECE = 16 << 20
"""Bytes of an array that are updated, and come and go, at a time, where updates wait; of larger ones equal parts."""

WORTH = 1.03
"""How many times as long as reckoned a plan that evicts state counts as taking: it has to be better by that."""


class Brought(NamedTuple):
    """Calls with those that bring what they use of evicted memories, and copy out what they change.

    Attributes:
        calls: all of them.
        moved: where each of the calls given is among these.
        arrays: what is brought lies in.
    """

    calls: list[Call]
    moved: list[int]
    arrays: list[Blob]


@dataclasses.dataclass(slots=True)
class _While:
    """Calls of one layer that use a memory, with no other of its uses between them.

    Attributes:
        uses: their positions.
        part: of the memory, that they use.
        before, after: the positions before which it comes, and goes.
        changes: whether any of them writes it.
    """

    uses: list[int]
    part: tuple[int, int] | None
    before: int
    after: int
    changes: bool


def bring(
    calls: Sequence[Call],
    places: Sequence[int],
    device: Device,
    evicted: Container[SyncedMemory],
    together: tuple[int, int] | None = None,
) -> Brought:
    """The calls, on arrays in which they have what is evicted.

    Args:
        calls: in order; those of a layer stand together.
        places: the positions, from 0 to the end, at which others may be put in (`schedule.joints`).
        device: where the arrays are to be.
        evicted: the memories.
        together: the first and the last of layers whose calls stand together, and use the same arrays, if there are
            such: those that run in slices.
    """
    coming: dict[int, list[Call]] = defaultdict(list)
    leaving: dict[int, list[Call]] = defaultdict(list)
    given: dict[int, dict[SyncedMemory, Blob]] = defaultdict(dict)
    arrays = []
    for memory, whiles in _whiles(calls, places, evicted, together).items():
        for each in whiles:
            source = next(operand for operand in calls[each.uses[0]].present() if operand.memory is memory)
            array = Blob(source.array_shape, dtype=source.blob.dtype, device=device, name=memory.name)
            where: dict[str, Any] = {"home": memory, "start": source.view.offset, "sums": source.accumulate}
            fetched = call("fetch", overwrite(array), **where)
            coming[each.before].append(like(calls[each.before], fetched))
            if each.changes:
                gone = call("evict", read(array), **where)
                leaving[each.after].append(like(calls[each.after - 1], gone))
            for at in each.uses:
                given[at][memory] = array
            arrays.append(array)
    on_arrays = [redirected(each, given.get(at, {})) for at, each in enumerate(calls)]
    put = {at: [*leaving.get(at, ()), *coming.get(at, ())] for at in {*leaving, *coming}}
    return Brought(*with_others(on_arrays, put), arrays)


def gradients_first(backward: Sequence[Call], evicted: Set[SyncedMemory]) -> list[Call]:
    """The calls of backward, with gradients of data that take a large evicted parameter before the same layer's others:
    so it has gone when its own gradient, as large, is made."""
    result: list[Call] = []
    for each in backward:
        at = len(result)
        if each.op not in UPDATES and _is_larger(each, evicted):
            writes = {view.memory for view in each.writes}
            while at and result[at - 1].layer == each.layer and not _orders(result[at - 1], each, writes):
                at -= 1
        result.insert(at, each)
    return result


def _is_larger(each: Call, evicted: Set[SyncedMemory]) -> bool:
    """Whether what a call reads of evicted memories is larger than what it writes."""
    read = sum(view.nbytes for view in each.reads if view.memory in evicted)
    return read > sum(view.nbytes for view in each.writes)


def _orders(before: Call, each: Call, writes: Set[SyncedMemory]) -> bool:
    """Whether a call has to come behind the one before it, which uses what it writes or writes what it uses."""
    used = {*memories([each])}
    return not writes.isdisjoint(memories([before])) or any(view.memory in used for view in before.writes)


class Spread(NamedTuple):
    """The calls of backward, with updates in pieces.

    Attributes:
        calls: all of them.
        arrays: of gradients that are made in pieces, each one's, and what it is made of.
        absent: the memories of these gradients.
    """

    calls: list[Call]
    arrays: list[Blob]
    absent: set[SyncedMemory]


def spread(
    backward: Sequence[Call],
    joints: Sequence[int],
    evicted: Set[SyncedMemory],
    times: Times,
    over: float,
    free: Container[SyncedMemory] = (),
) -> Spread:
    """The calls of backward, with updates of what is evicted in pieces, which take little room.

    Args:
        backward: the calls.
        joints: the positions at which calls may be put in (`schedule.joints`).
        evicted: the memories.
        times: of calls.
        over: which part of the time that there is after them they are spread over, for pieces to come and go all the
            while; 0 if they come one right after another, so that gradients do not last.
        free: memories of gradients that may be made in pieces, too, each before its update.
    """
    updates = [
        (at, each)
        for at, each in enumerate(backward)
        if each.op in UPDATES and not evicted.isdisjoint(memories([each]))
    ]
    made = _Gradients(backward, free)
    pieces = [(at, piece) for at, each in updates for piece in _in_pieces(each, evicted)]
    if not pieces:
        return Spread([*backward], [], set())
    sizes = [sum(each.view.nbytes for each in piece.present() if each.memory in evicted) for _, piece in pieces]
    begins, put = np.cumsum([0.0, *map(times.ms, backward)]), defaultdict[int, list[Call]](list)
    begin, done, all_of_it = begins[pieces[0][0]], 0, sum(sizes) + sizes[-1]
    for (at, piece), size in zip(pieces, sizes, strict=True):
        done += size
        wanted = begin + over * (begins[-1] - begin) * done / all_of_it
        to = next(to for to in joints if to == len(backward) or (to > at and begins[to] >= wanted))
        for each in made.with_piece(piece):
            each.layer = backward[to - 1].layer
            put[to].append(each)
    whole = {at for at, _ in updates}
    calls = [
        each
        for at in range(len(backward) + 1)
        for each in (*put[at], *(() if at in whole else made.instead.get(at, backward[at : at + 1])))
    ]
    return Spread(calls, made.arrays, made.absent)


class _Gradients:
    """Gradients of inner products that are made in pieces, each right before its part of the update.

    Args:
        backward: the calls.
        free: memories of gradients that nobody but these calls uses.

    Attributes:
        instead: by position, what is in place of the calls that would make these.
        arrays, absent: as of `Spread`.
    """

    def __init__(self, backward: Sequence[Call], free: Container[SyncedMemory]) -> None:
        self._backward, self._of = backward, dict[SyncedMemory, tuple[Call, Sequence[Blob]]]()
        self.instead: dict[int, list[Call]] = {}
        self.arrays: list[Blob] = []
        self.absent: set[SyncedMemory] = set()
        users = defaultdict[SyncedMemory, list[int]](list)
        self._last_write: dict[SyncedMemory, int] = {}
        for at, each in enumerate(backward):
            for memory in {*memories([each])}:
                users[memory].append(at)
            self._last_write.update({view.memory: at for view in each.writes})
        self._makers = {
            memory: at[0]
            for memory, at in users.items()
            if len(at) == 2 and memory in free and self._may_divide(at[0], memory)
        }

    def _may_divide(self, at: int, memory: SyncedMemory) -> bool:
        """Whether the call makes all of the gradient, of what is there for the rest of backward."""
        maker = self._backward[at]
        if maker.op != "inner_product_backward_weights" or maker.attributes["transpose"]:
            return False
        x, _, gradient = maker.operands
        assert x is not None and gradient is not None
        whole = gradient.memory is memory and gradient.part is None and gradient.intent is Intent.OVERWRITE
        return whole and self._last_write.get(x.memory, -1) < at

    def with_piece(self, update: Call) -> list[Call]:
        """A piece of an update, behind what makes its part of the gradient, if that is made in pieces."""
        gradient = update.operand(0)
        if gradient.part is None or gradient.memory not in self._makers:
            return [update]
        (index, count), memory = gradient.part, gradient.memory
        if memory not in self._of:
            self._divide(memory, count)
        maker, dys = self._of[memory]
        x, _, whole = maker.operands
        assert whole is not None
        blob = whole.blob
        part = Blob(gradient.array_shape, dtype=blob.dtype, device=blob.device, name=memory.name)
        self.arrays.append(part)
        made = dataclasses.replace(whole, blob=part, diff=False, shape=None)
        operands = (dataclasses.replace(read(part), shape=gradient.shape), *update.operands[1:])
        return [
            dataclasses.replace(maker, operands=(x, read(dys[index]), made)),
            dataclasses.replace(update, operands=operands),
        ]

    def _divide(self, memory: SyncedMemory, count: int) -> None:
        """Have the columns of what comes from behind taken apart in place of the call that makes the gradient."""
        at = self._makers[memory]
        maker = self._backward[at]
        dy = maker.operand(1)
        rows, columns = dy.op_shape
        blob, name = dy.blob, f"{dy.memory.name} (columns)"
        dys = [Blob((rows, columns // count), dtype=blob.dtype, device=blob.device, name=name) for _ in range(count)]
        self.instead[at] = [like(maker, call("slice_forward", dy, *map(overwrite, dys), axis=1))]
        self._of[memory] = maker, dys
        self.arrays += dys
        self.absent.add(memory)


def apart(calls: Sequence[Call], joints: Sequence[int]) -> list[int]:
    """The positions at which others may be put in, those between pieces of an update among them."""
    pieces = (
        at for at, each in enumerate(calls) if each.op in UPDATES and any(operand.part for operand in each.present())
    )
    return sorted({*joints, *chain.from_iterable((at, at + 1) for at in pieces)})


def _in_pieces(update: Call, evicted: Container[SyncedMemory]) -> list[Call]:
    """An update as several, of equal parts of its arrays."""
    largest = max((each for each in update.present() if each.memory in evicted), key=lambda each: each.view.nbytes)
    rows, nbytes = (largest.blob.shape or (1,))[0], largest.view.nbytes
    most = nbytes // PIECE if all(operand.blob.shape == largest.blob.shape for operand in update.present()) else 1
    count = max((n for n in range(1, most + 1) if rows % n == 0 and nbytes % (n * ALIGNMENT) == 0), default=1)
    return [
        dataclasses.replace(
            update,
            operands=tuple(
                dataclasses.replace(operand, part=(index, count) if count > 1 else None) for operand in update.present()
            ),
        )
        for index in range(count)
    ]


def join(forward: Sequence[Call], backward: Sequence[Call], times: Times) -> list[Call]:
    """The calls of backward, on what forward has brought where that has no time to go and come back in between."""
    clock, last = 0.0, dict[SyncedMemory, float]()  # of arrays, when they are used last
    brought: dict[Any, Blob] = {}  # by what is in them
    for each in forward:
        clock += 0 if each.op in COPIES else times.ms(each)
        last.update(dict.fromkeys(memories([each]), clock))
        if each.op == "fetch":
            brought[_content(each)] = each.operand(0).blob
        elif each.op == "evict":
            brought.pop(_content(each), None)
    result, arrays = list[Call](), dict[SyncedMemory, Blob]()
    for each in backward:
        clock += 0 if each.op in COPIES else times.ms(each)
        array = brought.pop(_content(each), None) if each.op == "fetch" else None
        if array is not None and clock - last[array.data_view.memory] <= times.copy_ms(array.nbytes):
            arrays[each.operand(0).memory] = array
        else:
            result.append(redirected(each, arrays))
    return result


def _content(copy: Call) -> tuple[Any, ...]:
    """Which bytes of evicted state a copy is about."""
    return copy.attributes["home"], copy.attributes["start"], copy.operand(0).view.nbytes


def _whiles(
    calls: Sequence[Call],
    places: Sequence[int],
    wanted: Container[SyncedMemory],
    together: tuple[int, int] | None = None,
) -> dict[SyncedMemory, list[_While]]:
    """Of each memory that is wanted, when the calls use it."""
    found: dict[SyncedMemory, list[_While]] = {}
    first, stop = (0, 0) if together is None else (together[0], together[1] + 1)
    run_of = [first if first <= each.layer < stop else each.layer for each in calls]
    for at, each in enumerate(calls):
        for operand in each.present():
            if operand.memory not in wanted:
                continue
            before, after = places[bisect_right(places, at) - 1], places[bisect_left(places, at + 1)]
            whiles, changes = found.setdefault(operand.memory, []), operand.intent is not Intent.READ
            last = whiles[-1] if whiles else None
            same = last is not None and last.part == operand.part
            if last and same and (run_of[last.uses[-1]] == run_of[at] or before < last.after):
                last.uses.append(at)
                last.after, last.changes = after, last.changes or changes
            else:
                whiles.append(_While([at], operand.part, before, after, changes))
    return found


def alone(
    calls: Sequence[Call], arena: SyncedMemory, device: Device, evicted: Container[SyncedMemory], room: int
) -> Schedule:
    """The schedule of calls that run while nobody else uses an arena: there they have what is evicted, one by one, and
    the next one's while one runs if that needs no more than the room."""
    brought = bring(calls, range(len(calls) + 1), device, evicted)
    arrays = {array.data_view.memory: array for array in brought.arrays}
    kept = {*memories(brought.calls)} - {*arrays}
    early, _ = _with_moved(brought.calls, _one_ahead(brought.calls))
    schedules = [Schedule(ordered, device) for ordered in (brought.calls, early)]
    placed = [lifetimes([[each] for each in schedule.calls], keep=kept).arena for schedule in schedules]
    (_, plain), (_, wide) = (layout(lives) for lives in placed)
    # calls that stand together in another order may run as one, for which they have to have room
    ahead = wide <= room and schedules[1].scratch_bytes() <= schedules[0].scratch_bytes()
    lives, schedule, nbytes = placed[ahead], schedules[ahead], wide if ahead else plain
    for life, offset in zip(lives, layout(lives).offsets, strict=True):
        assert isinstance(life.key, SyncedMemory)
        arrays[life.key].bind_data(Slot(arena, offset, life.nbytes, life.key.name))
    schedule.lie_in(arena, nbytes, {})
    return schedule


def _one_ahead(calls: Sequence[Call]) -> dict[int, int]:
    """From where to before which call each that fetches is to go, for the call before the one that it is for to run
    meanwhile."""
    moves, last, sent = {}, -1, set[SyncedMemory]()
    for at, each in enumerate(calls):
        if each.op not in COPIES:
            last, sent = at, set()
        elif each.op == "evict":
            sent.add(each.attributes["home"])
        elif last >= 0 and each.attributes["home"] not in sent:
            moves[at] = last
    return moves


# -------------------------------------------------------------------- which of them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """What may be evicted.

    Attributes:
        memory, size: which, and its bytes in an arena.
        seconds: what its copies take in an iteration.
    """

    memory: SyncedMemory
    size: int
    seconds: float


def fit(net: Net, made: Made) -> Made:
    """`fitting` of a net's calls; where none of these fits, or they would take long, with part of its state evicted, or
    a run of layers in slices of the batch.

    Raises OutOfDeviceMemory, naming the least that would do, if not even all of it is enough.
    """
    found = _fitted(net, made)
    if found is not made:
        _tell(net, found, made.places.layout.nbytes)
        net.streams, net.open_streams = 1, None  # which is not to be tried on two
    if net.device.most_bytes is not None and not net.forward_only:
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
        first, last = (net.layer_names[at] for at in found.sliced.layers)
        log.info(
            "%s takes layers '%s' to '%s' in %d slices of the batch, for want of memory: its numbers are "
            "those of the whole batch to rounding", net.identity, first, last, found.sliced.number,
        )  # fmt: skip
    if found.state:
        log.info(
            "%s has %d arrays of its parameters and solver state on the device only while they are used",
            net.identity, len(found.state),
        )  # fmt: skip


def _fitted(net: Net, made: Made) -> Made:
    """Of the calls that fit, those that are reckoned to take least time, with slices of the batch if those without are
    not good; where bits matter more than that, slices are for where nothing else fits."""
    best = _fits(net, made)
    if best is made:
        return made
    exact = getattr(net.device, "deterministic", True)
    slices = "slices" in net.passes and not net._dynamic
    candidates, lacking = _candidates(net, made), made.places.layout.nbytes - room_of(net, made)
    good = GOOD * reckon(made.places, Times(net.device)).ms
    much = sum(each.size for each in candidates) * LITTLE > lacking
    levels = [*dict.fromkeys(_first(candidates, part) for part in LEVELS)]

    def tried(
        best: Made | OutOfDeviceMemory, level: Sequence[_Candidate], late: bool, sliced: bool
    ) -> Made | OutOfDeviceMemory:
        net.evict_state([each.memory for each in level], late)
        found = _in_less(net, good, best if sliced else None)
        return min(best, found, key=lambda each: _rank(each, good))

    enough = isinstance(best, Made) and (best.ms <= good or len(made.forward) + len(made.backward) >= MANY)
    if slices and not exact and not enough:
        best = min(best, _in_less(net, good, best), key=_rank)
    for sliced in (False, True) if slices else (False,):
        if isinstance(best, Made) and sliced != (best.sliced is not None):
            continue  # the other kind is slower, or rounds
        if sliced and exact:
            best = tried(best, (), False, sliced)
        needed = best.requested if isinstance(best, OutOfDeviceMemory) else 0
        if needed:
            best = tried(best, levels[-1], False, sliced)  # which needs least
        for level in levels if isinstance(best, Made) and much else ():
            if isinstance(best, Made) and best.ms <= good and len(best.state) <= len(level):
                break
            if needed - sum(each.size for each in level) <= (net.device.most_bytes or 0):
                late = tried(best, level, True, sliced)
                again = needed and level is not levels[-1] and late is best
                best = tried(best, level, False, sliced) if again else late
    try:
        if isinstance(best, OutOfDeviceMemory):
            net.evict_state(())
            raise best
        net.evict_state(best.state)
        net.brings = {*best.state}
        return best
    finally:
        del best  # which would keep itself, if it is an error, by its frames


def _in_less(net: Net, good: float, best: Made | OutOfDeviceMemory | None) -> Made | OutOfDeviceMemory:
    """`_fits` with the state that is evicted now; in slices if there is a best so far: in just such, if that is, or in
    fewer too where updates are spread, as their gradients leave room."""
    slices: list[Division] | None = None
    if best is not None:
        sliced = best.sliced if isinstance(best, Made) else None
        slices = []
        if sliced is not None:
            number, parts = sliced.number, FEWER if net.spreads else FEWER[:1]
            slices = [(*sliced.layers, number // part) for part in parts if number % part == 0 and number > part]
    return _fits(net, net._made(streams=1), good, slices)


def _fits(
    net: Net, made: Made, good: float = 0.0, slices: Sequence[Division] | None = None
) -> Made | OutOfDeviceMemory:
    """`fitting` of the calls, what it brings in time, or what it raises: without the frames, which would keep arrays,
    and these their bytes."""
    try:
        found = fitting(net, made, good, slices)
    except OutOfDeviceMemory as error:
        return error.with_traceback(None)
    found.state = [*net._evicted]
    return _sooner(net, found) if found.state else found


def _rank(found: Made | OutOfDeviceMemory, good: float = 0.0) -> tuple[bool, float, int]:
    """What is better comes first: what fits, in less time, or with less state evicted; of errors what needs less."""
    if isinstance(found, Made):
        return False, max(found.ms * (WORTH if found.state else 1), good), len(found.state)
    return True, found.requested, 0


def _first(candidates: Sequence[_Candidate], part: float) -> tuple[_Candidate, ...]:
    """The first of them that are such a part of all bytes."""
    sizes = np.cumsum([0, *(each.size for each in candidates)])
    return tuple(candidates[: int(np.searchsorted(sizes, part * sizes[-1]))])


def _sooner(net: Net, made: Made) -> Made:
    """The calls, with state fetched before it is needed, so that it is there in time where there is room that early."""
    room, times = room_of(net, made), Times(net.device)
    net._have(made)
    for part in (EARLY, EARLY**3, EARLY**9):  # there are gaps
        early, in_backward = _moves(made, int(part * room), times)
        if not early and not in_backward:
            break
        (forward, position), (backward, _) = _with_moved(made.forward, early), _with_moved(made.backward, in_backward)
        schedules = net._scheduled(forward, backward, made.passing)
        drawn = draft(net, schedules, made.kept)
        drawn.enough = room if made.sliced is not None else 0
        drawn = lingering(drawn, times, int(part * room))
        if drawn.layout.nbytes <= room:
            remade, ms = moved(made.remade, position), reckon(drawn, times).ms
            found = dataclasses.replace(
                made, forward=forward, backward=backward, remade=remade, bound=schedules, drawn=drawn, ms=ms
            )
            return min(made, found, key=_rank)
    return made


def _moves(made: Made, room: int, times: Times) -> tuple[dict[int, int], dict[int, int]]:
    """Of forward and of backward, from where to before which call what fetches state is to go.

    Copies follow one another, each as late as will do.
    """
    load, units = loads(made.places), [*chain(*made.places.units)]
    turn, result = len(made.places.units[0]), (dict[int, int](), dict[int, int]())
    begins = np.cumsum([0, *(0 if unit.calls[-1].op in COPIES else times.ms(unit.calls[-1]) for unit in units)])
    least, latest = _earliest(units, turn), math.inf
    for at in reversed(range(len(units))):
        fetched = units[at].calls[-1]
        if fetched.op != "fetch":
            continue
        size = round_up(fetched.operand(0).view.nbytes, ALIGNMENT)
        latest, step = min(latest, float(begins[at])) - times.copy_ms(size), at
        while step > least.get(at, at) and begins[step] > latest and load[step - 1] + size <= room:
            step -= 1
            load[step] += size
        if step < at:
            result[at >= turn][units[at].start] = units[step].start
    return result


def _earliest(units: Sequence[Unit], turn: int) -> dict[int, int]:
    """Of each unit that fetches state, the first before which it may: behind its last way out, and in its pass."""
    result, sent = {}, dict[Any, int]()
    for at, unit in enumerate(units):
        each = unit.calls[-1]
        if each.op in COPIES and not isinstance(each.attributes["home"], Parked):
            content = _content(each)
            if each.op == "evict":
                sent[content] = at + 1
            else:
                result[at] = max(sent.get(content, 0), turn if at >= turn else 0)
    return result


def _with_moved(calls: Sequence[Call], moves: Mapping[int, int]) -> tuple[list[Call], list[int]]:
    """The calls with some before others, which then have their layers, and where each of them is then."""
    order = sorted(range(len(calls)), key=lambda at: (moves.get(at, at), at not in moves, at))
    result = [like(calls[moves[at]], dataclasses.replace(calls[at])) if at in moves else calls[at] for at in order]
    position = {at: now for now, at in enumerate(order)}
    return result, [position[at] for at in range(len(calls))]


class _Pass(NamedTuple):
    """What runs in an arena by itself: calls, and the positions at which others may be put in."""

    calls: Sequence[Call]
    places: Sequence[int]


def _passes(net: Net, made: Made) -> list[_Pass]:
    """A net's forward and backward pass, what its solver runs after these, and the test nets that share its arena."""
    both = made.forward, made.backward
    found = [_Pass(*each) for each in zip(both, net._joints(*both, made.passing), strict=True)]
    others = [each for each in net.group.members if each.forward_only and each._arena is net._arena]
    alone = [*net.updates_after(), *(each.compiled()[0].calls for each in others)]
    return found + [_Pass(calls, range(len(calls) + 1)) for calls in alone]


def _candidates(net: Net, made: Made) -> list[_Candidate]:
    """What may be evicted, what frees most for the time that its copies take first."""
    params = [blob for blobs in net.params.values() for blob in blobs]
    updates = [*(net._updates or ()), *chain.from_iterable(net.updates_after())]
    kept = [operand.blob for each in updates for operand in each.operands[1:] if operand is not None]
    sizes = {blob.data_view.memory: blob.nbytes for blob in (*params, *kept)}
    if net._loss_scale is None:  # else all gradients are looked at together
        sizes.update((blob.diff_view.memory, blob.nbytes) for blob in params if blob.has_diff)
    stays = {*net.read_after(), *(life.key for life in made.places.lives.arena)}
    ops, passes, found = table(net.device.family), _passes(net, made), []
    whiles = [_whiles(*each, sizes) for each in passes]
    for memory, size in sizes.items():
        own = [(each, of_pass.get(memory, ())) for each, of_pass in zip(passes, whiles, strict=True)]
        users = [each.calls[at] for each, of_pass in own for one in of_pass for at in one.uses]
        # a layer by itself would not bring what another one's call does
        fit = all(
            each.calls[one.before].layer == each.calls[one.uses[0]].layer for each, of_pass in own for one in of_pass
        )
        fit = fit and bool(users) and all(_is_usual(user, memory, size, ops) for user in users)
        if size < FROM or memory in stays or not fit:
            continue
        copies = sum(1 + one.changes for _, of_pass in own for one in of_pass)
        found.append(_Candidate(memory, round_up(size, ALIGNMENT), copies * (size / LINK + QUEUED)))
    return sorted(found, key=lambda each: (each.seconds / each.size, -each.size))


def _is_usual(user: Call, memory: SyncedMemory, nbytes: int, ops: Container[str]) -> bool:
    """Whether a call uses all of the memory, on the device, as it lies."""
    if user.once or user.op not in ops or isinstance(memory, Slot) or memory.reordered is not None:
        return False
    views = [operand.view for operand in user.present() if operand.memory is memory]
    return all(view.offset == 0 and view.nbytes == nbytes for view in views)
