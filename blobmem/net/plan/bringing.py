"""The passes of a net where some of its state is evicted: products by it divided, its updates spread over backward, and
all of it brought for the calls that use it (`products`, `updates`, `state`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.plan import state
from blobmem.net.plan.places import unseen
from blobmem.net.plan.products import divided, piece_within
from blobmem.net.plan.times import Times
from blobmem.net.plan.updates import apart, gradients_first, spread
from blobmem.net.plan.uses import moved
from blobmem.net.plan.ways import Made
from blobmem.net.sharing import halves
from blobmem.ops.call import Call, memories

if TYPE_CHECKING:
    from blobmem.net.net import Net


def bring_state(net: Net, made: Made, anywhere: bool = False) -> Made:
    """The calls with those that bring what they use of evicted memories, and what backward fills.

    Args:
        net: what `brings` says which memories these are, and whose solver's updates `made` has in backward.
        made: calls that are made for the net, without those that bring.
        anywhere: put in between any two calls, and not only where they part none that would run as one.
    """
    if not net.brings:
        return made
    parts = [] if net._parts is None else [net._parts.layers]
    layers = parts if made.sliced is None else made.sliced.layers

    def places(forward: Sequence[Call], backward: Sequence[Call]) -> Sequence[Sequence[int]]:
        if anywhere:
            return [range(len(calls) + 1) for calls in (forward, backward)]
        return net._joints(forward, backward, made.passing)

    exact, updates = getattr(net.device, "deterministic", True), net.updates_in_backward
    forward, backward, absent, remade = made.forward, made.backward, made.absent, made.remade
    arrays, times = list[Blob](), Times(net.device)
    piece = piece_within(net.device.most_bytes, net.spread > 0)
    if updates:
        backward = gradients_first(backward, net.brings)
    if not exact:  # fewer rows of a product may have other bits
        forward, to, ahead_arrays = divided(forward, net.brings, layers, piece)
        backward, _, back_arrays = divided(backward, net.brings, layers, piece)
        arrays, remade = [*ahead_arrays, *back_arrays], moved(remade, to)
    if updates:
        free = set[SyncedMemory]()
        if not exact:
            free = unseen(halves(net, {*memories(backward)}, params=True)).difference(made.kept)
        joints = places(forward, backward)[1]
        backward, gradients, gone = spread(backward, joints, net.brings, times, net.spread > 0, piece, free)
        arrays, absent = [*arrays, *gradients], {*absent, *gone}
    ahead, back = (
        state.bring(calls, apart(calls, at, net.brings), net.device, net.brings, layers)
        for calls, at in zip((forward, backward), places(forward, backward), strict=True)
    )
    joins = updates and not net._is_watched()  # who looks in between may write what has come
    backward = state.join(ahead.calls, back.calls, times, net.spread > 0) if joins else back.calls
    used = {*memories([*ahead.calls, *backward])}
    fetched = [array for array in (*ahead.arrays, *back.arrays, *arrays) if array.data_view.memory in used]
    return dataclasses.replace(
        made, forward=ahead.calls, backward=backward, remade=moved(remade, ahead.moved), absent=absent, fetched=fetched
    )
