"""How long a net's calls take, where it trains in less memory than it needs: found out in one of a solver's first
iterations, which trains as ever."""

from __future__ import annotations

import logging
from collections.abc import Callable

from blobmem.net import Net

log = logging.getLogger("blobmem")

WARM = 1
"""Iterations before the one that is timed: they load kernels and allocate."""


class Timing:
    """Has each call of one iteration timed, the times kept, and the net planned anew by them.

    Only where the net's plan depends on times that are not known (`Net.untimed`), and nobody looks at it layer by
    layer.
    """

    def __init__(self, net: Net) -> None:
        self._net = net
        self._iterations = 0

    @property
    def is_open(self) -> bool:
        """Whether the coming iterations have something to find out."""
        return self._net.untimed

    def run(self, iterate: Callable[[], None]) -> None:
        """Run an iteration, which may be the one that is timed."""
        net = self._net
        if not net.untimed or net.watches_backward or net.debug_info or self._iterations < WARM:
            self._iterations = self._iterations + 1 if net.untimed else 0
            iterate()
            return
        with net.timed() as clock:
            iterate()
        clock.keep()
        log.info("%s: %d calls of an iteration were timed, and it is planned by that", net.identity, len(clock.calls))
        net.plan_anew()
        self._iterations = 0
