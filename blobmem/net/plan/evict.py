"""A pass over the calls of forward and backward, where a device has no room for all that lives between them: arrays are
given away in between.

Such an array is copied to the host behind the call of forward that completes it, and back, into another array, before
the first call of backward that reads it: its lifetime becomes two, each with a place of its own in the arena. Where
calls of backward read it that are far apart, it goes and comes back again; and so does what slices of the batch make
anew in backward. The copies are queued on streams of their own. Which arrays, follows from lifetimes, and from what is
to be evicted first (`choice`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from blobmem.devices import Device
from blobmem.devices.pages import round_up
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Block, Parked
from blobmem.memory.reordered import Form
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.places import Draft
from blobmem.net.plan.uses import Remade, Uses, moved
from blobmem.ops.call import Call, Operand, call, like, overwrite, placed, read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A while in which an array may be away: between forward and backward, or two calls of backward.

    Attributes:
        memory: what it lies in.
        operand: all of it, as the call has it that completes it; with a form, if it is kept channels last.
        written: positions of the calls that change it: of forward, or of backward if it is `late`.
        read: positions of the calls of backward that read it then.
        until: which of these is the first afterwards.
        size: its bytes in the arena.
        left, back: the steps of the pass between which, both excluded, that is.
    """

    memory: SyncedMemory
    operand: Operand
    written: list[int]
    read: list[int]
    until: int
    size: int
    left: int
    back: int
    late: bool = False


class Evicted(NamedTuple):
    """The calls of a pass with those that copy arrays away and back.

    Attributes:
        forward, backward: the calls.
        remade: the arrays that are brought back.
        homes: where the bytes of arrays go.
        fetched: what they come back in.
    """

    forward: list[Call]
    backward: list[Call]
    remade: list[Remade]
    homes: dict[SyncedMemory, Parked]
    fetched: list[Blob]


def candidates(
    forward: Sequence[Call], backward: Sequence[Call], drawn: Draft, free: Container[SyncedMemory],
    ops: Container[str], pieces: Iterable[SyncedMemory] = (),
) -> list[Candidate]:  # fmt: skip
    """What may be given away: what backward reads as forward has left it, in the order that its user sees, or as calls
    of backward have that make pieces of the batch.

    Args:
        forward, backward: the calls.
        drawn: of their schedules.
        free: memories that nobody reads but these calls.
        ops: those of the device.
        pieces: memories of slices of the batch, each of which one slice fills, and uses, in one of the passes.
    """
    uses = Uses(forward, backward, ops)
    starts = [[unit.start for unit in units] for units in drawn.units]
    own = {life.key: life for life in chain(drawn.lives.arena, *drawn.lives.turns.values())}
    forms: dict[SyncedMemory, set[Form]] = defaultdict(set)
    for operand in (operand for unit in chain(*drawn.units) for each in unit.calls for operand in each.present()):
        forms[operand.memory].update(() if operand.form is None else (_of_all(operand, operand.form),))
    last: dict[SyncedMemory, int] = {}
    for at, each in enumerate(forward):
        last.update((operand.memory, at) for operand in each.present())
    made = {memory: (each, uses.read.get(memory, [])) for memory, each in uses.written.items() if uses.stays(memory)}
    made |= {memory: uses.made_late(memory) for memory in pieces if memory not in uses.written}

    def step(at: int, late: bool) -> int:
        return late * len(starts[0]) + bisect_right(starts[late], at) - 1

    found = []
    for memory, (written, read_at) in made.items():
        late, places = memory not in uses.written, [memory]
        if memory.reordered is not None:
            places.append(memory.reordered.array)
        lives = [own[place] for place in places if place in own]
        if memory not in free or memory in uses.on_host or not read_at or len(lives) != 1:
            continue
        life, form = lives[0], next(iter(forms[memory]), None)
        if len(forms[memory]) > 1 or (life.key is memory) != (form is None):
            continue
        operands = [operand for at in read_at for operand in backward[at].present() if operand.memory is memory]
        makes = [(backward if late else forward)[at] for at in written]
        makers = [operand for each in makes for operand in each.present() if operand.memory is memory]
        if not all(_is_all(operand, life.nbytes) for operand in (*operands, makers[-1])):
            continue
        size = round_up(life.nbytes, ALIGNMENT)
        maker = dataclasses.replace(makers[-1], form=form)
        left = step(written[-1] if late else last[memory], late)
        for until, at in enumerate(read_at):
            back = step(at, True)
            amid = until > 0 and all(_is_slices(backward[near]) for near in read_at[until - 1 : until + 1])
            if left + 1 < back and not amid:
                found.append(Candidate(memory, maker, written, read_at, until, size, left, back, late))
            left = back
    return found


def _is_all(operand: Operand, nbytes: int) -> bool:
    """Whether it is all of an array, or with the other slices of the batch is."""
    view = operand.blob.data_view
    return not operand.diff and view.offset == 0 and view.nbytes == nbytes


def _is_slices(each: Call) -> bool:
    """Whether a call is about a slice of the batch: what it reads is not worth a way to the host and back for each."""
    return each.op == "take_items" or any(operand.part is not None for operand in each.present())


def _of_all(operand: Operand, form: Form) -> Form:
    """The form of all slices of the batch."""
    return form if operand.part is None else (form[0] * operand.part[1], *form[1:])


def loads(drawn: Draft) -> np.ndarray:
    """Bytes in use in each step of a pass."""
    load = np.zeros(sum(map(len, drawn.units)) + 1, np.int64)
    for life in drawn.lives.arena:
        size = round_up(life.nbytes, ALIGNMENT)
        load[life.first] += size
        load[life.last + 1] -= size
    return np.cumsum(load)[:-1]


def loads_without(given: Iterable[Candidate], load: np.ndarray) -> np.ndarray:
    """Bytes in use in each step, with these given away."""
    load = load.copy()
    for each in given:
        load[each.left + 1 : each.back] -= each.size
    return load


def lowest(found: Iterable[Candidate], load: np.ndarray) -> int:
    """Bytes in use in the fullest step, with all given away."""
    return int(loads_without(found, load).max(initial=0))


def choose(
    found: Iterable[Candidate], load: np.ndarray, room: int, first: Container[SyncedMemory] = ()
) -> list[Candidate]:
    """Which to give away so that no step has more than `room` bytes in use, as it has not with all given away.

    These are taken `first`; then what is away longest: it helps most steps, and its copies have most time.
    """
    over, taken = load - room, list[Candidate]()
    for each in sorted(found, key=lambda each: (each.memory not in first, each.left - each.back, -each.size)):
        if over.max(initial=0) <= 0:
            break
        away = over[each.left + 1 : each.back]
        if away.max(initial=0) > 0:
            away -= each.size
            taken.append(each)
    for each in sorted(taken, key=lambda each: -each.size):  # some may not be needed with those that came later
        away = over[each.left + 1 : each.back]
        if away.max(initial=0) + each.size <= 0:
            away += each.size
            taken.remove(each)
    return taken


def travelling(chosen: Sequence[Candidate]) -> int:
    """Bytes that leave the device or come back in a pass: what is away twice leaves once, and comes back twice."""
    return sum({each.memory: each.size for each in chosen}.values()) + sum(each.size for each in chosen)


def evict(
    forward: Sequence[Call],
    backward: Sequence[Call],
    chosen: Sequence[Candidate],
    joints: tuple[Sequence[int], Sequence[int]],
    remade: Iterable[Remade],
    device: Device,
    early: Mapping[Candidate, int],
) -> Evicted:
    """The calls with those arrays given away in between.

    Args:
        forward, backward: the calls.
        chosen: what is given away.
        joints: the positions, from 0 to the end, of each at which calls may be put in (`schedule.joints`).
        remade: what other calls of backward fill, which have the places of what they rely on in forward.
        device: where the arrays are.
        early: of those that come back before they are needed, the position in backward.
    """
    passes = forward, backward
    away = defaultdict[int, list[Call]](list), defaultdict[int, list[Call]](list)
    back = defaultdict[int, list[Call]](list)
    readers, homes, fetched = [*backward], dict[SyncedMemory, Parked](), list[tuple[Candidate, Operand]]()
    block = Block(device)
    leaving: dict[SyncedMemory, Call] = {}
    for each in sorted(chosen, key=lambda each: each.until):  # of one array, what is away later reads what came later
        memory, blob = each.memory, each.operand.blob
        if memory not in homes:
            homes[memory] = Parked(blob.nbytes, device, f"{memory.name} (evicted)", block)
            after = joints[each.late][bisect_left(joints[each.late], each.written[-1] + 1)]
            before = passes[each.late][after - 1]
            leaving[memory] = like(before, call("evict", _kept_as(each, read(blob)), home=homes[memory]))
            away[each.late][after].append(leaving[memory])
        array = _kept_as(each, overwrite(Blob(blob.shape, dtype=blob.dtype, device=device, name=memory.name)))
        at = joints[1][bisect_right(joints[1], early.get(each, each.read[each.until])) - 1]
        back[at].append(like(backward[at], call("fetch", array, home=homes[memory])))
        for at in each.read[each.until :]:
            readers[at] = _redirected(readers[at], backward[at], memory, array.blob)
        fetched.append((each, array))
    result, positions = with_others(forward, away[0])
    position = {id(each): at for at, each in enumerate(result)}
    made = moved(remade, positions)
    for each, array in fetched:
        if not each.late:
            makers = [*(positions[at] for at in each.written), position[id(leaving[each.memory])]]
            made.append(Remade(array, sorted(makers), 0))
    both = {at: [*away[1].get(at, ()), *back.get(at, ())] for at in {*away[1], *back}}
    late = {each.memory for each in chosen if each.late}  # which nobody else reads
    own = {memory: home for memory, home in homes.items() if memory not in late}
    return Evicted(result, with_others(readers, both)[0], made, own, [array.blob for _, array in fetched])


def _kept_as(each: Candidate, operand: Operand) -> Operand:
    return dataclasses.replace(operand, form=each.operand.form)


def with_others(calls: Sequence[Call], put: Mapping[int, Sequence[Call]]) -> tuple[list[Call], list[int]]:
    """The calls, with others before those of some positions, or at the end; and where each of them is then."""
    more = accumulate(len(put.get(at, ())) for at in range(len(calls)))
    result = [each for at in range(len(calls) + 1) for each in (*put.get(at, ()), *calls[at : at + 1])]
    return result, [at + before for at, before in enumerate(more)]


def _redirected(reader: Call, before: Call, memory: SyncedMemory, array: Blob) -> Call:
    """The call, reading an array in place of what it has, where it had the memory `before`."""
    operands = (
        placed(operand, array) if operand is not None and was is not None and was.memory is memory else operand
        for operand, was in zip(reader.operands, before.operands, strict=True)
    )
    return reader.over(tuple(operands))
