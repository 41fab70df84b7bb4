"""From a pass's calls, which array holds bytes from when to when, and which takes over those of another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from blobmem.memory import Intent, Side, SyncedMemory
from blobmem.memory.extents import ZERO, Extents
from blobmem.memory.reordered import extent
from blobmem.net.layouts import reordered_of
from blobmem.net.plan.heirs import heirs
from blobmem.ops.call import Call, Operand, memories


class Lifetime(NamedTuple):
    """Bytes that are in use from step `first` to step `last`, both included.

    `key` says whose they are: a memory, or for a step's scratch the step's index. Nothing is made of it here.
    """

    key: Hashable
    nbytes: int
    first: int
    last: int

    def happens_before(self, other: Lifetime) -> bool:
        """Whether the last use is over before the other's first begins. On one stream that is the steps' order."""
        return self.last < other.first


class Lifetimes(NamedTuple):
    """What a pass uses.

    Attributes:
        arena: arrays that the pass fills before it reads them, in the order of their first use, and scratch. Arrays
            that take over each other's bytes are one, with the first one's key.
        pinned: memory -> bytes of it that the pass uses, of arrays whose bytes matter before or after the pass.
        turns: of such a key the arrays' own lifetimes; each begins in the step in which the one before ends.
        uses: how the pass uses each memory.
    """

    arena: list[Lifetime]
    pinned: dict[SyncedMemory, int]
    turns: dict[Hashable, list[Lifetime]]
    uses: dict[SyncedMemory, Use]


def lifetimes(
    steps: Sequence[Sequence[Call]],
    scratch: Sequence[int] = (),
    keep: Collection[SyncedMemory] = (),
    until: Sequence[int] = (),
) -> Lifetimes:
    """What the steps of a pass use, and from when to when; of a training iteration forward and backward.

    Args:
        steps: what runs, in order: of each the calls that it is made of and, if there are several, last the one that
            may run in their place. All that these use is in use at one time.
        scratch: bytes of workspace of each step; none if empty.
        keep: memories that somebody reads after the pass.
        until: for each step, up to which step what it uses counts as used (`streams.kept_until`); its own if empty.

    The unit is a memory, that is an array with all that lies over it (in-place tops, splits, flattened tops). It is
    pinned if it is in `keep`, if a `once` call fills it, or if bytes are read that the pass has not written before
    (parameters, solver state, statistics that run on, inputs that a user fills). The scratch of step i has the key i.

    An array that an op makes of another, in the last step to use that one, is made in its place where it can be
    (`heirs.IN_PLACE`): it takes over the other's bytes.
    """
    if scratch and len(scratch) != len(steps):
        raise ValueError(f"scratch of {len(scratch)} steps is given, for {len(steps)}")
    uses: dict[SyncedMemory, Use] = {}
    for index, calls in enumerate(steps):
        for call in calls:
            for operand in _reads_first(call):
                memory = operand.memory
                use = uses.get(memory)
                if use is None:
                    use = uses[memory] = Use(index, pinned=memory in keep)
                use.add(operand, index, call.once)
    return lasting(uses, steps, scratch, until or range(len(steps)))


def lasting(
    uses: dict[SyncedMemory, Use], steps: Sequence[Sequence[Call]], scratch: Sequence[int], until: Sequence[int]
) -> Lifetimes:
    """`lifetimes` of memories that are used so."""
    for use in uses.values():
        use.until = use.last
    for index, last in enumerate(until):
        for memory in memories(steps[index]) if last != index else ():
            uses[memory].until = max(uses[memory].until, last)
    own = {life.key: life for use in uses.values() if not use.pinned for life in use.lifetimes()}
    turns = _turns(own, heirs(steps, uses, until))
    arena = [turn[0]._replace(last=turn[-1].last) for turn in turns]
    arena += [Lifetime(index, nbytes, index, until[index]) for index, nbytes in enumerate(scratch) if nbytes]
    pinned = {place: nbytes for use in uses.values() if use.pinned for place, nbytes in use.places.items()}
    arena.sort(key=lambda life: life.first)
    return Lifetimes(arena, pinned, {turn[0].key: turn for turn in turns if len(turn) > 1}, uses)


def _turns(own: Mapping[Hashable, Lifetime], heir: Mapping[Hashable, Hashable]) -> list[list[Lifetime]]:
    """The lifetimes, those after one another that take over each other's bytes."""
    taken = {*heir.values()}
    turns = [[life] for key, life in own.items() if key not in taken]
    for turn in turns:
        while turn[-1].key in heir:
            taking = own[heir[turn[-1].key]]
            turn[-1:] = [turn[-1]._replace(last=taking.first), taking]
    return turns


def _reads_first(call: Call) -> Iterable[Operand]:
    # a call that reads and overwrites one array reads what was there before
    operands = [operand for operand in call.operands if operand is not None]
    kept = [operand for operand in operands if operand.intent is not Intent.OVERWRITE]
    return kept + [operand for operand in operands if operand.intent is Intent.OVERWRITE]


class Use:
    """How a pass has used a memory so far.

    Attributes:
        first, last: the steps of its first and its last use so far.
        until: the step up to which it counts as used.
        places: the memories that its bytes are in (its own, and one for them channels last) -> bytes of each.
    """

    __slots__ = ("_begun", "_written", "first", "last", "pinned", "places", "until")

    def __init__(self, first: int, pinned: bool) -> None:
        self.first = self.last = self.until = first
        self.pinned = pinned
        self.places: dict[SyncedMemory, int] = {}
        self._begun = 0  # so many bytes from the start were written; more of them:
        self._written = Extents()

    def add(self, operand: Operand, index: int, once: bool) -> None:
        start = operand.offset
        stop = start + operand.nbytes
        self.last = index
        if stop <= self._begun:
            pass
        elif operand.intent is not Intent.OVERWRITE:
            self.pinned |= any(bits == ZERO for _, _, bits in self._written.runs(start, stop))
        else:
            self._written.put(start, stop, Side.DEVICE)
            self._begun = stop if start <= self._begun else self._begun
        self.pinned |= once and operand.intent is not Intent.READ
        # what is channels last lies in an array of its own; the truth may go to and fro between the two
        place, end = self.place(operand), stop if operand.form is None else extent(operand, operand.intent)
        self.places[place] = max(self.places.get(place, 0), end)

    @staticmethod
    def place(operand: Operand) -> SyncedMemory:
        """The memory that the operand's bytes are in."""
        memory = operand.memory
        return memory if operand.form is None else reordered_of(memory).array

    def is_all(self, operand: Operand) -> bool:
        """Whether the operand is all that the pass uses of its place."""
        return operand.offset == 0 and operand.nbytes == self.places[self.place(operand)]

    def lifetimes(self) -> Iterable[Lifetime]:
        return (Lifetime(place, nbytes, self.first, self.until) for place, nbytes in self.places.items())
