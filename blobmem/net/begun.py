"""A pass forward whose loss is on its way, and how it is taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobmem.layers.base import Layer
    from blobmem.net.net import Net
    from blobmem.net.schedule import Span


class Begun:
    """A pass forward that is under way; called, it waits for the loss, and takes the pass back if anything is raised.

    Attributes:
        read: what gives the loss, once.
    """

    __slots__ = ("_carried", "_loss", "_net", "_span", "read")

    def __init__(self, net: Net, carried: Sequence[tuple[Layer, dict[str, Any]]], span: Span) -> None:
        self._net, self._carried, self._span = net, carried, span
        self.read: Callable[[], float]
        self._loss: float | None = None

    def __call__(self) -> float:
        try:
            self._loss = self.read()
        except BaseException:
            self.take_back()
            raise
        return self._loss

    def wait(self) -> float:
        """The loss, whatever was found wrong: that is left to whoever asks what became of the pass."""
        if self._loss is None:
            faults = self._net.device.faults
            with contextlib.nullcontext() if faults is None else faults.left():
                self._loss = self.read()
        return self._loss

    def take_back(self) -> None:
        """What layers carry is as it was before the pass."""
        net = self._net
        net.state.iteration -= 1
        for layer, state in self._carried:
            layer.load_state_dict(state)
        net.group.claim(net.identity.unfinished, self._span.written)
