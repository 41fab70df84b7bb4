"""Who may queue work on a GPU: any number of nets, or one who measures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Held by every run of ops, as a context; `alone` is held by whoever wants no run beside.

    A thread that is alone may run, and become alone again. The run of one that becomes alone in the middle of it rests
    meanwhile, as seen by the others: two that both want to measure would wait for each other for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: dict[int, int] = {}
        self._alone: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            # one that runs already goes on: who wants to be alone waits for it
            while self._alone not in (None, me) and me not in self._runs:
                self._changed.wait()
            self._runs[me] = self._runs.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._runs[me] -= 1
            if not self._runs[me]:
                del self._runs[me]
            if self._alone is not None:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else runs, and keep others from it."""
        me = threading.get_ident()
        if self._alone == me:
            yield
            return
        resting = 0
        try:
            with self._changed:
                resting = self._runs.pop(me, 0)
                self._changed.notify_all()
                while self._alone is not None:
                    self._changed.wait()
                self._alone = me
                while self._runs:
                    self._changed.wait()
            yield
        finally:  # also when it was interrupted while it waited
            with self._changed:
                if resting:
                    self._runs[me] = resting
                if self._alone == me:
                    self._alone = None
                self._changed.notify_all()
