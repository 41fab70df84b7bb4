"""Whether a net's backward is faster on two streams: found out in a solver's first steps, which train as ever."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

from blobmem.net import Net

log = logging.getLogger("blobmem")
_T = TypeVar("_T")

WARM = 4
"""Passes before the first one that is timed: they load kernels, allocate, and are captured."""

TIMED = 5
"""Passes of which the fastest counts, as other work on the card can only add to a time."""


class Trial:
    """Has backward run on one stream for a few passes, on two for as many, and the faster way chosen and kept.

    Only where the net leaves that open (`Net.open_streams`) and nobody looks at it layer by layer. Between the two, and
    once more where one is chosen, the net is laid out anew at the beginning of a step, as after a reshape. What a step
    computes is the same to the bit.
    """

    def __init__(self, net: Net) -> None:
        self._net = net
        self._begin(None)

    def _begin(self, key: Any) -> None:
        self._key, self._streams, self._passes = key, 1, 0
        self._ms = {1: math.inf, 2: math.inf}

    @property
    def is_open(self) -> bool:
        """Whether the coming steps have something to find out."""
        return self._net.open_streams is not None

    def begin_step(self) -> None:
        """Let the coming step run as is to be tried, or as was chosen."""
        if self.is_open and self._net.open_streams == self._key:
            self._net.run_backward_on(self._streams)

    def give_up(self) -> bool:
        """There is no memory for a step: let backward run on one stream for good; whether it was on two by choice."""
        net = self._net
        if isinstance(net.backward_streams, int) or net.streams == 1:
            return False
        log.info("%s: no memory for a second stream of backward, which runs on one", net.identity)
        net.backward_streams = 1
        net.run_backward_on(1)
        return True

    def run(self, backward: Callable[[], _T]) -> _T:
        """Run a pass backward, whose turn to be timed it may be; what it returns."""
        net = self._net
        if not self.is_open:
            return backward()
        if net.open_streams != self._key or net.watches_backward or net.debug_info:
            self._begin(net.open_streams)  # other shapes, say
        if net.streams == self._streams:  # else it will be in the next step
            self._passes += 1
        if self._passes <= WARM or net.streams != self._streams:
            return backward()
        device: Any = net.device
        result: list[_T] = []
        ms = device.timed(lambda: result.append(backward()))
        self._ms[self._streams] = min(ms, self._ms[self._streams])
        if self._passes == WARM + TIMED:
            self._passes = 0
            self._streams = 2 if self._streams == 1 else self._choose()
        return result[0]

    def _choose(self) -> int:
        """The number of streams that is faster, or that somebody else has chosen meanwhile."""
        from blobmem.ops.cuda import streams

        net = self._net
        chosen = streams.register(self._key, net.device, self._ms).number
        took = " and ".join(f"{ms:.3f} ms on {number}" for number, ms in self._ms.items())
        log.info("%s runs backward on streams: %d (it took %s)", net.identity, chosen, took)
        if chosen == net.streams:
            net.open_streams = None
        return chosen
