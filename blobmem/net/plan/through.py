"""A pass over the calls of backward: gradients that a sum passes on as they are need no arrays of their own.

Of a sum's gradient each bottom gets a copy. Who reads that reads the sum's own instead, up to where the array begins
anew, and the copy is not made. A batch norm with a scale works in place on its copy; where the device does both at one
go it takes the sum's gradient for input, so that its result may lie where it has what it had normalised.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import takewhile

from blobmem.memory import Intent, SyncedMemory
from blobmem.net.fusion import normalize_backward
from blobmem.net.plan.uses import lie_alike
from blobmem.ops.call import Call, Operand, like, memories


def through(
    backward: Sequence[Call], free: Container[SyncedMemory], ops: Container[str]
) -> tuple[list[Call], set[SyncedMemory]]:
    """The calls without such copies, and the memories that none of them uses any more.

    Args:
        backward: the calls, one by one.
        free: memories that nobody reads but the calls of the pass.
        ops: those of the device.
    """
    made = _Calls(backward)
    for at in range(len(backward)):
        each = made.calls[at]  # which may read another sum's by now
        if each is None or each.op != "eltwise_sum_backward" or each.attributes["coeff"] != 1:
            continue
        dy, copy = each.operands
        assert dy is not None and copy is not None
        if dy.memory is copy.memory or dy.memory not in free or copy.memory not in free:
            continue
        readers = _readers(made, at + 1, dy, copy)
        if readers is not None:
            for reader in readers:
                made.put(reader, _reading(made.calls[reader], dy, copy))
            made.put(at, None)
            if readers and "batch_norm_scale_backward" in ops:
                _at_one_go(made, readers[0], dy)
    calls = [each for each in made.calls if each is not None]
    return calls, {*memories(backward)} - {*memories(calls)}


class _Calls:
    """Calls, of which some are replaced, and where each memory is used: deep nets have thousands of both.

    Attributes:
        calls: what they are by now; None where there is none any more.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls: list[Call | None] = [None] * len(calls)
        self._used: dict[SyncedMemory, set[int]] = defaultdict(set)  # where it is, or was
        for at, each in enumerate(calls):
            self.put(at, each)

    def put(self, at: int, each: Call | None) -> None:
        """Let it be the call at a position."""
        self.calls[at] = each
        for memory in memories([each] if each is not None else ()):
            self._used[memory].add(at)

    def using(self, start: int, *those: SyncedMemory) -> Iterator[tuple[int, Call]]:
        """The calls from `start` on that use any of the memories, in order, and where they are."""
        for at in sorted({at for memory in those for at in self._used[memory] if at >= start}):
            each = self.calls[at]
            if each is not None and not {*memories([each])}.isdisjoint(those):
                yield at, each


def _readers(calls: _Calls, start: int, dy: Operand, copy: Operand) -> list[int] | None:
    """The calls from `start` on that read a copy of dy, up to where its array begins anew; None if they would not find
    the same in dy."""
    found, changed = list[int](), False
    for at, each in calls.using(start, dy.memory, copy.memory):
        changed = changed or dy.memory in each.written_memories()
        own = [operand for operand in each.present() if operand.memory is copy.memory]
        if any(operand.intent is Intent.WRITE or not lie_alike(copy, operand) for operand in own):
            return None
        if any(operand.intent is Intent.READ for operand in own):
            if changed:
                return None
            found.append(at)
        if any(operand.intent is Intent.OVERWRITE for operand in own):
            break
    return found


def _reading(each: Call | None, dy: Operand, copy: Operand) -> Call:
    """The call, reading dy in place of a copy."""
    assert each is not None
    operands = (
        dataclasses.replace(operand, blob=dy.blob, diff=dy.diff, shape=operand.op_shape)
        if operand is not None and operand.memory is copy.memory and operand.intent is Intent.READ
        else operand
        for operand in each.operands
    )
    return each.over(tuple(operands))


def _at_one_go(made: _Calls, at: int, dy: Operand) -> None:
    """Put one call in place of those of a scale and a batch norm from `at` on, if these begin with dy there.

    It counts as the batch norm's: a pass that begins there would find nothing that the scale has left.
    """
    following = [*filter(None, takewhile(bool, made.calls[at : at + 4]))]
    group = normalize_backward(following, 0)
    if group is None or group.call.operand(4).memory is not dy.memory:
        return
    if not any(made.using(at + group.stop, *(each.memory for each in group.skipped))):
        made.put(at, like(following[group.stop - 1], group.call))
        for skipped in range(at + 1, at + group.stop):
            made.put(skipped, None)
