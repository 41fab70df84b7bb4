"""pycaffe's module of that name, and what it has besides: its log, its timer, its counters of processes."""

from __future__ import annotations

import logging
import time

from blobmem.layers import layer_types
from blobmem.net import Net
from blobmem.solvers import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    Solver,
    get_solver,
)

__all__ = [
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "NesterovSolver",
    "Net",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "Timer",
    "get_solver",
    "has_nccl",
    "init_log",
    "layer_type_list",
    "log",
    "set_multiprocess",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]

_log = logging.getLogger("blobmem")
_processes = {"count": 1, "rank": 0}


def layer_type_list() -> list[str]:
    """The types that a layer in prototxt can have."""
    return list(layer_types())


def init_log(level: int = 0, *_: object) -> None:
    """Show log lines of at least this level (glog's: 0 info, 1 warning, 2 error, 3 fatal) on standard error."""
    if not _log.handlers:
        _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO + 10 * min(max(int(level), 0), 3))


def log(text: str) -> None:
    """Write a line to the log."""
    _log.info("%s", text)


def has_nccl() -> bool:
    """Whether several GPUs can train one net; they cannot."""
    return False


def solver_count() -> int:
    """Number of processes that train together, as `set_solver_count` said."""
    return _processes["count"]


def set_solver_count(count: int) -> None:
    """Say how many processes train together; nothing here depends on it."""
    _processes["count"] = int(count)


def solver_rank() -> int:
    """This process's number among them, as `set_solver_rank` said."""
    return _processes["rank"]


def set_solver_rank(rank: int) -> None:
    """Say which of the processes this is; nothing here depends on it."""
    _processes["rank"] = int(rank)


def set_multiprocess(value: bool) -> None:
    """Accepted; nothing here depends on it."""


class Timer:
    """A stopwatch."""

    def __init__(self) -> None:
        self._begin = self._end = 0.0

    def start(self) -> None:
        """Begin measuring."""
        self._begin, self._end = time.perf_counter(), 0.0

    def stop(self) -> None:
        """End measuring."""
        self._end = time.perf_counter()

    @property
    def ms(self) -> float:
        """Milliseconds from start to stop, or to now."""
        return 1000 * ((self._end or time.perf_counter()) - self._begin)
