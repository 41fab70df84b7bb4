"""What a solver tells those who asked: results of tests, reports, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blobmem.net import Net

MANY = 100


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output blobs of a net at some moment.

    Attributes:
        values: blob name -> array (float64), in the blob's shape.
        weights: blob name -> its weight in the loss, for those that have one.
    """

    values: dict[str, np.ndarray]
    weights: dict[str, float]

    def lines(self) -> list[str]:
        """For logs: a line for each element, or one for an array of more than MANY."""
        lines = []
        for name, array in self.values.items():
            weight = self.weights.get(name)
            share = "" if weight is None else f" (times {weight:g} in the loss)"
            if array.size > MANY:
                lines.append(f"{name}: {array.size} values, mean {array.mean():.6g}{share}")
                continue
            for index in np.ndindex(array.shape):
                place = f"[{', '.join(map(str, index))}]" if index and array.size > 1 else ""
                lines.append(f"{name}{place} = {array[index]:.6g}{share}")
        return lines


@dataclass(frozen=True, slots=True)
class TestResult:
    """A test net's outputs, averaged element by element over the passes of one test.

    Attributes:
        index: which test net, in the solver's order.
        name: the net's name.
        iteration: iterations of training that were behind.
        passes: the test net's test_iter.
        outputs: the averages.
        loss: the net's loss, averaged; None unless the solver has test_compute_loss.
    """

    __test__ = False  # pytest takes classes of this name for tests

    index: int
    name: str
    iteration: int
    passes: int
    outputs: Outputs
    loss: float | None


@dataclass(frozen=True, slots=True)
class Display:
    """A report on the training, every `display` iterations.

    Attributes:
        iteration: iterations that were behind when the reported one began.
        loss: smoothed over the last average_loss iterations.
        rate: the learning rate, before any lr_mult.
        outputs: the train net's outputs in the iteration's last pass.
    """

    iteration: int
    loss: float
    rate: float
    outputs: Outputs


@dataclass(slots=True)
class Callbacks:
    """Callables by event; each event's are called in the order in which they were added."""

    on_start: list[Callable[[], Any]] = field(default_factory=list)
    on_gradients_ready: list[Callable[[], Any]] = field(default_factory=list)
    on_iteration: list[Callable[[int, float], Any]] = field(default_factory=list)
    on_test: list[Callable[[TestResult], Any]] = field(default_factory=list)
    on_display: list[Callable[[Display], Any]] = field(default_factory=list)
    on_snapshot: list[Callable[[str], Any]] = field(default_factory=list)

    def add(self, **callbacks: Callable[..., Any] | None) -> None:
        """Add a callable to each event named; None adds nothing. Raises TypeError for what cannot be called."""
        for event, callback in callbacks.items():
            if callback is not None and not callable(callback):
                raise TypeError(f"{event} must be callable, got {type(callback).__name__}")
        for event, callback in callbacks.items():
            if callback is not None:
                getattr(self, event).append(callback)


def outputs_of(net: Net, values: dict[str, np.ndarray]) -> Outputs:
    """The values of a net's output blobs, with the weights that they have in its loss."""
    weights = {}
    for node in net.nodes:
        for index, name in enumerate(node.top_names):
            if name in values and node.layer.loss_weight(index):
                weights[name] = node.layer.loss_weight(index)
    return Outputs(values, weights)
