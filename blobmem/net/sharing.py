"""Nets that share memory: what may be shared, who wrote it last, and running one at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blobmem.errors import SharedBlobError
from blobmem.memory import SyncedMemory

if TYPE_CHECKING:
    from blobmem.net.net import Net


class Identity:
    """Who wrote a shared memory last; by identity, without keeping the net alive."""

    __slots__ = ("__weakref__", "label", "unfinished")

    def __init__(self, label: str) -> None:
        self.label = label
        self.unfinished = Unfinished(self)

    def __str__(self) -> str:
        return self.label


class Unfinished:
    """Who wrote, in place of a net, the memories of a pass of it that failed: nobody knows which of them it has."""

    __slots__ = ("_label",)

    def __init__(self, identity: Identity) -> None:
        self._label = weakref.ref(identity)

    def __str__(self) -> str:
        return f"a pass of {self._label() or 'a net that is gone'} that did not end"


@dataclass(slots=True)
class SharingReport:
    """What was shared between two nets.

    Attributes:
        shared: blob name -> name of the other net's blob whose memory it now uses.
        unshared: blob name -> why it keeps a memory of its own.
    """

    shared: dict[str, str] = field(default_factory=dict)
    unshared: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.shared)} arrays shared, {len(self.unshared)} not"]
        lines += [f"  {name}: {reason}" for name, reason in self.unshared.items()]
        return "\n".join(lines)


class SharingGroup:
    """Nets that share memories: one lock, and for each shared memory the net that wrote it last."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()

    def join(self, other: SharingGroup, nets: Sequence[Net]) -> None:
        """Make one group of two; every member net then uses the other's."""
        other._members.update(self._members)
        other._members.update(nets)
        for net in list(other._members):
            net.group = other

    def check(self, identity: Any, uses: Mapping[SyncedMemory, bool]) -> None:
        """Raise SharedBlobError if what would be read before it is replaced was last written by another net."""
        if not self._members:
            return
        for memory, replaced in uses.items():
            writer = memory.writer
            if not replaced and memory.shared and writer is not None and writer is not identity:
                raise SharedBlobError(
                    f"{identity} would read '{memory.name}', which {writer} has overwritten since: run {identity} "
                    "forward from its first layer again, or build the nets with share=False (--no-share)"
                )

    def claim(self, identity: Any, memories: Iterable[SyncedMemory]) -> None:
        """Note that a net is about to write these memories."""
        if self._members:
            for memory in memories:
                if memory.shared:
                    memory.set_writer(identity)


@dataclass(slots=True)
class _Slot:
    """A memory of a net, with the halves of blobs that lie in it."""

    memory: SyncedMemory
    names: list[str] = field(default_factory=list)
    binds: list[Callable[[SyncedMemory], None]] = field(default_factory=list)


def _slots(net: Net) -> dict[SyncedMemory, _Slot]:
    """The net's memories after aliasing, activations, gradients and internal arrays, by what lies in them."""
    slots: dict[SyncedMemory, _Slot] = {}

    def add(name: str, memory: SyncedMemory, bind: Callable[[SyncedMemory], None]) -> None:
        slot = slots.setdefault(memory, _Slot(memory))
        slot.names.append(name)
        slot.binds.append(bind)

    for name, blob in (*net.blobs.items(), *net.internals.items()):
        add(name, blob.data_view.memory, blob.bind_data)
    used = net.first_uses()
    for name, blob in net.blobs.items():
        if blob.has_diff and blob.diff_view.memory in used:
            add(f"{name}.diff", blob.diff_view.memory, blob.bind_diff)
    return slots


def share_blobs(net: Net, other: Net) -> SharingReport:
    """Move every eligible memory of `net` onto the other net's memory of the same name.

    Decided on memories after aliasing: what is distinct in one net stays distinct in it. Eligible are memories that
    each of the two nets replaces before it reads them in a whole pass.
    """
    report = SharingReport()
    here, there = _slots(net), _slots(other)
    by_name = {name: slot for slot in there.values() for name in slot.names}
    uses, other_uses = net.first_uses(), other.first_uses()
    taken = {memory: slot for memory, slot in there.items() if memory in here}
    for slot in list(here.values()):
        if slot.memory not in uses:
            continue  # nothing in this net touches it
        if slot.memory in there:
            report.shared.update((name, name) for name in slot.names)
            continue
        reason = "the other net has no blob of that name"
        for name in slot.names:
            target = by_name.get(name)
            if target is None:
                continue
            if target.memory in taken:
                reason = f"'{name}' is in one memory with {_others(target, name)} there, and distinct from it here"
            elif not uses[slot.memory]:
                reason = f"{net.identity} reads it before replacing it (a net input, or filled once)"
            elif not other_uses.get(target.memory, False):
                reason = f"{other.identity} reads it before replacing it (a net input, or filled once)"
            else:
                _merge(slot, target, other, report)
                taken[target.memory] = target
                break
        else:
            report.unshared.update((name, reason) for name in slot.names)
    return report


def _others(slot: _Slot, name: str) -> str:
    return ", ".join(f"'{other}'" for other in slot.names if other != name) or "another blob"


def _merge(slot: _Slot, target: _Slot, other: Net, report: SharingReport) -> None:
    memory = target.memory
    for name, bind in zip(slot.names, slot.binds, strict=True):
        bind(memory)
        report.shared[name] = name if name in target.names else target.names[0]
    memory.shared = True
    if memory.writer is None and not memory.is_zero(0, max(memory.cpu_capacity, memory.gpu_capacity)):
        memory.set_writer(other.identity)  # it has run before
