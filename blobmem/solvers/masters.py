"""What parameters of halves are the roundings of, in float32, with what of it lies beside them on the device.

Updates change these masters, mostly by less than halves could tell. Of a float16 parameter the master itself is there.
A bfloat16 is the upper half of a float32, and what is to be added to its bits for those of its master has two bytes (as
in Kalamkar et al., "Optimizing deep learning recommender systems training on CPU cluster architectures", SC 2020),
which is all that is kept.
"""

from __future__ import annotations

import weakref
from typing import Protocol, cast

import numpy as np

from blobmem.memory.blob import Blob

_MOST = np.iinfo(np.int16).max


class Master(Protocol):
    """What a parameter is the rounding of.

    Attributes:
        beside: what is kept of it, of the parameter's shape, next to that.
    """

    beside: Blob

    def values(self) -> np.ndarray:
        """All of it, of the parameter's shape, in float32: where somebody has written that, what it is."""

    def set(self, values: np.ndarray) -> None:
        """Let it be those numbers, float32 or float64, of which the parameter is the rounding already."""

    def settle(self) -> None:
        """Begin with the parameter where somebody has written that, before an update."""


def make_master(param: Blob, name: str) -> Master:
    """The master of a parameter of halves, which is what that is now; nothing is allocated before it is used."""
    return (Whole if param.dtype == np.float16 else Lower)(param, name)


class Whole:
    """The master of a float16 parameter: `beside` is all of it. Updates themselves see where somebody has written."""

    def __init__(self, param: Blob, name: str) -> None:
        self._param = param
        self.beside = Blob(param.shape, dtype=np.float32, device=param.device, name=f"{name}/master")

    def values(self) -> np.ndarray:
        values, rounded = self.beside.cpu_data(), self._param.cpu_data()
        return np.where(values.astype(rounded.dtype) == rounded, values, rounded.astype(np.float32))

    def set(self, values: np.ndarray) -> None:
        self.beside.data[...] = values

    def settle(self) -> None:
        pass


class Lower:
    """The master of a bfloat16 parameter: `beside`, of int16, is what is to be added to the bits of that, as the upper
    half, for those of the master. In the middle between two bfloat16, of which the lower one is even, that is one too
    much, and the master is the next smaller float32.

    A parameter that somebody writes says nothing of what it was, which it is asked for before that.
    """

    def __init__(self, param: Blob, name: str) -> None:
        self._param = param
        self.beside = Blob(param.shape, dtype=np.int16, device=param.device, name=f"{name}/lower")
        self._listen()

    def values(self) -> np.ndarray:
        self.settle()
        upper, lower = self._upper(), self.beside.cpu_data().astype(np.int32)
        below_zero = (upper & 0x7FFFFFFF == 0) & (lower < 0)  # as updates see it: another solver's zero, say
        return (upper + np.where(below_zero, 0, lower).view(np.uint32)).view(np.float32)

    def set(self, values: np.ndarray) -> None:
        self._listen()
        exact = np.ascontiguousarray(values, np.float32)
        lower = np.minimum((exact.view(np.uint32) - self._upper()).view(np.int32), _MOST)
        self.beside.data[...] = np.where(np.isnan(exact), 0, lower)

    def settle(self) -> None:
        if self._param.data_view.memory is not self._memory:  # another net's now
            self._listen()
            beside = self.beside.data_view
            beside.memory.clear(beside.offset, beside.nbytes)
        elif self._is_told:
            before = self._before
            self._listen()
            if before is not None and (written := self._bits() != before).any():
                self.beside.data[written] = 0

    def _upper(self) -> np.ndarray:
        """The parameter as float32, of which these are the bits."""
        return self._bits().astype(np.uint32) << 16

    def _bits(self) -> np.ndarray:
        return self._param.cpu_data().view(np.uint16)

    def _listen(self) -> None:
        self._is_told, self._before = False, cast("np.ndarray | None", None)
        self._memory = self._param.data_view.memory
        self._memory.listen(weakref.WeakMethod(self._keep))

    def _keep(self) -> None:
        """Somebody is about to write the parameter."""
        beside = self.beside.data_view
        if not beside.memory.is_zero(beside.offset, beside.nbytes):
            self._before = self._bits().copy()
        self._is_told = True
