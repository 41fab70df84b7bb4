"""Nets that share memory: what may be shared, who wrote it last, and running one at a time."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blobmem.errors import SharedBlobError
from blobmem.memory import SyncedMemory, View

if TYPE_CHECKING:
    from blobmem.net.net import Net


class Writer:
    """Who wrote a memory last, and what to say to whoever would read in it what is there no more."""

    __slots__ = ()

    def about_blob(self, name: str, owner: Any, memory: str) -> str:
        """Why blob `name` of net `owner`, in the memory of that name, cannot be read or written, and what to do."""
        return (
            f"blob '{name}' of {owner} was overwritten by {self}, which shares its memory: "
            f"run {owner} again before reading it, or build the nets with share=False (--no-share)"
        )

    def about_pass(self, reader: Any, memory: str) -> str:
        """Why a pass of net `reader` cannot begin, which would read the memory of that name, and what to do."""
        return (
            f"{reader} would read '{memory}', which {self} has overwritten since: run {reader} "
            "forward from its first layer again, or build the nets with share=False (--no-share)"
        )


class Identity(Writer):
    """Who wrote a shared memory last; by identity, without keeping the net alive."""

    __slots__ = ("__weakref__", "label", "unfinished")

    def __init__(self, label: str) -> None:
        self.label = label
        self.unfinished = Unfinished(self)

    def __str__(self) -> str:
        return self.label


class Unfinished(Writer):
    """Who wrote, in place of a net, the memories of a pass of it that failed: nobody knows which of them it has."""

    __slots__ = ("_label",)

    def __init__(self, identity: Identity) -> None:
        self._label = weakref.ref(identity)

    def __str__(self) -> str:
        return f"a pass of {self._label() or 'a net that is gone'} that did not end"

    def about_pass(self, reader: Any, memory: str) -> str:
        return (
            f"{reader} would read '{memory}', which {self} has overwritten, perhaps in part: run {reader} forward from "
            "its first layer again"
        )


class Spent(Writer):
    """Who wrote, in place of a net, the memories whose bytes its plan has given to other arrays.

    `gradients` are the names of those that are of parameters, `state` of those that only passes bring to the device.
    """

    __slots__ = ("_gradients", "_mode", "_state")

    def __init__(self, mode: str, gradients: Collection[str] = (), state: Collection[str] = ()) -> None:
        self._mode = mode
        self._gradients = gradients
        self._state = state

    def about_blob(self, name: str, owner: Any, memory: str) -> str:
        return (
            f"blob '{name}' of {owner} has no bytes now: with memory='{self._mode}' other arrays have them before and "
            f"after it is used in a pass. {self._remedy(memory)}"
        )

    def about_pass(self, reader: Any, memory: str) -> str:
        return (
            f"{reader} would read '{memory}', whose bytes other arrays have now, with memory='{self._mode}': run it "
            f"forward from its first layer again. {self._remedy(memory)}"
        )

    def _remedy(self, memory: str) -> str:
        if memory in self._state:
            return "It is brought there by whole passes alone, as the device may hold no more: grant it more memory"
        if memory in self._gradients:
            return (
                "A solver updates the parameter as soon as this gradient is complete. To have it between backward and "
                "update add a callback on_gradients_ready, or take memory='keep'; before passes of your own call "
                "net.clear_param_diffs()"
            )
        name = memory.removesuffix(".diff")
        return f"To keep it build the net with keep=['{name}'], or to keep everything with memory='keep'"


class _Absent(Spent):
    """Who wrote, in place of a net, the memories of arrays that it does not make."""

    __slots__ = ()

    def about_blob(self, name: str, owner: Any, memory: str) -> str:
        return f"blob '{name}' of {owner} {self._why(memory)}"

    def about_pass(self, reader: Any, memory: str) -> str:
        return f"{reader} would read '{memory}', which {self._why(memory)}"

    def _why(self, memory: str) -> str:
        raise NotImplementedError


class FoldedAway(_Absent):
    """Of tops that a BatchNorm alone reads, which is folded into the weights before it (`net.fold`)."""

    __slots__ = ()

    def _why(self, memory: str) -> str:
        return f"is never made: batch norm is folded into the weights before it. {self._remedy(memory)}, or passes=()"


class NeverWhole(_Absent):
    """Of arrays of which a net makes a part at a time (`plan.parts`)."""

    __slots__ = ()

    def _why(self, memory: str) -> str:
        return (
            f"is never there as a whole: with memory='{self._mode}' the first layers take the batch in parts. "
            f"{self._remedy(memory)}; with passes=() they take it at once"
        )


class InSlices(_Absent):
    """Of arrays of which a device has room for a slice of the batch at a time (`plan.slices`)."""

    __slots__ = ()

    def _why(self, memory: str) -> str:
        return (
            "is never there as a whole: the device has room for a slice of the batch of it at a time. Grant it more "
            "memory, or take a smaller batch"
        )


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
        self._shares = False  # several nets, though all but one may be gone

    @property
    def members(self) -> list[Net]:
        """The nets."""
        return list(self._members)

    def join(self, other: SharingGroup, nets: Sequence[Net]) -> None:
        """Make one group of two; every member net then uses the other's."""
        other._members.update(self._members)
        other._members.update(nets)
        other._shares |= self._shares or len(nets) > 1
        for net in list(other._members):
            net.group = other

    def check(self, identity: Any, uses: Mapping[SyncedMemory, bool]) -> None:
        """Raise SharedBlobError if what would be read before it is replaced was last written by another net."""
        for memory, replaced in uses.items():
            writer = memory.writer
            if replaced or not memory.shared or writer is None or writer is identity:
                continue
            # a net may read what one outside the group has computed, but not what nobody has
            if self._shares or isinstance(writer, Spent | Unfinished):
                raise SharedBlobError(writer.about_pass(identity, memory.name))

    def claim(self, identity: Any, memories: Iterable[SyncedMemory]) -> None:
        """Note that a net is about to write these memories."""
        if self._members:
            for memory in memories:
                if memory.shared:
                    memory.set_writer(identity)


Bind = Callable[[SyncedMemory], None]


@dataclass(slots=True)
class Halves:
    """The halves of a net's blobs that lie in one memory: names, views, and what puts each into another memory."""

    memory: SyncedMemory
    names: list[str] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    binds: list[Bind] = field(default_factory=list)

    def move(self, memory: SyncedMemory) -> None:
        """Put all of them, at the offsets that they have, into another memory."""
        for bind in self.binds:
            bind(memory)


def halves(net: Net, used: Container[SyncedMemory], params: bool = False) -> dict[SyncedMemory, Halves]:
    """A net's memories after aliasing, of activations, internal arrays and those gradients that are in `used`, with
    what lies in them; gradients of parameters only if so asked."""
    found: dict[SyncedMemory, Halves] = {}

    def add(name: str, view: View, bind: Callable[..., None]) -> None:
        of_memory = found.get(view.memory)
        if of_memory is None:
            of_memory = found[view.memory] = Halves(view.memory)
        of_memory.names.append(name)
        of_memory.views.append(view)
        of_memory.binds.append(functools.partial(bind, offset=view.offset))

    for name, blob in (*net.blobs.items(), *net.internals.items(), *((each.name, each) for each in net.pieces)):
        add(name, blob.data_view, blob.bind_data)
    own = [(blob.name, blob) for blobs in net.params.values() for blob in blobs] if params else []
    for name, blob in (*net.blobs.items(), *net.internals.items(), *own):
        if blob.has_diff and blob.diff_view.memory in used:
            add(f"{name}.diff", blob.diff_view, blob.bind_diff)
    return found


def share_blobs(net: Net, other: Net) -> SharingReport:
    """Move every eligible memory of `net` onto the other net's memory of the same name.

    Decided on memories after aliasing: what is distinct in one net stays distinct in it. Eligible are memories that
    each of the two nets replaces before it reads them in a whole pass.
    """
    report = SharingReport()
    uses, other_uses = net.first_uses(), other.first_uses()
    here, there = halves(net, uses), halves(other, other_uses)
    by_name = {name: lying for lying in there.values() for name in lying.names}
    taken = {memory: lying for memory, lying in there.items() if memory in here}
    for own in list(here.values()):
        if own.memory not in uses:
            continue  # nothing in this net touches it
        if own.memory in there:
            report.shared.update((name, name) for name in own.names)
            continue
        reason = "the other net has no blob of that name"
        for name in own.names:
            target = by_name.get(name)
            if target is None:
                continue
            if target.memory in taken:
                reason = f"'{name}' is in one memory with {_others(target, name)} there, and distinct from it here"
            elif not uses[own.memory]:
                reason = f"{net.identity} reads it before replacing it (a net input, or filled once)"
            elif not other_uses.get(target.memory, False):
                reason = f"{other.identity} reads it before replacing it (a net input, or filled once)"
            else:
                _merge(own, target, other, report)
                taken[target.memory] = target
                break
        else:
            report.unshared.update((name, reason) for name in own.names)
    return report


def _others(target: Halves, name: str) -> str:
    return ", ".join(f"'{other}'" for other in target.names if other != name) or "another blob"


def _merge(own: Halves, target: Halves, other: Net, report: SharingReport) -> None:
    memory = target.memory
    own.move(memory)
    report.shared.update((name, name if name in target.names else target.names[0]) for name in own.names)
    memory.shared = True
    if memory.writer is None and not memory.is_zero(0, max(memory.cpu_capacity, memory.gpu_capacity)):
        memory.set_writer(other.identity)  # it has run before
