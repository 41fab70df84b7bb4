"""Random numbers that are a function of where they are used: seed, stream name, iteration and element, nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words from a
counter of four words under a key of two. Element e takes word e % 4 of block e // 4, so the numbers depend neither on
the number of threads nor on the order of anything, and another device can make the same ones.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np


class HasIteration(Protocol):
    """What a stream is read at."""

    iteration: int


class Draws:
    """One stream of random numbers, read at the state's iteration when an op runs.

    Args:
        seed: any integer.
        stream: a name; different names give unrelated numbers.
        state: its `iteration` is looked at whenever numbers are drawn, so a restored one repeats them.
    """

    __slots__ = ("_key", "seed", "state", "stream")

    def __init__(self, seed: int, stream: str, state: HasIteration) -> None:
        self.seed = seed
        self.stream = stream
        self.state = state
        digest = hashlib.blake2b(f"{seed}\0{stream}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def __eq__(self, other: object) -> bool:
        """Whether they are the same numbers at all times."""
        return isinstance(other, Draws) and self._key == other._key and self.state is other.state

    def __hash__(self) -> int:
        return hash((self._key, id(self.state)))

    def __repr__(self) -> str:
        return f"Draws(seed={self.seed}, stream={self.stream!r}, iteration={self.state.iteration})"

    def key(self, purpose: int = 0) -> np.ndarray:
        """What a kernel needs, as uint32: the key's two words, then the counter's last two.

        The counter is (block, block >> 32, iteration, (iteration >> 32) << 8 | purpose); `purpose` below 256 tells
        several draws of one op apart.
        """
        iteration = self.state.iteration
        high = (iteration >> 32 & 0xFFFFFF) << 8 | purpose
        return np.array([*self._key, iteration & 0xFFFFFFFF, high], np.uint32)


def draws_at(seed: int, stream: str, iteration: int) -> Draws:
    """A stream at a fixed iteration."""
    return Draws(seed, stream, _Fixed(iteration))


class _Fixed:
    def __init__(self, iteration: int) -> None:
        self.iteration: Any = iteration
