"""A pass over calls in parts or slices of the batch: convolutions are told how much workspace there is for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from blobmem.memory import SyncedMemory
from blobmem.net.plan.liveness import lifetimes
from blobmem.ops.call import Call, memories

_CONVOLUTIONS = ("conv_forward", "conv_backward_data", "conv_backward_weights")
_UNIT, LEAST = 1 << 20, 32 << 20  # bytes: rooms are multiples of the one, and no less than the other
_STEPS = 4  # sizes of rooms from one power of two to the next, where many plans are tried: each wants a search


def with_rooms(calls: Sequence[Call], whole: Sequence[Call], free: Set[SyncedMemory]) -> list[Call]:
    """The calls, convolutions with the workspace that their algorithms may take: `room`, in bytes.

    With that the net holds no more than arrays alone would take of the whole batch; or where even its parts do, no more
    than they do, but that there always is room for 32 MiB. It follows from sizes alone, and is the same in all parts.

    Args:
        calls: of the pass, in parts.
        whole: the same with the whole batch.
        free: memories that nobody reads but these calls.
    """
    outside, loads = held(calls, free)
    _, before = held(whole, free)
    most = max(int(loads.max(initial=0)), int(before.max(initial=0)) - outside)
    return in_rooms(calls, rooms_of(calls, loads, most))


def rooms_of(calls: Sequence[Call], loads: np.ndarray, most: int, few: bool = False) -> dict[tuple[int, Any], int]:
    """Of the convolutions of each layer, by op, the workspace that there is where `most` bytes, of which each call's
    arrays take so many, are not to be exceeded. It is the same for all parts of the batch, and 32 MiB or more; with
    `few` one of few sizes."""
    rooms: dict[tuple[int, Any], int] = {}
    for each, load in zip(calls, loads, strict=True):
        if each.op in _CONVOLUTIONS:
            place = (each.layer, each.op)
            rooms[place] = min(rooms.get(place, most), most - int(load))
    for place, room in rooms.items():
        unit = max(_UNIT, (1 << max(room, LEAST).bit_length() - 1) // _STEPS) if few else _UNIT
        rooms[place] = max(room, LEAST) // unit * unit
    return rooms


def in_rooms(calls: Sequence[Call], rooms: Mapping[tuple[int, Any], int]) -> list[Call]:
    """The calls, convolutions with so much workspace, if any is given."""
    if not rooms:
        return [*calls]
    return [
        each.over(each.operands, {**each.attributes, "room": rooms[each.layer, each.op]})
        if each.op in _CONVOLUTIONS
        else each
        for each in calls
    ]


def held(calls: Sequence[Call], free: Set[SyncedMemory]) -> tuple[int, np.ndarray]:
    """Bytes beside the arena, and those in use in it at each call, without scratch."""
    found = lifetimes([[each] for each in calls], keep={*memories(calls)} - free)
    first, last, size = np.array([[x.first, x.last, x.nbytes] for x in found.arena] or np.empty((0, 3)), np.int64).T
    return sum(found.pinned.values()), loads(first, last, size, len(calls))


def loads(first: np.ndarray, last: np.ndarray, size: np.ndarray, steps: int) -> np.ndarray:
    """Bytes in use at each step, of arrays that are in use from step `first` to step `last`."""
    changes = np.zeros(steps + 1, np.int64)
    np.add.at(changes, first, size)
    np.add.at(changes, last + 1, -size)
    return np.cumsum(changes)[:-1]
