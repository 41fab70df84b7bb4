"""Calls of backward that may run beside the others on a second stream, and how long what they use is kept for that.

Nobody in backward waits for the gradients of parameters but the updates that use them up, so that both go to the second
stream, while the gradients of data go on from layer to layer on the first; of branches, which wait for each other only
where they meet, some go to the second, too. What orders the two is found from where arrays lie when they run
(`net.lanes`). Two calls that could run at a time do not if the plan has put what they use in the same bytes: what a
call of the second stream uses counts as in use for some steps after it, where there is room.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from blobmem.memory import Intent, SyncedMemory
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.liveness import Lifetimes
from blobmem.ops.call import Call, memories

if TYPE_CHECKING:
    from blobmem.net.schedule import Unit

BESIDE = frozenset({
    "conv_backward_weights", "conv_backward_bias", "deconv_backward_weights", "inner_product_backward_weights",
    "inner_product_backward_bias", *UPDATES,
})  # fmt: skip
"""Ops that are for the second stream in any case."""

LAG = 12
"""Steps by which it may be behind, at most."""

ROOM = 8 << 20
"""How many bytes more than at the fullest moment may be in use for that: what a product's workspace takes, of which
small nets need a second one. There is room enough at other moments: with 2% more the first stream would hardly wait
less in any net of `models/`."""


def beside(calls: Iterable[Call]) -> None:
    """Give each of the calls of backward its stream: where it can begin first, if it is not for the second in any case.

    A call is reckoned to take as long as it uses bytes.
    """
    ends = [0, 0]  # of each stream, when all that it has been given is done
    used: dict[SyncedMemory, int] = {}  # when all that uses a memory is
    written: dict[SyncedMemory, int] = {}
    for each in calls:
        operands = [(operand.memory, operand.intent is not Intent.READ) for operand in each.present()]
        after = max(((used if writes else written).get(memory, 0) for memory, writes in operands), default=0)
        each.stream = int(each.op in BESIDE or (max(ends[1], after) < max(ends[0], after) and not each.on_host))
        end = max(ends[each.stream], after) + sum(operand.nbytes for operand in each.present())
        ends[each.stream] = end
        for memory, writes in operands:
            used[memory] = max(used.get(memory, 0), end)
            if writes:
                written[memory] = end


def kept_until(units: Sequence[Unit], lives: Lifetimes) -> list[int]:
    """For each step of a pass, up to which step what it uses is to be kept; its own on the first stream.

    Args:
        units: the steps.
        lives: what they use, from when to when on one stream.
    """
    until = [*range(len(units))]
    own = {life.key: life for life in itertools.chain(lives.arena, *lives.turns.values())}
    size = {key: life.nbytes for key, life in own.items()}
    ends = {key: life.last for key, life in own.items()}
    # an array that lives on has no heir, which then has bytes of its own from the step on that makes it
    taken = {life.key: life.last for turn in lives.turns.values() for life in turn[:-1]}
    ends |= {key: last - 1 for key, last in taken.items()}
    load = np.zeros(len(units) + 1, np.int64)
    for life in lives.arena:
        load[life.first] += life.nbytes
        load[life.last + 1] -= life.nbytes
    load = np.cumsum(load)[:-1]
    limit = int(load.max(initial=0)) + ROOM
    joins = _joins(units)
    for at, unit in enumerate(units):
        if not unit.lane:
            continue
        keys = [key for key in {*_places(unit), at} if key in own and taken.get(key) != at]
        for later in range(at + 1, min(at + LAG + 1, joins[at])):
            more = [key for key in keys if ends[key] < later]
            nbytes = sum(size[key] for key in more)
            if load[later] + nbytes > limit:
                break
            load[later] += nbytes
            ends.update(dict.fromkeys(more, later))
            until[at] = later
    return until


def _places(unit: Unit) -> Iterable[Hashable]:
    for memory in memories(unit.calls):  # which is in use for as long wherever its bytes are
        yield memory
        if memory.reordered is not None:
            yield memory.reordered.array


def _joins(units: Sequence[Unit]) -> list[int]:
    """For each step the first one of the first stream that has to come after it, whatever lies where."""
    joins = [len(units)] * len(units)
    users: dict[SyncedMemory, int] = {}  # of a memory, the next step of the first stream that uses it, going back
    writers: dict[SyncedMemory, int] = {}
    join = len(units)
    for at in reversed(range(len(units))):
        for operand in (operand for call in units[at].calls for operand in call.present()):
            memory, writes = operand.memory, operand.intent is not Intent.READ
            if units[at].lane:
                join = min(join, (users if writes else writers).get(memory, join))
            else:
                users[memory] = at
                if writes:
                    writers[memory] = at
        joins[at] = join
    return joins
