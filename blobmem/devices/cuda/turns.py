"""Who may queue work on a GPU: any number of nets, or one who measures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Held by every run of ops, as a context; `alone` is held by whoever wants no run beside.

    A thread that is alone may run; one that runs may not become alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs = 0
        self._alone: int | None = None

    def __enter__(self) -> None:
        with self._changed:
            while self._alone not in (None, threading.get_ident()):
                self._changed.wait()
            self._runs += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._runs -= 1
            if self._alone is not None:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody runs, and keep others from it."""
        with self._changed:
            while self._alone is not None:
                self._changed.wait()
            self._alone = threading.get_ident()
            while self._runs:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = None
                self._changed.notify_all()
