"""A pass over the calls of backward: a solver's updates are put in, so that gradients need not last to its end.

A parameter is updated once its gradient is complete and nothing in backward reads the parameter any more. Its gradient
is then an array like any other: the first call that adds to it overwrites it, and after the update it is dead. Each
parameter is updated by the same op with the same numbers as after backward, and so to the same bits.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise

from blobmem.memory import Intent, SyncedMemory
from blobmem.ops.call import Call, Operand, begins_sum, call, memories, overwrite_diff

SHARE = 16
"""Updates wait until their gradients have this part of all gradients' bytes. One launch updates many parameters on a
GPU, so that there are at most this many, and one more. Of the nets in `models/` updates one by one would need 0 to 2
MiB less, an eighth 0 to 13 MiB more."""

SMALL = 64
"""Such a part where any of them have what is evicted, which then has to be there at once: much of it is waited for."""

FIRST = 10
"""In the first such part of backward's calls there is no update: a solver waits for the loss before the first one, and
a GPU needs work meanwhile."""


def update_early(
    backward: Sequence[Call], updates: Sequence[Call], joints: Sequence[int], evicted: Collection[SyncedMemory] = ()
) -> list[Call]:
    """The calls of a whole backward pass, with a solver's updates put in.

    Args:
        backward: the calls, each with its layer.
        updates: of each parameter one call, whose operands are its gradient, its data, and what nobody else uses.
            Those that are carried out at one place keep their order. They get the layers they stand in.
        joints: the positions, from 0 to the end, at which calls may be put in (`schedule.joints`).
        evicted: memories that come for an update, and go.

    A gradient that no call of backward can begin by overwriting it is filled with zeros first. Parameters that come to
    share bytes with each other by what a user does are updated at the end, in their order.
    """
    uses: dict[SyncedMemory, list[int]] = defaultdict(list)
    places: dict[SyncedMemory, set[tuple[int, int]]] = defaultdict(set)
    for at, each in enumerate(backward):
        for operand in each.present():
            uses[operand.memory].append(at)
            places[operand.memory].add((operand.offset, operand.nbytes))
    used = [{*memories([update])} for update in updates]
    users = Counter(chain.from_iterable(used))
    end = len(backward)
    put: dict[int, list[Call]] = defaultdict(list)
    ready: dict[int, list[int]] = defaultdict(list)  # of updates, by where they can be
    first: dict[SyncedMemory, int] = {}  # where gradients begin that are used in one piece, by one update
    filled: list[tuple[int, Operand]] = []
    for index, update in enumerate(updates):
        gradient = update.operand(0)
        memory, piece = gradient.view.memory, (gradient.view.offset, gradient.view.nbytes)
        alone = all(users[each] == 1 for each in used[index])
        after = 1 + max((uses[each][-1] for each in used[index] if each in uses), default=-1) if alone else end
        ready[joints[bisect_left(joints, after)]].append(index)
        begins = uses[memory][0] if memory in uses else after
        if alone and places.get(memory) == {piece}:
            first[memory] = begins
        filled.append((begins, gradient))
    calls: list[Call] = []
    for start, stop in pairwise([*joints, end]):
        calls += _beginning(backward[start:stop], start, first)
    begun = {operand.memory for each in calls for operand in each.present() if begins_sum(operand)}
    for begins, gradient in filled:
        if gradient.view.memory not in begun:
            zeros = call("fill", overwrite_diff(gradient.blob), value=0.0)
            put[joints[bisect_right(joints, begins) - 1]].append(zeros)
    sizes = [gradient.view.nbytes for _, gradient in filled]
    pending, nbytes, most = list[int](), 0, sum(sizes)
    comes = [not own.isdisjoint(evicted) for own in used]
    for at in joints:
        pending += ready[at]
        nbytes += sum(sizes[index] for index in ready[at])
        if any(comes[index] for index in pending):
            due = nbytes * SMALL >= most
        else:
            due = at * FIRST >= end and nbytes * SHARE >= most
        if at == end or (pending and due):
            put[at] += [updates[index] for index in sorted(pending)]
            pending, nbytes = [], 0
    result: list[Call] = []
    for at in range(end + 1):
        layer = backward[max(at - 1, 0)].layer if backward else 0
        # updates are those of all plans that are tried
        result += [*(dataclasses.replace(each, layer=layer) for each in put[at]), *calls[at : at + 1]]
    return result


def _beginning(run: Sequence[Call], start: int, first: Mapping[SyncedMemory, int]) -> Iterable[Call]:
    """Calls that may run as one, from `start` on: overwriting the gradients that they add to, if none has been used
    before. One keyword says so of all of them."""
    for at, each in enumerate(run, start):
        used = Counter(memories([each]))
        sums = [operand.memory for operand in each.present() if operand.accumulate]
        if any(first.get(memory) != at or used[memory] > 1 for memory in sums):
            return run
    return map(_overwriting, run)


def _overwriting(each: Call) -> Call:
    if not any(operand.accumulate for operand in each.present()):
        return each
    operands = (
        dataclasses.replace(operand, intent=Intent.OVERWRITE) if operand is not None and operand.accumulate else operand
        for operand in each.operands
    )
    return dataclasses.replace(each, operands=tuple(operands))
