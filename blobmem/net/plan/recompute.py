"""A pass over the calls of backward: what cheap calls made of arrays that are there anyway is made anew for it, instead
of being kept.

Such are the tops of normalisations, of which the normalised array is kept for the gradient, with a Scale, a ReLU or
both behind them; sums of these and of other sums; and what follows from an array that backward reads later in any case.
The calls of forward that made it run again on an array of its own, just before the first call that needs it. The bits
are the same, and so is the order of all else. What saves most for what it costs is made anew, up to a share of what the
pass costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence

from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.plan.uses import Remade, Uses, lie_alike
from blobmem.ops.call import Call, Operand, overwrite

_CHEAP = {"scale_forward": 1, "relu_forward": 1, "eltwise_sum": -1, "concat_forward": -1}
"""Ops that may run again, and up to which of their operands they make the last one of: further ones are factors."""


SHARE = 0.055
"""Of the bytes that the calls of a pass read and write, how many more may be read and written to make arrays anew. With
all sums of ResNet-50, half as many again, a training step of 256 on an H200 takes a tenth longer."""


@dataclasses.dataclass(slots=True)
class _Recipe:
    """How an array came about.

    Attributes:
        maker: the call of forward that begins it.
        kept: what the array was before the steps, where that is kept too: what a BatchNorm, the maker, normalised.
        steps: the calls after that, or from the maker on; the last one makes `top`.
        writers: positions in forward of what writes the array and what it is made of.
        start: that of the first of them that matters.
        readers: positions in backward of the calls that read it.
        sources: of what it is made, what is made anew too.
        at: before which call of backward it is made.
        array: in which array. None: nobody needs it.
    """

    maker: Call
    kept: Operand | None
    steps: list[Call]
    writers: set[int]
    start: int
    readers: list[int]
    sources: dict[SyncedMemory, _Recipe]
    at: float = math.inf
    array: Blob | None = None

    @property
    def top(self) -> Operand:
        return self.steps[-1].operand(-1)

    def only_begins_with(self, source: SyncedMemory) -> bool:
        """Whether of the steps only the first reads it, once, and may do so in place."""
        inputs = [operand.view.memory for step in self.steps for operand in _inputs(step)]
        first = inputs[: len(_inputs(self.steps[0]))]
        return self.steps[0].op != "concat_forward" and source in first and inputs.count(source) == 1

    def sources_read(self) -> dict[SyncedMemory, int]:
        """The memories that are read to make it, with how many bytes of them: not those that are only made for it."""
        own, read = self.top.view.memory, {} if self.kept is None else {self.kept.view.memory: self.kept.view.nbytes}
        for operand in (operand for step in self.steps for operand in _inputs(step)):
            memory, view = operand.view.memory, operand.view
            source = self.sources.get(memory)
            if source is not None and not source.readers:
                read |= source.sources_read()
            elif memory is not own:
                read[memory] = view.nbytes
        return read

    def again(self, reader: Call) -> Iterator[Call]:
        """The calls that make it in its array, for a call that reads it."""
        assert self.array is not None
        arrays = {memory: source.array for memory, source in self.sources.items()}
        arrays[self.top.view.memory] = None if self.kept is None else self.kept.blob
        for step in self.steps:
            inputs = [_placed(operand, arrays.get(operand.view.memory)) for operand in _inputs(step)]
            out = overwrite(self.array, step.operand(-1).op_shape)
            operands = (*inputs, *step.operands[len(inputs) : -1], out)
            layer, name = reader.layer, reader.layer_name
            yield dataclasses.replace(step, operands=operands, layer=layer, layer_name=name)
            arrays[self.top.view.memory] = self.array


def recompute(
    forward: Sequence[Call],
    backward: Sequence[Call],
    free: Container[SyncedMemory],
    ops: Container[str],
    array_like: Callable[[Call, Blob], Blob],
    times: float = 1,
) -> tuple[list[Call], list[Remade]]:
    """The calls of backward, with those put in that make arrays of forward anew, and the arrays that these fill.

    Args:
        forward, backward: the calls of a whole pass.
        free: memories that nobody reads but these calls.
        ops: those of the device.
        array_like: the array for a blob that is made from this call of forward on.
        times: how many times the usual share may be spent.
    """
    uses = Uses(forward, backward, ops)
    recipes = _recipes(uses, free)
    traffic = sum(operand.view.nbytes for each in (*forward, *backward) for operand in each.present())
    wanted = _worth_most(recipes, times * SHARE * traffic)
    if len(wanted) < len(recipes):
        recipes = _recipes(uses, free, wanted)
    _arrange(recipes, array_like)
    result: list[list[Call]] = [[each] for each in backward]
    remade: dict[SyncedMemory, Remade] = {}
    for memory, recipe in recipes.items():  # sources come before what is made of them
        if recipe.array is None:
            continue
        for reader in recipe.readers:
            result[reader][-1] = _redirected(result[reader][-1], memory, recipe.array)
        at, makers, array = int(recipe.at), sorted(recipe.writers), overwrite(recipe.array)
        result[at][-1:-1] = recipe.again(backward[at])
        remade[array.view.memory] = Remade(array, makers, makers.index(recipe.start))  # of one array, what is made last
    return [each for calls in result for each in calls], [*remade.values()]


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
    if maker.op == "batch_norm_forward":
        kept, steps = maker.operands[2], steps[1:]
    elif not _is_cheap(maker, memory, in_place=False):
        return None
    if not steps or (maker.op == "batch_norm_forward" and kept is None):
        return None
    readers = uses.read.get(memory, [])
    recipe = _Recipe(maker, kept, steps, {*writers}, writers[begin], readers, {})
    lying = [operand for call in (maker, *steps) for operand in call.present() if operand.view.memory is memory]
    for at in readers:
        # a layer below the last step's has seen other numbers, which is warned of
        if uses.backward[at].layer < steps[-1].layer:
            return None
        found = [operand for operand in uses.backward[at].present() if operand.view.memory is memory]
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
        factors = [operand.view.memory for operand in step.operands[len(inputs) : -1] if operand is not None]
        if not uses.stays(*factors) or any(factor in uses.written for factor in factors):
            return False
        for operand in inputs:
            source = operand.view.memory
            if source is memory:
                continue
            if source not in free or not 0 <= uses.last_write(source) < at:  # other numbers may be there by now
                return False
            other = recipes.get(source)
            if other is None:
                if not remains(source):
                    return False
                recipe.writers.update(uses.written[source])
                continue
            if not lie_alike(operand, other.top) or operand.blob.shape != other.top.blob.shape:
                return False
            recipe.sources[source] = other
            recipe.writers.update(uses.written[source] if other.readers else other.writers)
            if not other.readers:
                recipe.start = min(recipe.start, other.start)
    return True


def _arrange(recipes: dict[SyncedMemory, _Recipe], array_like: Callable[[Call, Blob], Blob]) -> None:
    """Say when each is made, if it is, and in which array: its own, or that of the only one that is made of it."""
    users = Counter(source for recipe in recipes.values() for source in recipe.sources)
    for recipe in reversed(recipes.values()):
        recipe.at = min([recipe.at, *recipe.readers[:1]])
        if recipe.at == math.inf:
            continue
        if recipe.array is None:
            recipe.array = array_like(recipe.maker, recipe.top.blob)
            recipe.array.data_view.memory.name = recipe.top.blob.name  # which is what a user would keep
        lent = False
        for memory, source in recipe.sources.items():
            source.at = min(source.at, recipe.at)
            if not lent and not source.readers and users[memory] == 1 and recipe.only_begins_with(memory):
                source.array, lent = recipe.array, True


def _is_cheap(call: Call, memory: SyncedMemory, in_place: bool) -> bool:
    """Whether it may run again, and makes all of the array: of itself, or not."""
    if call.op not in _CHEAP or call.once or call.operand(-1).view.memory is not memory:
        return False
    return in_place == any(operand.view.memory is memory for operand in _inputs(call))


def _inputs(call: Call) -> list[Operand]:
    """What the call, a cheap one, makes its last operand of."""
    return [call.operand(at) for at in range(len(call.operands))[: _CHEAP[str(call.op)]]]


def _placed(operand: Operand, blob: Blob | None) -> Operand:
    """The operand, of another blob if one is given."""
    return operand if blob is None else dataclasses.replace(operand, blob=blob, shape=operand.op_shape)


def _redirected(call: Call, memory: SyncedMemory, array: Blob) -> Call:
    """The call, reading an array in place of what is in the memory."""
    operands = (
        _placed(operand, array) if operand is not None and operand.view.memory is memory else operand
        for operand in call.operands
    )
    return dataclasses.replace(call, operands=tuple(operands))
