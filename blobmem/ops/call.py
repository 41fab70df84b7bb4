"""What layers emit: calls of ops on the halves of blobs, with the intent of each access.

A call says everything that a schedule, and every pass over it, has to know: what it reads, writes and overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blobmem.memory import Intent, SyncedMemory, View
from blobmem.memory.blob import Blob
from blobmem.memory.reordered import Form


@dataclass(frozen=True, slots=True)
class Operand:
    """One half of a blob as a call uses it.

    Attributes:
        blob: whose data or gradient it is.
        diff: the gradient instead of the data.
        intent: read, write (part of it, or old values matter) or overwrite (all of it, old values do not matter).
        shape: the shape in which the op sees it, as many elements; the blob's own when None.
        accumulate: a parameter's gradient, added to unless it is known to be zero, or the intent is overwrite; the op
            is told by the keyword.
        form: how the schedule keeps the array channels last (`memory.reordered.Form`); None as the blob has it.
        part: (index, count) for one of so many equal parts of the array, along its first axis and each a multiple of
            512 bytes; None for all of it. `shape` is then the part's.
    """

    blob: Blob
    diff: bool
    intent: Intent
    shape: tuple[int, ...] | None = None
    accumulate: bool = False
    form: Form | None = None
    part: tuple[int, int] | None = None

    @property
    def view(self) -> View:
        """The bytes, where they are now."""
        view = self.blob.diff_view if self.diff else self.blob.data_view
        if self.part is None:
            return view
        index, count = self.part
        nbytes = view.nbytes // count
        return view.memory.view(view.offset + index * nbytes, nbytes)

    @property
    def offset(self) -> int:
        """The view's: of a part, without making one."""
        view = self.blob.diff_view if self.diff else self.blob.data_view
        return view.offset if self.part is None else view.offset + self.part[0] * (view.nbytes // self.part[1])

    @property
    def nbytes(self) -> int:
        """The view's: of a part, without making one."""
        nbytes = (self.blob.diff_view if self.diff else self.blob.data_view).nbytes
        return nbytes if self.part is None else nbytes // self.part[1]

    @property
    def memory(self) -> SyncedMemory:
        """The view's, also if the blob has got another shape, whose parts would be no views."""
        return self.blob.memory_of(self.diff)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The blob's shape, or what the part has of it."""
        shape = self.blob.shape
        return shape if self.part is None else (shape[0] // self.part[1], *shape[1:])

    @property
    def op_shape(self) -> tuple[int, ...]:
        """The shape in which the op sees it."""
        return self.array_shape if self.shape is None else self.shape


def read(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's data, read."""
    return Operand(blob, False, Intent.READ, shape)


def read_diff(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's gradient, read."""
    return Operand(blob, True, Intent.READ, shape)


def write(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's data, updated: its old values matter."""
    return Operand(blob, False, Intent.WRITE, shape)


def write_diff(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's gradient, updated: its old values matter."""
    return Operand(blob, True, Intent.WRITE, shape)


def overwrite(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's data, all of it replaced."""
    return Operand(blob, False, Intent.OVERWRITE, shape)


def overwrite_diff(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """The blob's gradient, all of it replaced."""
    return Operand(blob, True, Intent.OVERWRITE, shape)


def accumulate_diff(blob: Blob, shape: tuple[int, ...] | None = None) -> Operand:
    """A parameter's gradient, added to; overwritten where it is known to be zero."""
    return Operand(blob, True, Intent.WRITE, shape, accumulate=True)


def begins_sum(operand: Operand) -> bool:
    """Whether it is a parameter's gradient that is overwritten where others add to it."""
    return operand.accumulate and operand.intent is Intent.OVERWRITE


@dataclass(slots=True)
class Call:
    """One step of a schedule.

    Attributes:
        op: the name of an op, or a function of the host (a data source) called like one.
        operands: in the op's order; None for an absent one.
        attributes: the op's keywords.
        once: runs again only after one of its operands moved (constant fillers, loss weights).
        layer: the index of the layer that emitted it, and its name; the net fills them in.
        stream: 1 if it may run beside those of 0, on a second stream, where there is one (`net.plan.streams`).
        together: how many calls may run as one from it on (`net.fusion`); 0 if any.
    """

    op: str | Callable[..., Any]
    operands: tuple[Operand | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    once: bool = False
    layer: int = -1
    layer_name: str = ""
    stream: int = 0
    together: int = 0

    @property
    def on_host(self) -> bool:
        """Whether it runs on the host whatever the device."""
        return not isinstance(self.op, str)

    def operand(self, at: int) -> Operand:
        """The operand at that place, which is not absent."""
        operand = self.operands[at]
        assert operand is not None
        return operand

    def present(self) -> list[Operand]:
        """The operands that are not absent."""
        return [operand for operand in self.operands if operand is not None]

    def over(self, operands: tuple[Operand | None, ...], attributes: dict[str, Any] | None = None) -> Call:
        """The same call of other operands, and of other attributes if any are given."""
        if attributes is None:
            attributes = self.attributes
        return Call(self.op, operands, attributes, self.once, self.layer, self.layer_name, self.stream, self.together)

    def read_memories(self) -> list[SyncedMemory]:
        """What the views lie in whose old bytes the call uses."""
        return [each.memory for each in self.operands if each is not None and each.intent is not Intent.OVERWRITE]

    def written_memories(self) -> list[SyncedMemory]:
        """What the views lie in that the call changes."""
        return [each.memory for each in self.operands if each is not None and each.intent is not Intent.READ]

    @property
    def reads(self) -> list[View]:
        """Views whose old bytes the call uses."""
        return [operand.view for operand in self.present() if operand.intent is not Intent.OVERWRITE]

    @property
    def writes(self) -> list[View]:
        """Views that the call changes, wholly or in part."""
        return [operand.view for operand in self.present() if operand.intent is not Intent.READ]

    @property
    def overwrites(self) -> list[View]:
        """Views all of whose bytes the call replaces."""
        return [operand.view for operand in self.present() if operand.intent is Intent.OVERWRITE]


def placed(operand: Operand, blob: Blob) -> Operand:
    """The operand, as the data of another blob, in the shape in which its op sees it: of one that has no more than the
    operand's part, all."""
    part = operand.part if blob.count == operand.blob.count else None
    return replace(operand, blob=blob, diff=False, shape=operand.op_shape, part=part)


def redirected(each: Call, arrays: Mapping[SyncedMemory, Blob]) -> Call:
    """The call, on arrays in place of what is in these memories."""
    if all(operand.memory not in arrays for operand in each.present()):
        return each
    operands = (
        placed(operand, arrays[operand.memory]) if operand is not None and operand.memory in arrays else operand
        for operand in each.operands
    )
    return each.over(tuple(operands))


def like(other: Call, made: Call) -> Call:
    """A call that was made, as one of another's layer."""
    made.layer, made.layer_name = other.layer, other.layer_name
    return made


def memories(calls: Iterable[Call]) -> Iterator[SyncedMemory]:
    """What the operands of the calls lie in, of one after the other."""
    return (operand.memory for each in calls for operand in each.operands if operand is not None)


def call(op: str | Callable[..., Any], *operands: Operand | None, once: bool = False, **attributes: Any) -> Call:
    """A call of an op (or of a host function) on operands, with the op's keywords."""
    return Call(op, operands, attributes, once)
