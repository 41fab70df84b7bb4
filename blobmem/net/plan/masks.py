"""Passes over the calls of backward: the gradient of a ReLU finds where it was shut in arrays that are there anyway.

Nothing is computed that was not, and the bits are the same: where a ReLU lets through, its bottom, its top and what max
pooling takes of that are the same number, and elsewhere none of them is above zero.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence

from blobmem.memory import Intent, SyncedMemory
from blobmem.net.plan.uses import Remade, Uses, lie_alike, reading
from blobmem.ops.call import Call


def read_tops(
    forward: Sequence[Call], backward: Sequence[Call], free: Container[SyncedMemory], ops: Container[str]
) -> tuple[list[Call], list[Remade]]:
    """The calls of backward, with gradients of ReLUs that read their tops where nothing else needs their bottoms."""
    uses, result, remade = Uses(forward, backward, ops), [*backward], list[Remade]()
    relus = {each.layer: at for at, each in enumerate(forward) if each.op == "relu_forward"}
    for at, call in enumerate(backward):
        if call.op != "relu_backward" or call.attributes["slope"] < 0:
            continue
        made, x, dx = relus[call.layer], call.operand(0), call.operand(2)
        y = forward[made].operand(1)
        bottom, top = x.view.memory, y.view.memory
        if (
            bottom is not top
            and lie_alike(forward[made].operands[0], x)
            and uses.read[bottom] == [at]
            and uses.last_write(bottom) < made == uses.last_write(top)
            and bottom in free and top in free
            and uses.stays(bottom, top)
        ):  # fmt: skip
            result[at] = dataclasses.replace(call, operands=(reading(y), *call.operands[1:]))
            makers = sorted({*uses.written.get(bottom, ()), made})
            remade.append(Remade(dx, makers, len(makers) - 1))
    return result, remade


def shut_in_pools(
    forward: Sequence[Call], backward: Sequence[Call], free: Container[SyncedMemory], ops: Container[str]
) -> tuple[list[Call], list[Remade]]:
    """The calls of backward, with gradients of ReLUs before max pooling taken of what comes out of the pool.

    That is in place: the gradient of the pool's top is that of a ReLU's bottom then, and so is what the pool scatters.
    """
    uses, result, remade = Uses(forward, backward, ops), [*backward], list[Remade]()
    pools = {each.layer: at for at, each in enumerate(forward) if each.op == "max_pool_forward"}
    for at, (call, relu) in enumerate(itertools.pairwise(backward)):
        if call.op != "max_pool_backward" or call.layer not in pools:  # stochastic pooling, say
            continue
        if relu.op != "relu_backward" or relu.attributes["slope"] != 0:
            continue
        pool, y = pools[call.layer], relu.operand(0)
        x, top, mask = (forward[pool].operand(place) for place in range(3))
        d_top, _, dx = (call.operand(place) for place in range(3))
        if not (lie_alike(y, x) and lie_alike(call.operands[1], mask)):
            continue
        if not all(lie_alike(each, dx) for each in relu.operands[1:]):
            continue
        bottom, pooled, d_pooled, d_bottom = (each.view.memory for each in (y, top, d_top, dx))
        if (
            uses.read[bottom] == [at + 1]
            and uses.last_write(bottom) < pool
            and uses.written[pooled] == [pool]
            and top.view.nbytes <= y.view.nbytes  # what is kept instead
            and uses.stays(bottom, pooled)
            and all(memory in free and memory not in uses.on_host for memory in (bottom, pooled, d_pooled, d_bottom))
            and uses.touched[d_pooled][-1] == at  # or somebody would see it changed
            and uses.touched[d_pooled][0] < uses.read[d_pooled][0]  # or it is a script that fills it
        ):
            operands = (reading(top), d_top, dataclasses.replace(d_top, intent=Intent.OVERWRITE))
            shut = dataclasses.replace(relu, operands=operands, layer=call.layer, layer_name=call.layer_name)
            result[at : at + 2] = [shut, call]
            makers = sorted({*uses.written[bottom], pool})
            remade.append(Remade(dx, makers, len(makers) - 1))
    return result, remade
