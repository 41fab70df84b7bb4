"""From a pass's calls, which array holds bytes from when to when."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from blobmem.memory import Intent, Side, SyncedMemory
from blobmem.memory.extents import ZERO, Extents
from blobmem.memory.reordered import extent
from blobmem.net.layouts import reordered_of
from blobmem.ops.call import Call, Operand


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
        arena: arrays that the pass fills before it reads them, in the order of their first use, and scratch.
        pinned: memory -> bytes of it that the pass uses, of arrays whose bytes matter before or after the pass.
    """

    arena: list[Lifetime]
    pinned: dict[SyncedMemory, int]


def lifetimes(
    steps: Sequence[Sequence[Call]], scratch: Sequence[int] = (), keep: Collection[SyncedMemory] = ()
) -> Lifetimes:
    """What the steps of a pass use, and from when to when; of a training iteration forward and backward.

    Args:
        steps: what runs, in order: of each the calls that it is made of. All that these use is in use at one time,
            as they may run as one.
        scratch: bytes of workspace of each step; none if empty.
        keep: memories that somebody reads after the pass.

    The unit is a memory, that is an array with all that lies over it (in-place tops, splits, flattened tops). It is
    pinned if it is in `keep`, if a `once` call fills it, or if bytes are read that the pass has not written before
    (parameters, solver state, statistics that run on, inputs that a user fills). The scratch of step i has the key i.
    """
    if scratch and len(scratch) != len(steps):
        raise ValueError(f"scratch of {len(scratch)} steps is given, for {len(steps)}")
    uses: dict[SyncedMemory, _Use] = {}
    for index, calls in enumerate(steps):
        for call in calls:
            for operand in _reads_first(call):
                memory = operand.view.memory
                use = uses.get(memory)
                if use is None:
                    use = uses[memory] = _Use(index, pinned=memory in keep)
                use.add(operand, index, call.once)
    arena = [life for use in uses.values() if not use.pinned for life in use.lifetimes()]
    arena += [Lifetime(index, nbytes, index, index) for index, nbytes in enumerate(scratch) if nbytes]
    pinned = {place: nbytes for use in uses.values() if use.pinned for place, nbytes in use.places.items()}
    return Lifetimes(sorted(arena, key=lambda life: life.first), pinned)


def _reads_first(call: Call) -> Iterable[Operand]:
    # a call that reads and overwrites one array reads what was there before
    return sorted(call.present(), key=lambda operand: operand.intent is Intent.OVERWRITE)


class _Use:
    """How a pass has used a memory so far.

    Attributes:
        places: the memories that its bytes are in (its own, and one for them channels last) -> bytes of each.
    """

    __slots__ = ("first", "last", "pinned", "places", "written")

    def __init__(self, first: int, pinned: bool) -> None:
        self.first = self.last = first
        self.pinned = pinned
        self.places: dict[SyncedMemory, int] = {}
        self.written = Extents()

    def add(self, operand: Operand, index: int, once: bool) -> None:
        view = operand.view
        start, stop = view.offset, view.offset + view.nbytes
        self.last = index
        if operand.intent is Intent.OVERWRITE:
            self.written.put(start, stop, Side.DEVICE)
        else:
            self.pinned |= any(bits == ZERO for _, _, bits in self.written.runs(start, stop))
        self.pinned |= once and operand.intent is not Intent.READ
        place, end = view.memory, stop
        if operand.form is not None:  # in an array of its own; the truth may go to and fro between the two
            place, end = reordered_of(view.memory).array, extent(view, operand.intent)
        self.places[place] = max(self.places.get(place, 0), end)

    def lifetimes(self) -> Iterable[Lifetime]:
        return (Lifetime(place, nbytes, self.first, self.last) for place, nbytes in self.places.items())
