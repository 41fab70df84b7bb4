"""Which calls of a pass use which memories, for the passes over the calls of backward (`masks`, `again`, `evict`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.parked import Parked
from blobmem.ops.call import Call, Operand, memories


class Remade(NamedTuple):
    """What backward fills by other calls than its layers', out of what forward has left.

    Attributes:
        array: what is filled.
        makers: the calls of forward, by their positions, that have to have run in this order for it to be right.
        start: which of them is the first that matters: a part of forward may begin with it, or before.
        at_once: they have to have run in one pass, whose random numbers are told again.
    """

    array: Operand
    makers: list[int]
    start: int
    at_once: bool = False


def moved(remade: Iterable[Remade], positions: Sequence[int]) -> list[Remade]:
    """The same, where the calls of forward have moved to these positions."""
    return [each._replace(makers=sorted(positions[at] for at in each.makers)) for each in remade]


class Uses:
    """Which calls read and write which memories.

    Args:
        forward, backward: the calls of a whole pass.
        ops: those of the device; what calls of others use has its place on the host.

    Attributes:
        written: memory -> positions of the calls of forward that change it.
        read: memory -> positions of the calls of backward that need what was there.
        touched: memory -> positions of the calls of backward that use it in any way.
        changed: memories that backward changes.
        on_host: memories that are used there.
    """

    def __init__(self, forward: Sequence[Call], backward: Sequence[Call], ops: Container[str]) -> None:
        self.forward, self.backward = forward, backward
        self.written: dict[SyncedMemory, list[int]] = {}
        self.read: dict[SyncedMemory, list[int]] = {}
        self.touched: dict[SyncedMemory, list[int]] = {}
        for at, each in enumerate(forward):
            for memory in dict.fromkeys(each.written_memories()):
                self.written.setdefault(memory, []).append(at)
        for at, each in enumerate(backward):
            for memory in dict.fromkeys(each.read_memories()):
                self.read.setdefault(memory, []).append(at)
            for memory in dict.fromkeys(memories([each])):
                self.touched.setdefault(memory, []).append(at)
        self.changed = {memory for each in backward for memory in each.written_memories()}
        calls = (each for each in (*forward, *backward) if not isinstance(each.attributes.get("home"), Parked))
        self.on_host = {*memories(each for each in calls if each.op not in ops)}

    def last_write(self, memory: SyncedMemory) -> int:
        """Position of the last call of forward that changes it; -1 if none does."""
        return self.written.get(memory, [-1])[-1]

    def made_late(self, memory: SyncedMemory) -> tuple[list[int], list[int]]:
        """Positions of the calls of backward that change it, and of those that read it afterwards."""
        touched = self.touched.get(memory, [])
        written = [at for at in touched if memory in self.backward[at].written_memories()]
        return written, touched[touched.index(written[-1]) + 1 :] if written else []

    def stays(self, *memories: SyncedMemory) -> bool:
        """Whether backward finds in them what forward left, and none is used on the host."""
        return self.changed.isdisjoint(memories) and self.on_host.isdisjoint(memories)


def traffic(calls: Iterable[Call]) -> int:
    """Bytes that calls read and write, one by one."""
    return sum(operand.nbytes for each in calls for operand in each.present())


def lie_alike(one: Operand | None, other: Operand) -> bool:
    """Whether both are the same bytes."""
    if one is None:
        return False
    a, b = one.view, other.view
    return a.memory is b.memory and a.offset == b.offset and a.nbytes == b.nbytes


def reading(operand: Operand) -> Operand:
    """The operand, read."""
    return dataclasses.replace(operand, intent=Intent.READ)
