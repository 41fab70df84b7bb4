"""A pass over the calls of backward: the top of a normalisation is made anew for them, instead of being kept.

What is kept for the gradient of a BatchNorm, the normalised array, is also what its top was made of, by a Scale or a
ReLU in place, or both. The calls of forward that did so run again on an array of its own, just before the first call
that reads it. The bits are the same, and so is the order of all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, Operand, overwrite, read

_STEPS = (("scale_forward", "relu_forward"), ("scale_forward",), ("relu_forward",))
"""What may have become of a normalised array; each takes its input first and its output last."""


class Remade(NamedTuple):
    """An array that backward fills with what forward has made.

    Attributes:
        makers: the calls of forward, by their positions, that write what it replaces.
        start: which of them is the first that matters, the BatchNorm's.
    """

    array: Blob
    makers: list[int]
    start: int


class _Chain(NamedTuple):
    """How a top came about: from the array that its BatchNorm keeps, by these calls in place.

    Attributes:
        writers: the positions in forward of these calls and, before them, of others that write the top's bytes.
    """

    norm: Call
    steps: list[Call]
    writers: list[int]

    @property
    def kept(self) -> Operand:
        return _present(self.norm.operands[2])

    @property
    def top(self) -> Operand:
        return _present(self.norm.operands[1])

    def again(self, array: Blob, reader: Call) -> list[Call]:
        """The calls that make it in another array, for a call that reads it."""
        made, source = [], self.kept.blob
        for step in self.steps:
            shape = _present(step.operands[0]).op_shape
            operands = (read(source, shape), *step.operands[1:-1], overwrite(array, shape))
            layer, name = reader.layer, reader.layer_name
            made.append(dataclasses.replace(step, operands=operands, layer=layer, layer_name=name))
            source = array
        return made


def recompute(
    forward: Sequence[Call],
    backward: Sequence[Call],
    free: Container[SyncedMemory],
    ops: Container[str],
    array_like: Callable[[Call, Blob], Blob],
) -> tuple[list[Call], list[Remade]]:
    """The calls of backward, with those put in that make tops of normalisations anew, and the arrays that these fill.

    Args:
        forward, backward: the calls of a whole pass.
        free: memories that nobody reads but these calls.
        ops: those of the device; what calls of others use has its place on the host.
        array_like: the array for the top, a blob, of a BatchNorm, its call.
    """
    uses = _Uses(forward, backward, ops)
    result: list[list[Call]] = [[each] for each in backward]
    remade: list[Remade] = []
    for at in range(len(forward)):
        chain = uses.chain(at)
        if chain is None or chain.top.view.memory not in free:
            continue
        readers = uses.readers(chain)
        if not readers:
            continue
        array = array_like(chain.norm, chain.top.blob)
        array.data_view.memory.name = chain.top.blob.name  # which is what a user would keep
        remade.append(Remade(array, chain.writers, chain.writers.index(at)))
        for reader in readers:
            result[reader][-1] = _redirected(result[reader][-1], chain.top, array)
        first = readers[0]
        result[first][:0] = chain.again(array, backward[first])
    return [each for calls in result for each in calls], remade


class _Uses:
    """Which calls of a pass read and write which memories."""

    def __init__(self, forward: Sequence[Call], backward: Sequence[Call], ops: Container[str]) -> None:
        self.forward, self.backward = forward, backward
        self.written: dict[SyncedMemory, list[int]] = {}  # in forward, where
        self.read: dict[SyncedMemory, list[int]] = {}  # in backward, where
        for at, each in enumerate(forward):
            for memory in dict.fromkeys(view.memory for view in each.writes):
                self.written.setdefault(memory, []).append(at)
        for at, each in enumerate(backward):
            for memory in dict.fromkeys(view.memory for view in each.reads):
                self.read.setdefault(memory, []).append(at)
        self.changed = {view.memory for each in backward for view in each.writes}
        self.on_host = {
            operand.view.memory for each in (*forward, *backward) if each.op not in ops for operand in each.present()
        }

    def chain(self, at: int) -> _Chain | None:
        """What starts with this call of forward, if that keeps what it normalises and nothing else makes the top, or
        what it is made of."""
        norm = self.forward[at]
        if norm.op != "batch_norm_forward" or norm.operands[2] is None:
            return None
        kept, top = _present(norm.operands[2]), _present(norm.operands[1])
        writers = self.written[top.view.memory]
        steps = [self.forward[position] for position in writers if position > at]
        sources = [kept.view.memory]
        for step in steps:
            if not (_lie_alike(step.operands[0], top) and _lie_alike(step.operands[-1], top)):
                return None
            sources += [operand.view.memory for operand in step.operands[1:-1] if operand is not None]
        if tuple(step.op for step in steps) not in _STEPS or self.written[kept.view.memory] != [at]:
            return None
        if any(memory in self.written for memory in sources[1:]):
            return None
        own = {*sources, top.view.memory}
        return None if own & self.changed or own & self.on_host else _Chain(norm, steps, writers)

    def readers(self, chain: _Chain) -> list[int]:
        """Where the chain's top is read backward; nowhere if it cannot be another array there."""
        found = self.read.get(chain.top.view.memory, [])
        for at in found:
            # a layer below the chain's last has seen other numbers, which is warned of. Those above come before the
            # BatchNorm's own gradient, for which what it keeps is there anyway
            if self.backward[at].layer < chain.steps[-1].layer:
                return []
            for operand in self.backward[at].present():
                if operand.view.memory is not chain.top.view.memory:
                    continue
                if operand.diff or not _lie_alike(operand, chain.top) or operand.blob.shape != chain.top.blob.shape:
                    return []
        return found


def _present(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def _lie_alike(one: Operand | None, other: Operand) -> bool:
    """Whether both are the same bytes."""
    if one is None:
        return False
    a, b = one.view, other.view
    return a.memory is b.memory and a.offset == b.offset and a.nbytes == b.nbytes


def _redirected(call: Call, top: Operand, array: Blob) -> Call:
    """The call, reading an array in place of the top."""
    memory = top.view.memory
    operands = (
        dataclasses.replace(operand, blob=array) if operand is not None and operand.view.memory is memory else operand
        for operand in call.operands
    )
    return dataclasses.replace(call, operands=tuple(operands))
