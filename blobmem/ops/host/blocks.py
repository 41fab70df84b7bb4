"""NumPy's own functions over large arrays, cache-sized blocks at a time, in several threads, with no temporary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blobmem.ops.host.parallel import parallel_for, scratch

BLOCK = 16384
"""Elements of a block."""


def in_blocks(function: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Call `function` on the same part of each array (all of one size), flat, for parts of up to BLOCK elements."""
    flat = [a.reshape(-1) for a in arrays]
    parallel_for(_run, -(-flat[0].size // BLOCK), function, flat, grain=2)


def _run(start: int, stop: int, function: Callable[..., Any], arrays: list[np.ndarray]) -> None:
    with np.errstate(all="ignore"):
        for block in range(start, stop):
            function(*(a[block * BLOCK : (block + 1) * BLOCK] for a in arrays))


def spare(like: np.ndarray, which: int = 0) -> np.ndarray:
    """Room for one block's intermediate results, the calling thread's; `which` tells two of them apart."""
    return scratch(2 * BLOCK, like.dtype)[which * BLOCK : which * BLOCK + like.size]
