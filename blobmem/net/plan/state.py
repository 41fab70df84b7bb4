"""A pass over calls, where it is not enough to give away arrays that live between forward and backward: parameters, the
gradients of them that last, and what a solver keeps are on the device only while calls use them.

The truth of such a memory is at its own host side (`SyncedMemory.evicted`). It is brought into an array of the arena
before the calls of a layer that use it, and copied out behind them if they change it. So the memory has no device side
of its own, and whoever else looks at it does so as ever. Every net with an arena that uses it brings it, test nets too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

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
from blobmem.net.plan.arena import layout
from blobmem.net.plan.evict import lingering, loads, with_others
from blobmem.net.plan.fitting import EARLY, Made, fitting, least_loads, room_of
from blobmem.net.plan.liveness import lifetimes
from blobmem.net.plan.places import draft
from blobmem.net.plan.times import COPIES, LINK, Times
from blobmem.net.plan.uses import moved
from blobmem.net.schedule import Schedule, Unit
from blobmem.ops.call import Call, call, like, memories, overwrite, read, redirected
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

log = logging.getLogger("blobmem")

FROM = 1 << 12
"""Bytes of an array from which it may be evicted."""

QUEUED = 1e-5
"""Seconds that a copy takes beside its bytes."""


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
        before, after: the positions before which it comes, and goes.
        changes: whether any of them writes it.
    """

    uses: list[int]
    before: int
    after: int
    changes: bool


def bring(calls: Sequence[Call], places: Sequence[int], device: Device, evicted: Container[SyncedMemory]) -> Brought:
    """The calls, on arrays in which they have what is evicted.

    Args:
        calls: in order; those of a layer stand together.
        places: the positions, from 0 to the end, at which others may be put in (`schedule.joints`).
        device: where the arrays are to be.
        evicted: the memories.
    """
    coming: dict[int, list[Call]] = defaultdict(list)
    leaving: dict[int, list[Call]] = defaultdict(list)
    given: dict[int, dict[SyncedMemory, Blob]] = defaultdict(dict)
    arrays = []
    for memory, whiles in _whiles(calls, places, evicted).items():
        for each in whiles:
            source = next(operand for operand in calls[each.uses[0]].present() if operand.memory is memory).blob
            array = Blob(source.shape, dtype=source.dtype, device=device, name=memory.name)
            coming[each.before].append(like(calls[each.before], call("fetch", overwrite(array), home=memory)))
            if each.changes:
                leaving[each.after].append(like(calls[each.after - 1], call("evict", read(array), home=memory)))
            for at in each.uses:
                given[at][memory] = array
            arrays.append(array)
    on_arrays = [redirected(each, given.get(at, {})) for at, each in enumerate(calls)]
    put = {at: [*leaving.get(at, ()), *coming.get(at, ())] for at in {*leaving, *coming}}
    return Brought(*with_others(on_arrays, put), arrays)


def _whiles(
    calls: Sequence[Call], places: Sequence[int], wanted: Container[SyncedMemory]
) -> dict[SyncedMemory, list[_While]]:
    """Of each memory that is wanted, when the calls use it."""
    found: dict[SyncedMemory, list[_While]] = {}
    for at, each in enumerate(calls):
        for operand in each.present():
            if operand.memory not in wanted:
                continue
            before, after = places[bisect_right(places, at) - 1], places[bisect_left(places, at + 1)]
            whiles, changes = found.setdefault(operand.memory, []), operand.intent is not Intent.READ
            last = whiles[-1] if whiles else None
            if last is not None and (calls[last.uses[-1]].layer == each.layer or before < last.after):
                last.uses.append(at)
                last.after, last.changes = after, last.changes or changes
            else:
                whiles.append(_While([at], before, after, changes))
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
        times: of each pass (`_passes`), between which of its steps, the last one excluded, it is there then.
    """

    memory: SyncedMemory
    size: int
    seconds: float
    times: list[list[tuple[int, int]]]


def fit(net: Net, made: Made) -> Made:
    """`fitting` of a net's calls; where none of these fits, with as much of its state evicted as it takes.

    Raises OutOfDeviceMemory, naming the least that would do, if not even all of it is enough.
    """
    made = _fitted(net, made)
    if net.device.most_bytes is not None and not net.forward_only:
        net.trim_arena(room_of(net, made))  # a plan with less beside it may have had more
    return made


def _fitted(net: Net, made: Made) -> Made:
    """The calls, by what changes least: bits are the same with any state evicted, but not with slices of the batch."""
    slices = "slices" in net.passes and not net._dynamic
    found = _fits(net, made, slices=False)
    if isinstance(found, OutOfDeviceMemory):
        found = _with_state(net, made, found)
    if isinstance(found, OutOfDeviceMemory) and slices:
        other = _fits(net, net._made(), slices=True)
        found = min(found, other, key=_requested) if isinstance(other, OutOfDeviceMemory) else other
    try:
        if isinstance(found, OutOfDeviceMemory):
            raise found
        return found
    finally:
        del found  # which would keep itself, by its frames


def _fits(net: Net, made: Made, slices: bool) -> Made | OutOfDeviceMemory:
    """`fitting` of the calls, or what it raises, without the frames: they would keep arrays, and these their bytes."""
    try:
        return fitting(net, made, slices)
    except OutOfDeviceMemory as error:
        return error.with_traceback(None)


def _with_state(net: Net, made: Made, least: OutOfDeviceMemory) -> Made | OutOfDeviceMemory:
    """`_fits` without slices, with as much state evicted as it takes; `least` is what the calls without that need."""
    passes = _passes(net, made)
    candidates, lacking, chosen = _candidates(net, made, passes), _lacking(net, least), list[_Candidate]()
    while True:
        before, chosen = chosen, _choose(candidates, passes, _Need(passes, chosen).nbytes - lacking)
        if chosen == before:
            net.evict_state(())
            return least
        net.evict_state([each.memory for each in chosen])
        fitted = _fits(net, net._made(streams=1), slices=False)
        if not isinstance(fitted, OutOfDeviceMemory):
            break
        least, lacking = min(least, fitted, key=_requested), _lacking(net, fitted)
    net.streams, net.open_streams = 1, None  # which is not to be tried on two
    log.info(
        "%s has %d arrays of its parameters and solver state, %s, on the device only while they are used",
        net.identity, len(chosen), readable_bytes(sum(each.size for each in chosen)),
    )  # fmt: skip
    return _sooner(net, fitted)


def _requested(error: OutOfDeviceMemory) -> int:
    return error.requested


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
        drawn = lingering(draft(net, schedules, made.kept), times, room)
        if drawn.layout.nbytes <= room:
            remade = moved(made.remade, position)
            return dataclasses.replace(
                made, forward=forward, backward=backward, remade=remade, schedules=schedules, drawn=drawn
            )
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
    result, sent = {}, dict[SyncedMemory, int]()
    for at, unit in enumerate(units):
        each = unit.calls[-1]
        if each.op in COPIES and not isinstance(each.attributes["home"], Parked):
            home = each.attributes["home"]
            if each.op == "evict":
                sent[home] = at + 1
            else:
                result[at] = max(sent.get(home, 0), turn if at >= turn else 0)
    return result


def _with_moved(calls: Sequence[Call], moves: Mapping[int, int]) -> tuple[list[Call], list[int]]:
    """The calls with some before others, which then have their layers, and where each of them is then."""
    order = sorted(range(len(calls)), key=lambda at: (moves.get(at, at), at not in moves, at))
    result = [like(calls[moves[at]], dataclasses.replace(calls[at])) if at in moves else calls[at] for at in order]
    position = {at: now for now, at in enumerate(order)}
    return result, [position[at] for at in range(len(calls))]


def _lacking(net: Net, error: OutOfDeviceMemory) -> int:
    """Bytes by which a limit is too small."""
    assert net.device.most_bytes is not None
    return error.requested - net.device.most_bytes


class _Pass(NamedTuple):
    """What runs in an arena by itself.

    Attributes:
        calls: in order.
        places: the positions at which others may be put in.
        starts: where each step begins among the calls.
        load: the least bytes that have to be in use in each step.
    """

    calls: Sequence[Call]
    places: Sequence[int]
    starts: Sequence[int]
    load: np.ndarray


def _passes(net: Net, made: Made) -> list[_Pass]:
    """A net's forward and backward pass, what its solver runs after these, and the test nets that share its arena."""
    both, turn = (made.forward, made.backward), len(made.places.units[0])
    load = least_loads(net, *both, made.places)
    own = zip(both, net._joints(*both, made.passing), made.places.units, (load[:turn], load[turn:]), strict=True)
    found = [_Pass(calls, places, [unit.start for unit in units], load) for calls, places, units, load in own]
    for after in net.updates_after():
        found.append(_Pass(after, range(len(after) + 1), range(len(after)), np.zeros(len(after), np.int64)))
    for other in net.group.members:
        plan = other.planned() if other.forward_only and other._arena is net._arena else None
        if plan is not None:
            forward = other.compiled()[0]
            starts = [unit.start for unit in forward.units()]
            found.append(_Pass(forward.calls, range(len(forward.calls) + 1), starts, plan.loads(len(starts))))
    return found


def _candidates(net: Net, made: Made, passes: Sequence[_Pass]) -> list[_Candidate]:
    """What may be evicted, what frees most for the time that its copies take first."""
    params = [blob for blobs in net.params.values() for blob in blobs]
    updates = [*(net._updates or ()), *chain.from_iterable(net.updates_after())]
    kept = [operand.blob for each in updates for operand in each.operands[1:] if operand is not None]
    sizes = {blob.data_view.memory: blob.nbytes for blob in (*params, *kept)}
    if net._loss_scale is None:  # else all gradients are looked at together
        sizes.update((blob.diff_view.memory, blob.nbytes) for blob in params if blob.has_diff)
    stays = {*net.read_after(), *(life.key for life in made.places.lives.arena)}
    ops, found = table(net.device.family), []
    whiles = [_whiles(each.calls, each.places, sizes) for each in passes]
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
        times = [
            [(bisect_right(each.starts, one.before) - 1, bisect_left(each.starts, one.after)) for one in of_pass]
            for each, of_pass in own
        ]
        copies = sum(1 + one.changes for _, of_pass in own for one in of_pass)
        found.append(_Candidate(memory, round_up(size, ALIGNMENT), copies * (size / LINK + QUEUED), times))
    return sorted(found, key=lambda each: (each.seconds / each.size, -each.size))


def _is_usual(user: Call, memory: SyncedMemory, nbytes: int, ops: Container[str]) -> bool:
    """Whether a call uses all of the memory, on the device, as it lies."""
    if user.once or user.op not in ops or isinstance(memory, Slot) or memory.reordered is not None:
        return False
    views = [operand.view for operand in user.present() if operand.memory is memory]
    return all(view.offset == 0 and view.nbytes == nbytes for view in views)


class _Need:
    """Bytes in use in the fullest step with some evicted, beside what stays whatever is."""

    def __init__(self, passes: Sequence[_Pass], chosen: Iterable[_Candidate] = ()) -> None:
        self._loads, self._freed = [each.load.copy() for each in passes], 0
        for each in chosen:
            self.add(each)

    def add(self, each: _Candidate, sign: int = 1) -> None:
        """Evict one more or, with the other sign, one less."""
        self._freed += sign * each.size
        for load, times in zip(self._loads, each.times, strict=True):
            for first, stop in times:
                load[first:stop] += sign * each.size

    @property
    def nbytes(self) -> int:
        return max(int(load.max(initial=0)) for load in self._loads) - self._freed


def _choose(found: Sequence[_Candidate], passes: Sequence[_Pass], most: int) -> list[_Candidate]:
    """Those with which no more than so many bytes are in use, or as few as can be; none without which that holds."""
    need, chosen = _Need(passes), list[_Candidate]()
    for each in found:
        if need.nbytes <= most:
            break
        need.add(each)
        chosen.append(each)
    most = max(most, need.nbytes)
    for each in reversed(chosen.copy()):
        need.add(each, -1)
        if need.nbytes <= most:
            chosen.remove(each)
        else:
            need.add(each)
    return chosen
