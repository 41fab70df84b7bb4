"""Checkpointing of a twin: its graph in segments, of which only what others need is kept, and the rest made anew."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""How many parts of all bytes a segment may make at most, from that of the largest segments on."""


class Checkpointed(nn.Module):
    """A segment whose forward pass runs again for its gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._draws = any(isinstance(module, nn.Dropout) for module in inner.modules())

    def forward(self, *arrays: Any) -> Any:
        return checkpoint(self.inner, *arrays, use_reentrant=False, preserve_rng_state=self._draws)


def segmentations(module: fx.GraphModule) -> Iterator[tuple[int, ...]]:
    """Places of the cuts in a twin's graph, each behind so many nodes, for ever smaller segments as long as a step
    holds less with them.

    Of all cuts whose segments make no more than so many bytes, those with least bytes alive over them.
    """
    made, alive = _bytes(module)
    least = float(sum(made))
    for count in COUNTS:
        cuts = _cuts(made, alive, sum(made) / count)
        edges = (0, *cuts, len(made))
        largest = max(sum(made[start:stop]) for start, stop in itertools.pairwise(edges))
        held = sum(alive[place] for place in cuts) + largest
        if cuts and held < least:
            least = held
            yield cuts


def segmented(module: fx.GraphModule, cuts: tuple[int, ...]) -> fx.GraphModule:
    """The twin, cut there. What is behind the last cut is kept: its gradients come first."""
    nodes = _nodes(module)
    starts = itertools.accumulate(int(index in cuts) for index in range(len(nodes)))
    part = {node.name: at for node, at in zip(nodes, starts, strict=True)}
    result: fx.GraphModule = split_module(module, module, lambda node: part[node.name], keep_original_order=True)
    for at in range(len(cuts)):
        name = f"submod_{at}"
        setattr(result, name, Checkpointed(getattr(result, name)))
    return result


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def _bytes(module: fx.GraphModule) -> tuple[list[int], list[float]]:
    """Of each node the bytes that it makes, and of each place before a node the bytes that are alive there.

    Infinitely many where a later node changes what is.
    """
    nodes = _nodes(module)
    at = {node: index for index, node in enumerate(nodes)}
    root: dict[fx.Node, fx.Node] = {}
    until = [0] * len(nodes)
    alive = [0.0] * (len(nodes) + 1)
    for index, node in enumerate(nodes):
        changed = node.meta.get("changes")
        root[node] = node if changed is None else root.get(changed, changed)
        for used in node.all_input_nodes:
            if used in root:
                until[at[root[used]]] = index
        for place in range(at.get(root[node], 0) + 1, index + 1) if changed is not None else ():
            alive[place] = math.inf
    made = [int(node.meta.get("nbytes", 0)) for node in nodes]
    for index, (nbytes, last) in enumerate(zip(made, until, strict=True)):
        for place in range(index + 1, last + 1):
            alive[place] += nbytes
    return made, alive


def _cuts(made: list[int], alive: list[float], most: float) -> tuple[int, ...]:
    """The cuts with least bytes alive over them, of all whose segments make at most so many bytes, or one node's."""
    before = [0, *itertools.accumulate(made)]
    best, origin = [0.0, *(math.inf for _ in made)], [0] * (len(made) + 1)
    window = deque([0])  # places that the present segment may begin at, the best first
    for place in range(1, len(made) + 1):
        while len(window) > 1 and before[place] - before[window[0]] > most:
            window.popleft()
        best[place], origin[place] = best[window[0]] + alive[place], window[0]
        while window and best[window[-1]] >= best[place] and best[place] < math.inf:
            window.pop()
        if best[place] < math.inf:
            window.append(place)
    cuts, place = list[int](), origin[-1]
    while place:
        cuts.append(place)
        place = origin[place]
    return tuple(reversed(cuts))
