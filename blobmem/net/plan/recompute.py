"""What is made anew for backward whatever room there is: what cheap calls made of arrays that are there anyway.

Such are the tops of normalisations, of which the normalised array is kept for the gradient, with a Scale, a ReLU or
both behind them; sums of these and of other sums; and what follows from an array that backward reads later in any case.
The calls of forward that made it run again on an array of its own, just before the first call that needs it. The bits
are the same, and so is the order of all else. What saves most for what it costs is made anew, up to a share of what the
pass costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from blobmem.memory import SyncedMemory
from blobmem.net.plan.again import NORMS
from blobmem.net.plan.uses import Uses, lie_alike
from blobmem.ops.call import Call, Operand

_CHEAP = {"scale_forward": 1, "relu_forward": 1, "eltwise_sum": -1, "concat_forward": -1}
"""Ops that may run again, and up to which of their operands they make the last one of: further ones are factors."""


SHARE = 0.055
"""Of the bytes that the calls of a pass read and write, how many more may be read and written to make arrays anew. With
all sums of ResNet-50, half as many again, a training step of 256 on an H200 takes a tenth longer."""


@dataclasses.dataclass(slots=True)
class _Recipe:
    """How an array came about.

    Attributes:
        kept: what the array was before the steps, where that is kept too: what a BatchNorm normalised.
        steps: the calls after that, or from what begins it on; the last one makes `top`.
        start: position in forward of what begins it.
        readers: positions in backward of the calls that read it.
        sources: of what it is made, what is made anew too.
    """

    kept: Operand | None
    steps: list[Call]
    start: int
    readers: list[int]
    sources: dict[SyncedMemory, _Recipe]

    @property
    def top(self) -> Operand:
        return self.steps[-1].operand(-1)

    def sources_read(self) -> dict[SyncedMemory, int]:
        """The memories that are read to make it, with how many bytes of them: not those that are only made for it."""
        own, read = self.top.view.memory, {} if self.kept is None else {self.kept.view.memory: self.kept.view.nbytes}
        for operand in (operand for step in self.steps for operand in _inputs(step)):
            memory, view = operand.memory, operand.view
            source = self.sources.get(memory)
            if source is not None and not source.readers:
                read |= source.sources_read()
            elif memory is not own:
                read[memory] = view.nbytes
        return read


def usual(uses: Uses, free: Container[SyncedMemory], traffic: float) -> set[SyncedMemory]:
    """What is made anew whatever room there is: not more than a share of what the pass costs.

    Args:
        uses: of the calls of a whole pass.
        free: memories that nobody reads but these calls.
        traffic: bytes that the pass reads and writes, or so many times these as the usual share may be spent.
    """
    recipes = _recipes(uses, free)
    wanted = _worth_most(recipes, SHARE * traffic)
    if len(wanted) < len(recipes):
        recipes = _recipes(uses, free, wanted)
    return {memory for memory, recipe in recipes.items() if recipe.readers}


def _worth_most(recipes: dict[SyncedMemory, _Recipe], limit: float) -> set[SyncedMemory]:
    """Those that save most bytes for what they read and write, of equals the largest, while that is within the limit;
    and what nobody but others reads."""
    costs = {}
    for memory, recipe in recipes.items():
        if recipe.readers:
            costs[memory] = recipe.top.view.nbytes + sum(recipe.sources_read().values())
    saved = {memory: recipes[memory].top.view.nbytes for memory in costs}
    wanted = {*recipes} - {*costs}
    for memory in sorted(costs, key=lambda memory: (-saved[memory] / costs[memory], -saved[memory])):
        if costs[memory] <= limit:
            limit -= costs[memory]
            wanted.add(memory)
    return wanted


def _recipes(
    uses: Uses, free: Container[SyncedMemory], wanted: Container[SyncedMemory] | None = None
) -> dict[SyncedMemory, _Recipe]:
    """What could be made anew, or of that what is wanted, in the order in which forward is done with it."""
    recipes: dict[SyncedMemory, _Recipe] = {}
    for memory, writers in sorted(uses.written.items(), key=lambda item: item[1][-1]):
        if memory in free and uses.stays(memory) and (wanted is None or memory in wanted):
            recipe = _recipe(memory, writers, uses)
            if recipe is not None and _is_there(recipe, uses, free, recipes):
                recipes[memory] = recipe
    return recipes


def _recipe(memory: SyncedMemory, writers: list[int], uses: Uses) -> _Recipe | None:
    """How it came about, and who reads it; None if not by cheap calls, or if it cannot be another array there."""
    begin = len(writers) - 1
    while begin and _is_cheap(uses.forward[writers[begin]], memory, in_place=True):
        begin -= 1
    maker, kept = uses.forward[writers[begin]], None
    steps = [uses.forward[at] for at in writers[begin:]]
    if maker.op in NORMS:
        kept, steps = maker.operands[2], steps[1:]
    elif not _is_cheap(maker, memory, in_place=False):
        return None
    if not steps or (maker.op in NORMS and kept is None):
        return None
    readers = uses.read.get(memory, [])
    recipe = _Recipe(kept, steps, writers[begin], readers, {})
    lying = [operand for call in (maker, *steps) for operand in call.present() if operand.memory is memory]
    for at in readers:
        # a layer below the last step's has seen other numbers, which is warned of
        if uses.backward[at].layer < steps[-1].layer:
            return None
        found = [operand for operand in uses.backward[at].present() if operand.memory is memory]
        if any(operand.diff or operand.blob.shape != recipe.top.blob.shape for operand in found):
            return None
        lying += found
    return recipe if all(lie_alike(operand, recipe.top) for operand in lying) else None


def _is_there(recipe: _Recipe, uses: Uses, free: Container[SyncedMemory], recipes: dict[SyncedMemory, _Recipe]) -> bool:
    """Whether backward has all that it takes as forward had it, or makes it anew; adds the latter to its sources."""
    memory, layer = recipe.top.view.memory, recipe.steps[-1].layer

    def remains(source: SyncedMemory) -> bool:
        """Whether what is in it is kept for backward in any case."""
        last = uses.read.get(source, [])[-1:]
        return uses.stays(source) and any(uses.backward[at].layer <= layer for at in last)

    if recipe.kept is not None:
        kept = recipe.kept.view.memory
        if uses.written[kept] != [recipe.start] or not remains(kept):
            return False
    for at in uses.written[memory][-len(recipe.steps) :]:
        step = uses.forward[at]
        inputs = _inputs(step)
        factors = [operand.memory for operand in step.operands[len(inputs) : -1] if operand is not None]
        if not uses.stays(*factors) or any(factor in uses.written for factor in factors):
            return False
        for operand in inputs:
            source = operand.memory
            if source is memory:
                continue
            if source not in free or not 0 <= uses.last_write(source) < at:  # other numbers may be there by now
                return False
            other = recipes.get(source)
            if other is None:
                if not remains(source):
                    return False
                continue
            if not lie_alike(operand, other.top) or operand.blob.shape != other.top.blob.shape:
                return False
            recipe.sources[source] = other
    return True


def _is_cheap(call: Call, memory: SyncedMemory, in_place: bool) -> bool:
    """Whether it may run again, and makes all of the array: of itself, or not."""
    if call.op not in _CHEAP or call.once or call.operand(-1).view.memory is not memory:
        return False
    return in_place == any(operand.memory is memory for operand in _inputs(call))


def _inputs(call: Call) -> list[Operand]:
    """What the call, a cheap one, makes its last operand of."""
    return [call.operand(at) for at in range(len(call.operands))[: _CHEAP[str(call.op)]]]
