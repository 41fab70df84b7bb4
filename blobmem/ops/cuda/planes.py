"""Launches of kernels whose threads look after one place of several planes (source/planes.cuh)."""

from __future__ import annotations

import functools
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels

_MOST_EACH = 8
_ENOUGH = 2**20  # threads that fill any card several times
_INDEX = 2**31  # threads are counted in 32 bits


@functools.lru_cache(4096)
def groups(planes: int, places: int) -> int:
    """Threads per place, each of which takes every groups-th plane: one plane each until the card is full."""
    each = max(1, min(_MOST_EACH, planes * places // _ENOUGH), -(-planes * places // _INDEX))
    return -(-planes // each)


def run(kernels: Kernels, like: CudaArray, name: str, planes: int, places: int, *arguments: Any) -> None:
    """Queue a kernel whose first parameters are planes, groups and places; nothing if there are none."""
    count = groups(planes, places)
    kernels.run(like, name, -(-count * places // THREADS), THREADS, planes, count, places, *arguments)
