"""A pass over the calls of backward: gradients that a sum passes on as they are need no arrays of their own.

Of a sum's gradient each bottom gets a copy. Who reads that reads the sum's own instead, up to where the array begins
anew, and the copy is not made. A batch norm with a scale works in place on its copy; where the device does both at one
go it takes the sum's gradient for input, so that its result may lie where it has what it had normalised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
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
    result: list[Call | None] = [*backward]
    for at in range(len(result)):
        each = result[at]  # which may read another sum's by now
        if each is None or each.op != "eltwise_sum_backward" or each.attributes["coeff"] != 1:
            continue
        dy, copy = each.operands
        assert dy is not None and copy is not None
        if dy.memory is copy.memory or dy.memory not in free or copy.memory not in free:
            continue
        readers = _readers(result, at + 1, dy, copy)
        if readers is not None:
            for reader in readers:
                result[reader] = _reading(result[reader], dy, copy)
            result[at] = None
            if readers and "batch_norm_scale_backward" in ops:
                _at_one_go(result, readers[0], dy)
    calls = [each for each in result if each is not None]
    return calls, {*memories(backward)} - {*memories(calls)}


def _readers(calls: Sequence[Call | None], start: int, dy: Operand, copy: Operand) -> list[int] | None:
    """The calls from `start` on that read a copy of dy, up to where its array begins anew; None if they would not find
    the same in dy."""
    found, changed = list[int](), False
    for at in range(start, len(calls)):
        each = calls[at]
        if each is None:
            continue
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


def _at_one_go(calls: list[Call | None], at: int, dy: Operand) -> None:
    """Put one call in place of those of a scale and a batch norm from `at` on, if these begin with dy there.

    It counts as the batch norm's: a pass that begins there would find nothing that the scale has left.
    """
    following = [*filter(None, takewhile(bool, calls[at : at + 4]))]
    group = normalize_backward(following, 0)
    if group is None or group.call.operand(4).memory is not dy.memory:
        return
    later = {*memories(each for each in calls[at + group.stop :] if each is not None)}
    if all(each.memory not in later for each in group.skipped):
        one = like(following[group.stop - 1], group.call)
        calls[at : at + group.stop] = [one, *[None] * (group.stop - 1)]
