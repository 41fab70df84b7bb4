"""Runs in slices that end with a loss: each slice has its gradients right behind it, in forward (`slices`)."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from itertools import accumulate, chain

import numpy as np

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Block, Parked
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.evict import with_others
from blobmem.net.plan.parts import Divider
from blobmem.net.plan.slices import (
    LOSSES,
    Division,
    Run,
    Sliced,
    Stretch,
    Undivided,
    adding,
    by_item,
    counts,
    divided,
    may_divide,
    of_slice,
    over_labels,
)
from blobmem.net.schedule import first_uses
from blobmem.ops.call import Call, Operand, call, like, memories, overwrite, read, redirected

IDLE = 8
"""Of so many times as long as it takes to make an array anew is the while from which on that is done."""


class AtOnce(Run):
    """What becomes of a run that ends with a loss where each slice has its gradients right behind it, in forward.

    Nothing of a slice is kept for backward. What the gradients of it all come to lies in arrays of its own, as of a
    loss whose own gradient is one; backward multiplies it by what that is then. What a slice makes of what the run was
    given, and uses again long after, it makes anew. For each slice there is an array of the gradient of what the run
    was given, which may be evicted until backward goes on with that. And what the run was given long before is copied
    to the host, from where each slice has its own.
    """

    def __init__(self, of: Undivided, ahead: Stretch, back: Stretch, run: Division) -> None:
        super().__init__(of, ahead, back, run)
        self._arrays: dict[SyncedMemory, Blob] = {}  # in place of what has gradients
        self._crossing: dict[SyncedMemory, Operand] = {}  # of these, what slices have parts of, and as first written
        self._joining: dict[SyncedMemory, list[Call]] = {}  # what makes these of their slices'
        self._away = self._leaving()
        self._homes: dict[SyncedMemory, list[Parked]] = {}  # of each of these, where its slices go
        self._anew: dict[SyncedMemory, tuple[Call, Blob]] = {}  # what slices make anew, by what, and where

    def made(self) -> Sliced | None:
        of, ahead, back = self._of, self._ahead, self._back
        outer = self._earlier | self._later
        written, back_written = ahead.written(), back.written()
        filled, back_filled = first_uses(ahead.inside), first_uses(back.inside)
        if any(memory in self._before or memory in back_written or not filled[memory] for memory in written):
            return None
        if any(memory in self._earlier or not back_filled[memory] for memory in back_written):
            return None
        absent = {memory for memory in written if memory in of.free and memory not in outer}
        never = absent | {memory for memory in back_written if memory in of.free and memory not in outer}
        crossing = {*back_written} - never
        results = self._results(crossing)
        whole = {memory: nbytes for memory, nbytes in (written | back_written).items() if memory not in never}
        if results is None or any(nbytes % (ALIGNMENT * self._count) for nbytes in whole.values()):
            return None
        if any(each.array.view.memory in results for each in of.remade):
            return None  # of which forward is asked later what it relies on
        self._arrays = {
            memory: Blob(
                each.blob.shape, dtype=each.blob.dtype, device=each.blob.device, name=f"{memory.name} (slices)"
            )
            for memory, each in results.items()
        }
        sums = {memory: array for memory, array in self._arrays.items() if memory not in crossing}
        self._crossing = {memory: each for memory, each in results.items() if memory in crossing}
        apart = {self._arrays[memory].data_view.memory for memory in self._crossing}
        self._anew = self._idle(never)
        apart |= {array.data_view.memory for _, array in self._anew.values()}
        divider = Divider(self._count, never | apart | {*self._away}, {*whole}, of.turned, divided, "slice")
        forward, place = self._forward(divider)
        multiplied = [self._multiplied(results[memory], array) for memory, array in sums.items()]
        rest, added = self._with_gradients([*back.after, *of.backward[back.stop :]])
        never |= added
        remade = self._remade([], place, never)
        pieces = [*divider.pieces, *self._losses, *sums.values()]
        backward = [*of.backward[: back.start], *back.before, *multiplied, *rest]
        given = [(of.forward[at].layer, self._run.first) for _, at in self._away.values()]
        return Sliced(forward, backward, remade, (self._run,), 0, pieces, [*never], given)

    def _results(self, crossing: Set[SyncedMemory]) -> dict[SyncedMemory, Operand] | None:
        """What the run's gradients come to, sums and what crosses its beginning, as first written; None if they are not
        just a multiple of its one loss's own, or have no room as they are in half precision."""
        back, between = self._back, [*self._of.forward[self._ahead.stop :], *self._ahead.after]
        between += [*self._of.backward[: back.start], *back.before]
        losses = [each for each in back.inside if str(each.op) in LOSSES]
        gradients = {_gradient_of(each).memory for each in losses}
        if len(gradients) != 1 or any(each.blob.dtype == np.float16 for call in back.inside for each in call.present()):
            return None
        self._loss = losses[0]
        found = dict[SyncedMemory, Operand]()
        for each in back.inside:
            sums = {operand.memory for operand in each.present() if operand.accumulate}
            if (not sums.isdisjoint(found) and not sums <= {*found}) or not sums.isdisjoint(crossing):
                return None
            for operand in each.present():
                if operand.intent is not Intent.READ and (operand.accumulate or operand.memory in crossing):
                    found.setdefault(operand.memory, operand)
        read = {memory for each in back.inside for memory in each.read_memories()} - {*found}
        changed = {memory for each in between for memory in each.written_memories()}
        if not read & changed <= gradients or not found.keys().isdisjoint(memories(between)):
            return None
        return found

    def _idle(self, never: Set[SyncedMemory]) -> dict[SyncedMemory, tuple[Call, Blob]]:
        """What slices make of what the run was given, and do not use for long before their gradients want it: the call
        that makes it, and an array for what that makes then."""
        of, inside = self._of, [*self._ahead.inside, *self._back.inside]
        turn, clock = len(self._ahead.inside), [0.0, *accumulate(map(of.times.ms, inside))]
        uses, written = defaultdict[SyncedMemory, list[int]](list), set[SyncedMemory]()
        for at, each in enumerate(inside):
            written.update(each.written_memories())
            for memory in {*memories([each])}:
                uses[memory].append(at)
        result = dict[SyncedMemory, tuple[Call, Blob]]()
        for at, maker in enumerate(self._ahead.inside):
            made, given = [*maker.written_memories()], {*maker.read_memories()}
            if len(made) != 1 or made[0] not in never or not given.isdisjoint(written) or not may_divide(maker, of.ops):
                continue
            last = max(use for use in uses[made[0]] if use < turn)
            again = next((use for use in uses[made[0]] if use >= turn), last)
            changed = any(made[0] in each.written_memories() for each in inside[at + 1 :])
            if not changed and clock[again] - clock[last + 1] > IDLE * of.times.ms(maker):
                blob = next(operand.blob for operand in maker.present() if operand.memory is made[0])
                name = f"{made[0].name} (again)"
                result[made[0]] = maker, Blob(blob.shape, dtype=blob.dtype, device=blob.device, name=name)
        return result

    def _leaving(self) -> dict[SyncedMemory, tuple[Operand, int]]:
        """What the run is given by calls that are long before it, so that it may leave and come back, slice by slice,
        meanwhile; and the position of the last of these that uses it."""
        of, before = self._of, self._of.forward[: self._ahead.start]
        made = {memory for each in before if each.op in of.ops for memory in each.written_memories()} & of.free
        last = {memory: at for at, each in enumerate(before) for memory in memories([each])}
        clock = [0.0, *accumulate(map(of.times.ms, before))]
        result = dict[SyncedMemory, tuple[Operand, int]]()
        for operand in (operand for each in self._ahead.inside for operand in by_item(each)):
            memory, nbytes = operand.memory, operand.nbytes
            if memory not in made or memory in of.turned or nbytes % (ALIGNMENT * self._count):
                continue
            if clock[-1] - clock[last[memory] + 1] >= 2 * of.times.copy_ms(nbytes):
                result.setdefault(memory, (operand, last[memory]))
        return result

    def _until(self) -> Sequence[Call]:
        """The calls of forward before the run, and copies to the host of what comes back slice by slice."""
        calls, leaving = self._of.forward[: self._ahead.start], defaultdict[int, list[Call]](list)
        for memory, (operand, at) in self._away.items():
            device, count = operand.blob.device, self._count
            block, homes = Block(device), self._homes.setdefault(memory, [])
            for index in range(count):
                name = f"{memory.name} (slice {index + 1} of {count})"
                homes.append(Parked(operand.nbytes // count, device, name, block))
                part = dataclasses.replace(operand, intent=Intent.READ, shape=None, part=(index, count))
                leaving[at + 1].append(like(calls[at], call("evict", part, home=homes[index])))
        return with_others(calls, leaving)[0]

    def _brought(self, divider: Divider, index: int, each: Call) -> list[Call]:
        """What copies back what a call of a slice is the first to use."""
        result = list[Call]()
        for operand in by_item(each):
            if operand.memory in self._homes and not divider.has(operand.memory):
                home = self._homes[operand.memory][index]
                result.append(like(each, call("fetch", divider.fill(operand), home=home)))
        return result

    def _in_front(self) -> list[Call]:
        """What gives the loss's gradient, as of one, to a slice."""
        operand = _gradient_of(self._loss)
        share = 1.0 if counts(self._loss) else self._share(self._loss)
        self._one = self._gradient = self._scalar(operand, "one")
        calls = [like(self._loss, call("fill", overwrite(self._one), value=share))]
        if counts(self._loss):
            self._gradient = self._scalar(operand, "slices")
            calls.append(over_labels(self._loss, read(self._one), overwrite(self._gradient)))
        return calls

    def _behind(self, divider: Divider, index: int) -> list[Call]:
        """The gradients of a slice, in arrays of the run's own; of the first one they begin."""
        result, begun, there = list[Call](), set[SyncedMemory](), dict[SyncedMemory, Blob]()
        for each in self._back.inside:
            for memory in memories([each]):  # in the order of operands, for the same plan every time
                if memory in self._anew and memory not in there:
                    maker, there[memory] = self._anew[memory]
                    result += divider.calls(like(each, redirected(maker, there)))
            sums = {operand.memory for operand in each.present() if operand.accumulate}
            each = _beginning(each) if not index and begun.isdisjoint(sums) else adding(each)
            begun |= sums
            result += divider.calls(redirected(each, self._arrays | there))
            if str(each.op) in LOSSES:
                at = LOSSES[str(each.op)][1]
                result[-1] = of_slice(result[-1], at, read(self._gradient, each.operand(at).shape))
        for memory, gradient in self._crossing.items():
            part = divider.on_piece(read(self._arrays[memory]))
            whole = dataclasses.replace(gradient, shape=part.blob.shape, part=(index, self._count))
            self._joining.setdefault(memory, []).append(self._multiplied(whole, part.blob))
        return result

    def _multiplied(self, result: Operand, array: Blob) -> Call:
        """What makes a gradient, or a slice of it, of the run's array."""
        number = dataclasses.replace(_gradient_of(self._loss), shape=(1,))
        return like(self._loss, call("multiply", read(array), number, dataclasses.replace(result, shape=array.shape)))

    def _with_gradients(self, calls: Sequence[Call]) -> tuple[list[Call], set[SyncedMemory]]:
        """The calls, each behind what makes the gradients that it is the first to use of those that slices have had
        apart; and those gradients that are never whole, as they are added, slice by slice, to others alone."""
        result, later, added = list[Call](), dict(self._joining), set[SyncedMemory]()
        users = Counter(memory for each in calls for memory in {*memories([each])})
        for each in calls:
            behind = list[Call]()
            for memory in memories([each]):
                joining = later.pop(memory, [])
                if joining and memory in self._of.free and users[memory] == 1 and _adds(each, memory):
                    behind += [_adding_to(each.operand(-1), one) for one in joining]
                    each = each.over(tuple(one for one in each.present() if one.memory is not memory))
                    added.add(memory)
                else:
                    result += joining
            result += [each, *behind]
        return [*chain.from_iterable(later.values()), *result], added


def _adds(each: Call, memory: SyncedMemory) -> bool:
    """Whether a call adds what is in a memory, once, to others, in another one."""
    found = [operand.memory is memory for operand in each.present()]
    return each.op == "sum_arrays" and len(found) > 2 and sum(found) == 1 and not found[-1]


def _adding_to(total: Operand, multiplied: Call) -> Call:
    """A call that makes a slice of a gradient, adding it to that of a sum."""
    x, number, part = (multiplied.operand(at) for at in range(3))
    part = dataclasses.replace(total, intent=Intent.WRITE, shape=part.shape, part=part.part)
    return multiplied.over((x, number, part), multiplied.attributes | {"accumulate": True})


def _gradient_of(loss: Call) -> Operand:
    """The loss's own gradient, which the call of its gradients reads."""
    return loss.operand(LOSSES[str(loss.op)][1])


def _beginning(each: Call) -> Call:
    """The call, beginning the sums that it would add to."""
    operands = (
        dataclasses.replace(operand, intent=Intent.OVERWRITE) if operand is not None and operand.accumulate else operand
        for operand in each.operands
    )
    return dataclasses.replace(each, operands=tuple(operands))
