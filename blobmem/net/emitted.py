"""The calls of a net's layers, and those by which less need be kept for backward: what every plan of it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import Any

from blobmem.layers.base import Layer
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.build import Node
from blobmem.net.fusion import share_kept
from blobmem.net.plan import Again, Remade, Uses, read_tops, shut_in_pools, through
from blobmem.net.plan.abreast import Abreast, abreast
from blobmem.net.plan.joins import joined
from blobmem.net.plan.slices import Sliced
from blobmem.net.plan.sources import FromSources, from_sources
from blobmem.net.plan.uses import moved
from blobmem.ops.call import Call, call, overwrite_diff, read


@dataclasses.dataclass(slots=True)
class Emitted:
    """The calls of a net's layers, before any is chosen to run again.

    Attributes:
        forward, backward: the calls.
        streams: `streams` and `open_streams` of a pass of them (`Compilation`).
        remade: what backward fills by other calls than its layers'.
        absent: memories that they do not use, though layers do.
        again: what may be made anew.
        places: the positions at which calls may be put into backward, once found.
        sliced: how a run of layers takes slices of the batch abreast, if one does.
        arrays: that the calls have beside those of layers, of slices apart.
    """

    forward: list[Call]
    backward: list[Call]
    streams: tuple[int, Any]
    remade: Sequence[Remade] = ()
    absent: Set[SyncedMemory] = frozenset()
    again: Again | None = None
    places: list[int] | None = None
    sliced: Sliced | None = None
    arrays: Sequence[Blob] = ()

    def keep_less(self, free: Set[SyncedMemory], ops: Mapping[str, Any], short: bool = False) -> Emitted:
        """The calls by which less need be kept for backward (`plan`), and what may be made anew.

        Args:
            free: memories that nobody reads but these calls.
            ops: those of the device.
            short: there is no room for the usual calls (`joined`, `from_sources`).
        """
        backward, of_tops = read_tops(self.forward, self.backward, free, ops)
        backward, of_pools = shut_in_pools(self.forward, backward, free, ops)
        straight, absent = through(backward, free, ops)
        # what `through` spares is not spent to make more anew
        layers = (*self.forward, *backward)
        found = FromSources(self.forward, straight, [*range(len(self.forward))], [], set())
        if short:
            found = from_sources(joined(self.forward, free), straight, free, ops)
        own = {array.data_view.memory for array in found.arrays}
        again = Again(Uses(found.forward, found.backward, ops), free | own, ops, layers)
        remade = moved([*of_tops, *of_pools], found.position)
        return dataclasses.replace(
            self, forward=found.forward, backward=found.backward, remade=remade,
            absent=absent | found.absent, again=again, arrays=found.arrays,
        )  # fmt: skip

    def abreast(
        self, which: Abreast, free: Set[SyncedMemory], ops: Mapping[str, Any], images_last: bool
    ) -> Emitted | None:
        """The same with a run of layers in slices abreast; None where arrays do not allow it."""
        free = free | {array.data_view.memory for array in self.arrays}
        sliced = abreast(self.forward, self.backward, self.remade, which, free, images_last)
        if sliced is None:
            return None
        uses = Uses(sliced.forward, sliced.backward, ops)
        pieces = {piece.data_view.memory for piece in sliced.pieces}
        again = Again(uses, free | pieces, ops, (*self.forward, *self.backward), pieces)
        return dataclasses.replace(
            self, forward=sliced.forward, backward=sliced.backward, remade=sliced.remade, again=again, places=None,
            sliced=sliced,
        )  # fmt: skip


def calls_of(
    nodes: Sequence[Node], stale: Container[int] = (), scale: Blob | None = None
) -> tuple[list[Call], list[Call]]:
    """The calls of layers, forward and backward.

    Args:
        nodes: the layers, in the order in which they run forward.
        stale: positions of those that are left out, as they do not know the shapes they have.
        scale: what gradients of losses are multiplied by, if by anything.
    """
    share_kept(nodes)
    forward: list[Call] = []
    backward: list[Call] = []
    for index, node in enumerate(nodes):
        if index in stale:
            continue
        layer = node.layer
        calls = list(layer.forward(node.bottom, node.top))
        if node.need_backward:
            calls += [_begin(blob, weight, scale) for blob, weight in node.losses]
        forward += of_layer(calls, index, layer)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.need_backward and index not in stale:
            calls = list(node.layer.backward(node.bottom, node.top, node.bottom_need))
            backward += of_layer(calls, index, node.layer)
    return forward, backward


def _begin(loss: Blob, weight: float, scale: Blob | None) -> Call:
    """What gives a loss the gradient that backward begins with."""
    if scale is not None:
        return call("fill_scaled", read(scale), overwrite_diff(loss), value=weight)
    # once, so that a script may set another gradient of the loss afterwards
    return call("fill", overwrite_diff(loss), value=weight, once=True)


def of_layer(calls: Iterable[Call], index: int, layer: Layer) -> list[Call]:
    """The calls, told which layer they are of."""
    result = list(calls)
    for item in result:
        item.layer, item.layer_name = index, layer.name
    return result
