"""Timing steps that a device carries out behind the host's back, of several contestants in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UPS = 5
HOST_REPEATS = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """--steps, --seconds and --time-limit, of what races for each net."""
    parser.add_argument("--steps", type=int, default=400, help="to time of each kind, at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="fewer steps where they take longer (default: 5)")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for each net")


class TimeLimit(Exception):
    """A configuration has had its time."""


class Deadline:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.perf_counter() + seconds

    def check(self) -> None:
        """Raise TimeLimit if they are over."""
        if time.perf_counter() > self._end:
            raise TimeLimit(f"stopped after the time limit of {self.seconds:.0f} s")


@dataclass
class Contestant:
    """Something to be timed.

    Attributes:
        step: queues a step and returns.
        synchronize: waits for all steps.
        groups: ms per step of each group of steps that was timed.
        several: queues so many steps at once and returns; a solver waits for a loss at the end of each call.
    """

    step: Callable[[], Any]
    synchronize: Callable[[], Any]
    groups: list[float] = field(default_factory=list)
    several: Callable[[int], Any] | None = None

    def take(self, steps: int) -> float:
        """Time so many steps, waited for at their end only; ms per step."""
        begin = time.perf_counter()
        if self.several is not None:
            self.several(steps)
        else:
            for _ in range(steps):
                self.step()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3 / steps

    def warm_up(self, deadline: Deadline) -> float:
        """The steps that search, compile and allocate; the ms of the last one."""
        ms = 0.0
        for _ in range(WARM_UPS):
            ms = self.take(1)
            deadline.check()
        return ms

    def host_ms(self) -> float:
        """The median time that the host needs to queue a step, each into an empty queue, so that it never waits."""
        times = []
        for _ in range(HOST_REPEATS):
            self.synchronize()
            begin = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - begin) * 1e3)
        self.synchronize()
        return statistics.median(times)

    def result(self) -> dict[str, Any]:
        """The median over the groups, and the groups."""
        return {"ms": statistics.median(self.groups), "groups_ms": [round(ms, 4) for ms in self.groups]}


def steps_for(ms: float, most: int, seconds: float) -> int:
    """How many steps of `ms` to time: `most`, or what fits into the seconds, but 4 at least."""
    return max(4, min(most, int(seconds * 1e3 / max(ms, 1e-3))))


def race(contestants: Sequence[tuple[Contestant, int]], group: int, deadline: Deadline) -> None:
    """Let contestants take so many steps each, in groups that alternate.

    One step of each is not timed: what has been built since its last one may have it look at its arrays anew.
    """
    for contestant, _ in contestants:
        contestant.take(1)
    rounds = max(1, *(steps // group for _, steps in contestants))
    for turn in range(rounds):
        for contestant, steps in contestants:
            mine = steps * (turn + 1) // rounds - steps * turn // rounds
            if mine:
                contestant.groups.append(contestant.take(mine))
            deadline.check()
