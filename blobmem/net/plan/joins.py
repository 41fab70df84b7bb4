"""A pass over the calls of forward: what is joined of what others have joined is joined of the parts of that.

Where layers join all that came before with something new, each array is the beginning of the next. Made of the parts,
which are small, each of them can be made anew without those before it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from blobmem.memory import Intent, SyncedMemory
from blobmem.net.plan.uses import lie_alike
from blobmem.ops.call import Call, Operand

PARTS = 8
"""Of how many parts at most: a GPU copies so many at one go."""


def joined(forward: Sequence[Call], free: Container[SyncedMemory]) -> list[Call]:
    """The calls, of which those that join arrays read the parts of these where they are few; to the same bits.

    Args:
        forward: the calls.
        free: memories that nobody reads but the calls of the pass.
    """
    parts: dict[SyncedMemory, tuple[Call, list[Operand]]] = {}  # of what is joined, and by which call
    result = list[Call]()
    for each in forward:
        if each.op == "concat_forward":
            operands = _in_parts(each, parts, free)
            each = each if operands is None else each.over((*operands, each.operands[-1]))
        written = {*each.written_memories()}
        for memory in [memory for memory, (_, own) in parts.items() if memory in written or _reads(own, written)]:
            del parts[memory]
        if each.op == "concat_forward" and each.operand(-1).intent is Intent.OVERWRITE:
            parts[each.operand(-1).memory] = each, _inputs(each)
        result.append(each)
    return result


def _inputs(each: Call) -> list[Operand]:
    """What a call joins."""
    return [each.operand(at) for at in range(len(each.operands) - 1)]


def _reads(operands: Sequence[Operand], memories: Container[SyncedMemory]) -> bool:
    return any(operand.memory in memories for operand in operands)


def _in_parts(
    each: Call, parts: dict[SyncedMemory, tuple[Call, list[Operand]]], free: Container[SyncedMemory]
) -> list[Operand] | None:
    """What a call reads, with the parts of one in its place; None if that is none, or has too many."""
    operands = _inputs(each)
    for at, operand in enumerate(operands):
        maker, own = parts.get(operand.memory, (None, []))
        if maker is None or operand.memory not in free or len(own) + len(operands) - 1 > PARTS:
            continue
        if maker.attributes["axis"] == each.attributes["axis"] and lie_alike(maker.operand(-1), operand):
            return [*operands[:at], *own, *operands[at + 1 :]]
    return None
