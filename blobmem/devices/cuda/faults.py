"""Bad values that kernels find: the first is written down where the host can read it, and raised when it next waits."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from blobmem.errors import NetError

Make = Callable[[int, float], Exception]


class Faults:
    """A device's record of one bad value.

    Args:
        words: int64 (4,) in host memory that kernels write to: a code (0 is none), an index, a float64's bits; then the
            address of an int64 of the device's, which they set to 1 with that.
        address: where kernels find it.
        settle: waits for all that is queued on the device.
        clear: sets the device's int64 to 0.

    Attributes:
        flag: the address of the device's int64, for kernels: each look at the host's memory takes them a microsecond.
        layer: the layer whose ops this thread queues next, for messages.
    """

    def __init__(
        self, words: np.ndarray, address: int, settle: Callable[[], None], clear: Callable[[], object]
    ) -> None:
        self.words = words
        self.address, self.flag = address, int(words[3])
        self._clear = clear
        self._settle = settle
        self._lock = threading.Lock()
        self._local = threading.local()
        self._codes: dict[Hashable, int] = {}
        self._makes: list[Make] = []

    @property
    def layer(self) -> str:
        return getattr(self._local, "layer", "")

    @layer.setter
    def layer(self, name: str) -> None:
        self._local.layer = name

    def code(self, key: Hashable, make: Make) -> int:
        """The code that stands for the exception `make(index, value)` in this layer, always the same for a key."""
        if layer := self.layer:
            key, make = (layer, key), functools.partial(_in_layer, layer, make)
        code = self._codes.get(key)
        if code is None:
            with self._lock:
                code = self._codes.get(key)
                if code is None:
                    self._makes.append(make)
                    code = self._codes[key] = len(self._makes)
        return code

    @property
    def found(self) -> bool:
        """Whether there is one that nobody has been told of."""
        return bool(self.words[0])

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leave what kernels found to others, meanwhile: in a finalizer, where nobody would hear of it."""
        self._local.left = True
        try:
            yield
        finally:
            self._local.left = False

    def check(self) -> None:
        """Raise what kernels found since the last call, if anything; to be called after waiting for them."""
        if self.words[0] and not getattr(self._local, "left", False):
            self._settle()  # what is queued behind may find the same once more, and it is to be raised once
            with self._lock:
                code, index = int(self.words[0]), int(self.words[1])
                value = float(self.words[2:3].view(np.float64)[0])
                self.words[:3] = 0
                self._clear()
            if code:
                raise self._makes[code - 1](index, value)


def _in_layer(layer: str, make: Make, index: int, value: float) -> Exception:
    """The exception that `make` gives, with the layer in its message as the host's has it."""
    error, place = make(index, value), f"layer '{layer}'"
    return NetError(f"{place}: {error}") if isinstance(error, ValueError) and place not in str(error) else error
