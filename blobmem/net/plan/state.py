"""A pass over calls, where it is not enough to give away arrays that live between forward and backward: parameters, the
gradients of them that last, what a solver keeps, and inputs are on the device only while calls use them.

The truth of such a memory is at its own host side (`SyncedMemory.evicted`). It is brought into an array of the arena
before the calls of a layer that use it, and copied out behind them if they change it. What is large is updated in
pieces, and so is the gradient of an inner product made, each piece right before its update. So the memory has no device
side of its own, and whoever else looks at it does so as ever. Every net with an arena that uses it brings it, test nets
too. Its first pieces may stay (`SyncedMemory.staying`): calls use them where they are, on a device side of just these.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from blobmem.devices import Device
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Parked
from blobmem.memory.slot import Slot
from blobmem.net.plan.arena import layout
from blobmem.net.plan.evict import with_others
from blobmem.net.plan.liveness import lifetimes
from blobmem.net.plan.times import COPIES, Times
from blobmem.net.schedule import Schedule
from blobmem.ops.call import Call, call, like, memories, overwrite, read, redirected


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
    """Calls of one layer that use a memory, with no other of its uses between them that matters.

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
    together: Iterable[tuple[int, int]] = (),
) -> Brought:
    """The calls, on arrays in which they have what is evicted.

    Args:
        calls: in order; those of a layer stand together.
        places: the positions, from 0 to the end, at which others may be put in (`schedule.joints`).
        device: where the arrays are to be.
        evicted: the memories.
        together: the first and the last of layers whose calls stand together, and use the same arrays: of each run of
            them in slices.
    """
    coming: dict[int, list[Call]] = defaultdict(list)
    leaving: dict[int, list[Call]] = defaultdict(list)
    given: dict[int, dict[SyncedMemory, Blob]] = defaultdict(dict)
    arrays = []
    for memory, whiles in whiles_of(calls, places, evicted, together).items():
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


def join(forward: Sequence[Call], backward: Sequence[Call], times: Times, in_turn: bool) -> list[Call]:
    """The calls of backward, on what forward has brought where that has no time to go and come back in between; with
    `in_turn` behind the others that do, or else as if it were the only one: so less is there at a time."""
    clock, back, last = 0.0, 0.0, dict[SyncedMemory, float]()  # of arrays, when they are used last
    brought: dict[Any, Blob] = {}  # by what is in them
    for each in forward:
        clock += 0 if each.op in COPIES else times.ms(each)
        last.update(dict.fromkeys(memories([each]), clock))
        if not copies_state(each):
            continue
        if each.op == "fetch":
            brought[content_of(each)] = each.operand(0).blob
        else:
            brought.pop(content_of(each), None)
    result, arrays = list[Call](), dict[SyncedMemory, Blob]()
    for each in backward:
        clock += 0 if each.op in COPIES else times.ms(each)
        comes = each.op == "fetch" and copies_state(each)
        array = brought.pop(content_of(each), None) if comes else None
        if array is not None:
            there = max(last[array.data_view.memory], back if in_turn else 0.0) + times.copy_ms(array.nbytes)
            if there >= clock:
                arrays[each.operand(0).memory] = array
                continue
            back = there
        result.append(redirected(each, arrays))
    return result


def content_of(copy: Call) -> tuple[Any, ...]:
    """Which bytes of evicted state a copy is about."""
    return copy.attributes["home"], copy.attributes["start"], copy.operand(0).view.nbytes


def copies_state(each: Call) -> bool:
    """Whether a call brings evicted state, or copies it out: not what a plan parks of other arrays."""
    return each.op in COPIES and not isinstance(each.attributes["home"], Parked)


def staying(copies: Iterable[Call], room: float) -> dict[SyncedMemory, int]:
    """Of state that these copy in pieces, how many first bytes of which would best stay on the device where there is so
    much room: whole pieces, as all calls have them, of what is copied most often."""
    pieces, copied = defaultdict[SyncedMemory, set[tuple[int, int]]](set), Counter[SyncedMemory]()
    for memory, start, nbytes in map(content_of, filter(copies_state, copies)):
        pieces[memory].add((start, start + nbytes))
        copied[memory] += nbytes
    result = dict[SyncedMemory, int]()
    for memory in sorted(pieces, key=lambda memory: copied[memory] / max(pieces[memory])[1], reverse=True):
        ends = [end for _, end in pieces[memory] if all(stop <= end or start >= end for start, stop in pieces[memory])]
        if len(ends) > 1:
            result[memory] = max((end for end in ends if end <= room), default=0)
            room -= result[memory]
    return result


def is_torn(calls: Iterable[Call]) -> bool:
    """Whether any of these copies bytes that stay on the device, with others."""
    copies = map(content_of, filter(copies_state, calls))
    return any(start < memory.staying for memory, start, _ in copies)


def whiles_of(
    calls: Sequence[Call],
    places: Sequence[int],
    wanted: Container[SyncedMemory],
    together: Iterable[tuple[int, int]] = (),
) -> dict[SyncedMemory, list[_While]]:
    """Of each memory that is wanted, when the calls use it."""
    found: dict[SyncedMemory, list[_While]] = {}
    first_of = {layer: first for first, last in together for layer in range(first, last + 1)}
    run_of = [first_of.get(each.layer, each.layer) for each in calls]
    for at, each in enumerate(calls):
        for operand in each.present():
            if operand.memory not in wanted or operand.offset + operand.nbytes <= operand.memory.staying:
                continue
            before, after = places[bisect_right(places, at) - 1], places[bisect_left(places, at + 1)]
            whiles, changes = found.setdefault(operand.memory, []), operand.intent is not Intent.READ
            # what nobody changes is the same whoever else has used other parts of it meanwhile
            near = whiles[-1:] if changes or any(each.changes for each in whiles) else reversed(whiles)
            last = next((each for each in near if each.part == operand.part), None)
            if last is not None and (run_of[last.uses[-1]] == run_of[at] or before < last.after):
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
    early, _ = with_moved(brought.calls, _one_ahead(brought.calls))
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


def with_moved(calls: Sequence[Call], moves: Mapping[int, int]) -> tuple[list[Call], list[int]]:
    """The calls with some before others, among whose layers' calls they then are, or at the end; and where each of them
    is then. Of those that move copies are told of as these layers'."""
    order = sorted(range(len(calls)), key=lambda at: (moves.get(at, at), at not in moves, at))
    last, result = len(calls) - 1, [*calls]
    for at, to in moves.items():
        result[at] = like(calls[min(to, last)], dataclasses.replace(calls[at]))
        if result[at].op not in COPIES:
            result[at].layer_name = calls[at].layer_name
    position = {at: now for now, at in enumerate(order)}
    return [result[at] for at in order], [position[at] for at in range(len(calls))]
