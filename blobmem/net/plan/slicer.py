"""Which runs of layers can take the batch in slices (`slices`), and the calls in which they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from blobmem.memory import SyncedMemory
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.at_once import AtOnce
from blobmem.net.plan.slices import (
    Division,
    Run,
    Sliced,
    Stretch,
    Undivided,
    by_item,
    is_regular,
    may_divide,
    stands_aside,
    takes_all,
)
from blobmem.ops.call import Call, memories


class Slicer:
    """Divides runs of layers of a pass."""

    def __init__(self, of: Undivided) -> None:
        self._of = of

    def _around(self, layer: int) -> range:
        """The layers next to a layer, and itself, whose calls all may be divided; none if its own may not."""
        every = [*self._of.forward, *self._of.backward]
        whole = {each.layer for each in every if takes_all(each, self._of.ops)}
        if layer in whole:
            return range(0)
        first = max((at + 1 for at in whole if at < layer), default=0)
        return range(first, min((at for at in whole if at > layer), default=max(each.layer for each in every) + 1))

    def runs(self, layer: int, count: int, need: Callable[[Sliced], tuple[int, int]]) -> Iterator[tuple[int, Sliced]]:
        """The calls with longer and longer runs about a layer in so many slices, and what these need.

        A run goes on to where most bytes are in use, and while what crosses its ends takes half of them or more: with
        less, smaller slices help more. `need` says how many bytes that is, and in which layer.
        """
        around, first, last = self._around(layer), layer, layer
        while layer in around:
            found, least, fullest = self.sliced([Division(first, last, count)]), 0, layer
            if found is not None:
                least, fullest = need(found)
                yield least, found
            if fullest not in around:
                return
            if first <= fullest <= last:
                ends = {first - 1: self.crossing(first), last + 1: self.crossing(last + 1)}
                if found is not None and sum(ends.values()) <= least // 2:
                    return
                ends = {at: nbytes for at, nbytes in ends.items() if at in around}
                if not ends:
                    return
                fullest = max(ends, key=ends.__getitem__)
            first, last = min(first, fullest), max(last, fullest)

    def longer(self, last: int) -> int | None:
        """The next layer with which a run may end so that at most half as many bytes cross its end as with this."""
        around, most = self._around(last), self.crossing(last + 1) // 2
        return next((at for at in range(last + 1, around.stop) if self.crossing(at + 1) <= most), None)

    def earlier(self, first: int) -> int | None:
        """The nearest layer before that one with which a run may begin so that fewer bytes cross its beginning."""
        around, most = self._around(first), self.crossing(first)
        return next((at for at in reversed(range(around.start, first)) if self.crossing(at) < most), None)

    def counts(self, layer: int) -> list[int]:
        """The numbers of equal slices that the batch can be taken in there."""
        items = self._items(each for each in self._of.forward if each.layer == layer)
        return [count for count in range(2, items + 1) if items % count == 0]

    def crossing(self, layer: int) -> int:
        """Bytes of arrays that are used both by layers before this one, and by it or those after it."""
        sides: tuple[dict[SyncedMemory, int], dict[SyncedMemory, int]] = ({}, {})
        for each in chain(self._of.forward, self._of.backward):
            for operand in each.present():
                if operand.memory in self._of.free:
                    sides[each.layer >= layer][operand.memory] = operand.nbytes
        return sum(nbytes for memory, nbytes in sides[0].items() if memory in sides[1])

    def sliced(self, runs: Sequence[Division]) -> Sliced | None:
        """The calls with these runs of layers in slices, each run by itself; None where arrays do not allow it."""
        first, *others = runs
        found = self._with(first)
        for run in others:
            found = None if found is None else self._behind(found, run)
        return found

    def _behind(self, before: Sliced, run: Division) -> Sliced | None:
        """The calls in which some runs are in slices, with one run more."""
        free = self._of.free | {piece.data_view.memory for piece in before.pieces}
        of = dataclasses.replace(
            self._of, forward=before.forward, backward=before.backward, remade=before.remade, free=free
        )
        found = Slicer(of)._with(run)
        if found is None:
            return None
        return before._replace(
            forward=found.forward, backward=found.backward, remade=found.remade, runs=(*before.runs, run),
            pieces=[*before.pieces, *found.pieces], absent=[*before.absent, *found.absent],
            given=[*before.given, *found.given],
        )  # fmt: skip

    def _with(self, run: Division) -> Sliced | None:
        """The calls with one run of layers in slices; None where these, or arrays, do not allow it."""
        found = self._stretches(run)
        if found is None:
            return None
        return (AtOnce if run.at_once else Run)(self._of, *found, run).made()

    def _stretches(self, run: Division) -> tuple[Stretch, Stretch] | None:
        """The calls of these layers forward and backward, if they can be divided into so many slices."""
        ahead, back = (self._stretch(calls, run.first, run.last) for calls in (self._of.forward, self._of.backward))
        if ahead is None or back is None:
            return None
        items = self._items(ahead.inside)
        if items % run.number or not is_regular([*ahead.inside, *back.inside], items):
            return None
        return ahead, back

    def _items(self, calls: Iterable[Call]) -> int:
        shapes = (operand.blob.shape for each in calls for operand in by_item(each))
        return next((shape[0] for shape in shapes if shape), 1)

    def _stretch(self, calls: Sequence[Call], first: int, last: int) -> Stretch | None:
        """The calls of these layers, if they stand together and what is not divided may run before or after them."""
        at = [index for index, each in enumerate(calls) if first <= each.layer <= last]
        while at and not may_divide(calls[at[-1]], self._of.ops):
            at.pop()
        if not at:
            return Stretch(len(calls), len(calls), [], [], [])
        if at[-1] - at[0] + 1 != len(at):
            return None
        result = Stretch(at[0], at[-1] + 1, [], [], [])
        for index in at:
            each = calls[index]
            if may_divide(each, self._of.ops):
                result.inside.append(each)
                continue
            late = each.op in UPDATES or calls is self._of.forward
            (result.after if late else result.before).append(each)
            # what fills an array may be moved past calls that do not use it
            past = calls[index + 1 : at[-1] + 1] if late else calls[at[0] : index]
            if not stands_aside(each) or (each.op not in UPDATES and {*memories([each])} & {*memories(past)}):
                return None
        return result
