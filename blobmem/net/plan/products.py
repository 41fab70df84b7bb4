"""A pass over calls: inner products by large evicted weights in pieces, so that some are used while others come.

Forward, each piece makes columns of the result, which are joined behind the last; backward, each adds to the gradient
of the data. So a layer whose weights had no room before it waits for little more than their copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import NamedTuple

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.ops.call import Call, Operand, call, like, overwrite, read

PIECE = 8 << 20
"""Bytes of an array that come, or come and go, at a time; of larger ones equal parts."""

LARGER = 4
"""At most so many times as large are pieces where updates are spread: calls on these take less time in all."""

PIECES = 64
"""A device has room for so many of these."""


class Divided(NamedTuple):
    """Calls, products by evicted weights in pieces.

    Attributes:
        calls: all of them.
        moved: where each of the calls given is among these, or the last of what is in its place.
        arrays: of pieces.
    """

    calls: list[Call]
    moved: list[int]
    arrays: list[Blob]


def piece_within(most: int | None, spread: bool) -> int:
    """The bytes of a piece on a device that may hold so many; a small one where updates are not spread, as little room
    counts most there."""
    return PIECE if most is None or not spread else min(max(PIECE, most // PIECES), LARGER * PIECE)


def divided(
    calls: Sequence[Call], evicted: Container[SyncedMemory], together: Sequence[tuple[int, int]], nbytes: int
) -> Divided:
    """The calls, with products by these memories in pieces of so many bytes but for those of layers `together`, the
    first and the last of each run: these use what is brought once."""
    result, moved, arrays = list[Call](), list[int](), list[Blob]()
    for each in calls:
        whole = any(first <= each.layer <= last for first, last in together)
        made = None if whole or each.once else _in_pieces(each, evicted, nbytes)
        result += [each] if made is None else made[0]
        arrays += [] if made is None else made[1]
        moved.append(len(result) - 1)
    return Divided(result, moved, arrays)


def _in_pieces(each: Call, evicted: Container[SyncedMemory], nbytes: int) -> tuple[list[Call], list[Blob]] | None:
    """A product as several, and the arrays between them; None if it is none by large evicted weights."""
    if each.op == "inner_product_forward":
        divide, params = _forward, each.operands[1:3]
    elif each.op == "inner_product_backward_data":
        divide, params = _backward, each.operands[1:2]
    else:
        return None
    weights = each.operand(1)
    if each.attributes["transpose"] or weights.memory not in evicted or weights.part is not None:
        return None
    count = pieces_of(nbytes, *(one for one in params if one is not None))
    return divide(each, count) if count > 1 else None


def _forward(each: Call, count: int) -> tuple[list[Call], list[Blob]]:
    x, weights, bias, y = each.operands
    assert y is not None
    ys = columns_of(y, count)
    made = [
        each.over((x, _part(weights, index, count), _part(bias, index, count), overwrite(piece)))
        for index, piece in enumerate(ys)
    ]
    return [*made, like(each, call("concat_forward", *map(read, ys), y, axis=1))], ys


def _backward(each: Call, count: int) -> tuple[list[Call], list[Blob]]:
    dy, weights, dx = each.operands
    assert dy is not None and dx is not None
    dys = columns_of(dy, count)
    added = dataclasses.replace(dx, intent=Intent.WRITE), each.attributes | {"add": True}
    made = []
    for index, piece in enumerate(dys):
        result, attributes = added if index else (dx, each.attributes)
        made.append(each.over((read(piece), _part(weights, index, count), result), attributes))
    return [taken_apart(each, dy, dys), *made], dys


def _part(operand: Operand | None, index: int, count: int) -> Operand | None:
    return None if operand is None else dataclasses.replace(operand, part=(index, count), shape=None)


def pieces_of(nbytes: int, *arrays: Operand) -> int:
    """Into how many equal parts, of so many bytes or more, arrays are divided together, of which the first is the
    largest: 1 if it is small."""
    counts = range(1, arrays[0].nbytes // nbytes + 1)
    return max((count for count in counts if all(_may_divide(each, count) for each in arrays)), default=1)


def _may_divide(array: Operand, count: int) -> bool:
    return (array.blob.shape or (1,))[0] % count == 0 and array.nbytes % (count * ALIGNMENT) == 0


def columns_of(matrix: Operand, count: int) -> list[Blob]:
    """Arrays for so many parts of a matrix, each of columns."""
    (rows, columns), blob, name = matrix.op_shape, matrix.blob, f"{matrix.memory.name} (columns)"
    return [Blob((rows, columns // count), dtype=blob.dtype, device=blob.device, name=name) for _ in range(count)]


def taken_apart(each: Call, matrix: Operand, columns: Sequence[Blob]) -> Call:
    """What takes a matrix apart, as a call of another's layer."""
    return like(each, call("slice_forward", matrix, *map(overwrite, columns), axis=1))
