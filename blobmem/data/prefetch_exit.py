"""What becomes of the threads that make batches when the process ends, or forks."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

_SECONDS = 2.0  # that the end of the process waits for batches in the making, all sources together


class Threads(Protocol):
    """Somebody's threads."""

    def stop(self) -> None:
        """Let them end, when they have finished what they are at."""

    def join(self, deadline: float) -> None:
        """Wait for their end until that time."""

    def forget_threads(self) -> None:
        """In a forked child, where they are not."""


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


def end_with_process(threads: Threads) -> None:
    """Do what is to be done for these threads when the process ends, or forks."""
    _all.add(threads)


def _after_fork() -> None:
    for threads in _all:
        threads.forget_threads()


@atexit.register
def _at_exit() -> None:
    """Let threads finish what they are at: cut off within a library's call they may take the process along."""
    everybody = list(_all)
    for threads in everybody:
        threads.stop()
    deadline = time.monotonic() + _SECONDS
    for threads in everybody:
        threads.join(deadline)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
