"""The order of records under `shuffle`: another permutation in every epoch, a function of seed, name and epoch."""

from __future__ import annotations

import numpy as np

from blobmem.data.transform import random_stream

_KEPT = 4  # a batch may end one epoch and begin the next, and batches are made ahead


def permutation(seed: int, name: str, epoch: int, count: int) -> np.ndarray:
    """The numbers below `count` in a random order, as (count,) integers; no platform or NumPy version changes it."""
    # by sorting words: the order in which a generator shuffles may change with NumPy
    order = np.argsort(random_stream(seed, name, 0, epoch).random_raw(count), kind="stable")
    return order.astype(np.uint32) if count <= 2**32 else order


class Orders:
    """The permutations of one source, the last few of which are kept. Any number of threads may ask.

    Args:
        name: what they depend on besides the seed and the epoch.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # replaced as a whole, not changed: a lock could be inherited by a forked process while it is held
        self._kept: dict[tuple[int, int, int, str], np.ndarray] = {}

    def order(self, seed: int, epoch: int, count: int, part: str = "") -> np.ndarray:
        """The `permutation` of an epoch, for a part of the source."""
        key = (seed, epoch, count, part)
        order = self._kept.get(key)
        if order is None:
            order = permutation(seed, f"{self._name}/{part}", epoch, count)
            self._kept = {**dict(list(self._kept.items())[1 - _KEPT :]), key: order}
        return order
