"""What a run carries from iteration to iteration besides parameters and history: how many passes each net has made,
where its data sources are, the seed. Together with these every random draw and every record is determined.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from blobmem.errors import NetError
from blobmem.net import Net

log = logging.getLogger("blobmem")


def collect(nets: Sequence[Net]) -> list[dict[str, Any]]:
    """For each net, train net first, its passes and the state of the layers that carry any, as plain values."""
    result = []
    for net in nets:
        layers = {node.layer.name: state for node in net.nodes if (state := node.layer.state_dict())}
        result.append({"net": str(net.identity), "passes": net.state.iteration, "layers": layers})
    return result


def check(carried: dict[str, Any], source: str) -> None:
    """Raise NetError unless a sidecar's values have the types that `collect` and the solver gave them."""
    nets, losses = carried.get("nets"), carried.get("losses")
    sound = (
        isinstance(carried.get("seed"), int)
        and isinstance(losses, list)
        and all(isinstance(loss, int | float) for loss in losses)
        and isinstance(nets, list)
        and len(nets) > 0
        and all(isinstance(n, dict) and isinstance(n.get("passes"), int) for n in nets)
        and all(isinstance(n.get("layers"), dict) for n in nets)
        and isinstance(scaling := carried.get("loss_scale", []), list)
        and len(scaling) in (0, 4)
        and all(isinstance(number, int | float) for number in scaling)
    )
    if not sound:
        raise NetError(f"{source}: the sidecar is damaged: remove it to restore as Caffe does")


def load_layers(nets: Sequence[Net], carried: dict[str, Any], source: str, undo: ExitStack) -> None:
    """Give the layers their states back, leaving in `undo` how to take that back.

    Raises NetError naming the layer that does not take its state. A layer that is not there any more is a warning.
    """
    for net, entry in zip(nets, carried["nets"], strict=False):
        by_name = {node.layer.name: node.layer for node in net.nodes}
        for name, state in entry["layers"].items():
            layer = by_name.get(name)
            if layer is None:
                log.warning("%s: %s has no layer '%s'; its position is dropped", source, net.identity, name)
                continue
            undo.callback(layer.load_state_dict, layer.state_dict())
            try:
                layer.load_state_dict(state)
            except (KeyError, TypeError, ValueError) as error:
                raise NetError(f"{source}: layer '{name}' cannot go on from {reprlib.repr(state)}: {error}") from error


def load_counters(nets: Sequence[Net], carried: dict[str, Any], source: str) -> None:
    """Give the nets their passes and the seed back."""
    if len(nets) != len(carried["nets"]):
        log.warning(
            "%s was written with %d nets, there are %d now: test nets without a record start afresh",
            source, len(carried["nets"]), len(nets),
        )  # fmt: skip
    for net, entry in zip(nets, carried["nets"], strict=False):
        net.state.iteration = entry["passes"]
    for net in nets:
        net.reseed(carried["seed"])
