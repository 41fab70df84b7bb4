"""A pass over backward: updates of evicted parameters in pieces, so that little of them is on the device at a time.

Pieces of one update run one after another, or spread over the rest of backward, for their copies to have time. The
gradient of an inner product that nobody else uses is made in such pieces, too, each right before its own.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.products import columns_of, pieces_of, taken_apart
from blobmem.net.plan.times import Times
from blobmem.ops.call import Call, memories, read

ALONE = 2
"""Pieces that come and go for an update alone are so many times as large as those whose gradients are made, too."""


def gradients_first(backward: Sequence[Call], evicted: Set[SyncedMemory]) -> list[Call]:
    """The calls of backward, with gradients of data that take a large evicted parameter before the same layer's others:
    so it has gone when its own gradient, as large, is made."""
    result: list[Call] = []
    for each in backward:
        at = len(result)
        if each.op not in UPDATES and _is_larger(each, evicted):
            writes = {*each.written_memories()}
            while at and result[at - 1].layer == each.layer and not _orders(result[at - 1], each, writes):
                at -= 1
        result.insert(at, each)
    return result


def _is_larger(each: Call, evicted: Set[SyncedMemory]) -> bool:
    """Whether what a call reads of evicted memories is larger than what it writes."""
    operands = [*each.present()]
    read = sum(one.nbytes for one in operands if one.intent is not Intent.OVERWRITE and one.memory in evicted)
    return read > sum(one.nbytes for one in operands if one.intent is not Intent.READ)


def _orders(before: Call, each: Call, writes: Set[SyncedMemory]) -> bool:
    """Whether a call has to come behind the one before it, which uses what it writes or writes what it uses."""
    used = {*memories([each])}
    return not writes.isdisjoint(memories([before])) or not used.isdisjoint(before.written_memories())


class Spread(NamedTuple):
    """The calls of backward, with updates in pieces.

    Attributes:
        calls: all of them.
        arrays: of gradients that are made in pieces, each one's, and what it is made of.
        absent: the memories of these gradients.
    """

    calls: list[Call]
    arrays: list[Blob]
    absent: set[SyncedMemory]


def spread(
    backward: Sequence[Call],
    joints: Sequence[int],
    evicted: Set[SyncedMemory],
    times: Times,
    late: bool,
    nbytes: int,
    free: Container[SyncedMemory] = (),
) -> Spread:
    """The calls of backward, with updates of what is evicted in pieces, which take little room.

    Args:
        backward: the calls.
        joints: the positions at which calls may be put in (`schedule.joints`).
        evicted: the memories.
        times: of calls.
        late: spread them over the time that there is after them, for pieces to come and go all the while; or they come
            one right after another, so that gradients do not last, and each right behind the gradient of the data by
            its piece, which need not come twice then.
        nbytes: of a piece.
        free: memories of gradients that may be made in pieces, too, each before its update.
    """
    updates = [
        (at, each)
        for at, each in enumerate(backward)
        if each.op in UPDATES and not evicted.isdisjoint(memories([each]))
    ]
    products = {} if late else _products_in_pieces(backward, evicted)
    made = _Gradients(backward, free, products)
    pieces = [
        (at, piece) for at, each in updates for piece in _in_pieces(each, evicted, nbytes, made.may_be_in_pieces(each))
    ]
    if not pieces:
        return Spread([*backward], [], set())
    sizes = [sum(each.nbytes for each in piece.present() if each.memory in evicted) for _, piece in pieces]
    begins, put = np.cumsum([0.0, *map(times.ms, backward)]), defaultdict[int, list[Call]](list)
    begin, done, all_of_it = begins[pieces[0][0]], 0, sum(sizes) + sizes[-1]
    spread_ms = begins[-1] - begin if late else 0.0
    for (at, piece), size in zip(pieces, sizes, strict=True):
        done += size
        wanted = begin + spread_ms * done / all_of_it
        to = next(to for to in joints if to == len(backward) or (to > at and begins[to] >= wanted))
        if made.is_in_pieces(piece):
            to = products.get((piece.operand(1).memory, piece.operand(1).part), to - 1) + 1
        for each in made.with_piece(piece):
            each.layer = backward[to - 1].layer
            put[to].append(each)
    whole = {at for at, _ in updates}
    calls = [
        each
        for at in range(len(backward) + 1)
        for each in (*put[at], *(() if at in whole else made.instead.get(at, backward[at : at + 1])))
    ]
    return Spread(calls, made.arrays, made.absent)


def _products_in_pieces(
    backward: Sequence[Call], evicted: Container[SyncedMemory]
) -> dict[tuple[SyncedMemory, tuple[int, int] | None], int]:
    """Where gradients of data are made by a piece each of evicted weights, by these and the piece, if nothing else but
    updates uses the weights."""
    found, others = dict[tuple[SyncedMemory, tuple[int, int] | None], int](), set[SyncedMemory]()
    for at, each in enumerate(backward):
        weights = each.operand(1) if each.op == "inner_product_backward_data" else None
        if weights is not None and weights.part is not None and weights.memory in evicted:
            found[weights.memory, weights.part] = at
        elif each.op not in UPDATES:
            others.update(memories([each]))
    return {key: at for key, at in found.items() if key[0] not in others}


class _Gradients:
    """Gradients of inner products that are made in pieces, each right before its part of the update.

    Args:
        backward: the calls.
        free: memories of gradients that nobody but these calls uses.
        products: where calls use pieces of weights, whose columns of what comes from behind serve these, too.

    Attributes:
        instead: by position, what is in place of the calls that would make these.
        arrays, absent: as of `Spread`.
    """

    def __init__(
        self,
        backward: Sequence[Call],
        free: Container[SyncedMemory],
        products: Mapping[tuple[SyncedMemory, tuple[int, int] | None], int],
    ) -> None:
        self._backward, self._of = backward, dict[SyncedMemory, tuple[Call, Sequence[Blob]]]()
        self._products = products
        self.instead: dict[int, list[Call]] = {}
        self.arrays: list[Blob] = []
        self.absent: set[SyncedMemory] = set()
        users = defaultdict[SyncedMemory, list[int]](list)
        self._last_write: dict[SyncedMemory, int] = {}
        for at, each in enumerate(backward):
            for memory in {*memories([each])}:
                users[memory].append(at)
            self._last_write.update(dict.fromkeys(each.written_memories(), at))
        self._makers = {
            memory: at[0]
            for memory, at in users.items()
            if len(at) == 2 and memory in free and self._may_divide(at[0], memory)
        }

    def _may_divide(self, at: int, memory: SyncedMemory) -> bool:
        """Whether the call makes all of the gradient, of what is there for the rest of backward."""
        maker = self._backward[at]
        if maker.op != "inner_product_backward_weights" or maker.attributes["transpose"]:
            return False
        x, _, gradient = maker.operands
        assert x is not None and gradient is not None
        whole = gradient.memory is memory and gradient.part is None and gradient.intent is Intent.OVERWRITE
        return whole and self._last_write.get(x.memory, -1) < at

    def may_be_in_pieces(self, update: Call) -> bool:
        """Whether what an update's gradient is made by may be taken apart as the update is."""
        return update.operand(0).memory in self._makers

    def is_in_pieces(self, update: Call) -> bool:
        """Whether the gradient of a piece of an update is made in pieces."""
        return update.operand(0).part is not None and self.may_be_in_pieces(update)

    def with_piece(self, update: Call) -> list[Call]:
        """A piece of an update, behind what makes its part of the gradient, if that is made in pieces."""
        if not self.is_in_pieces(update):
            return [update]
        gradient = update.operand(0)
        assert gradient.part is not None
        (index, count), memory = gradient.part, gradient.memory
        if memory not in self._of:
            self._divide(memory, update.operand(1).memory, count)
        maker, dys = self._of[memory]
        x, _, whole = maker.operands
        assert whole is not None
        blob = whole.blob
        part = Blob(gradient.array_shape, dtype=blob.dtype, device=blob.device, name=memory.name)
        self.arrays.append(part)
        made = dataclasses.replace(whole, blob=part, diff=False, shape=None)
        operands = (dataclasses.replace(read(part), shape=gradient.shape), *update.operands[1:])
        return [
            dataclasses.replace(maker, operands=(x, read(dys[index]), made)),
            dataclasses.replace(update, operands=operands),
        ]

    def _divide(self, memory: SyncedMemory, weights: SyncedMemory, count: int) -> None:
        """Have the columns of what comes from behind taken apart in place of the call that makes the gradient, if they
        are not."""
        at = self._makers[memory]
        maker = self._backward[at]
        users = [self._products.get((weights, (index, count))) for index in range(count)]
        there = [self._backward[each].operand(0).blob for each in users if each is not None]
        dys = there or columns_of(maker.operand(1), count)
        self.instead[at] = [] if there else [taken_apart(maker, maker.operand(1), dys)]
        self._of[memory] = maker, dys
        self.arrays += [] if there else dys
        self.absent.add(memory)


def apart(calls: Sequence[Call], joints: Sequence[int], evicted: Container[SyncedMemory]) -> list[int]:
    """The positions at which others may be put in, those between calls on pieces of these memories among them."""
    pieces = (
        at
        for at, each in enumerate(calls)
        if any(operand.part and operand.memory in evicted for operand in each.present())
    )
    return sorted({*joints, *chain.from_iterable((at, at + 1) for at in pieces)})


def _in_pieces(update: Call, evicted: Container[SyncedMemory], nbytes: int, with_gradient: bool) -> list[Call]:
    """An update as several, of equal parts of its arrays; smaller ones if its gradient is made in these, too."""
    largest = max((each for each in update.present() if each.memory in evicted), key=lambda each: each.view.nbytes)
    alike = all(operand.blob.shape == largest.blob.shape for operand in update.present())
    count = pieces_of(nbytes if with_gradient else ALONE * nbytes, largest) if alike else 1
    return [
        dataclasses.replace(
            update,
            operands=tuple(
                dataclasses.replace(operand, part=(index, count) if count > 1 else None) for operand in update.present()
            ),
        )
        for index in range(count)
    ]
