"""How parameters and dummy data start: constants, random numbers, interpolation kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobmem.errors import NetError
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import op

KINDS = ("constant", "uniform", "gaussian", "positive_unitball", "xavier", "msra", "bilinear")
NORMS = ("FAN_IN", "FAN_OUT", "AVERAGE")


@dataclass(frozen=True, slots=True)
class Filler:
    """A FillerParameter as plain values.

    Attributes:
        kind: one of KINDS.
        sparse: of "gaussian": the mean number of weights that are not zero for each of an array's first axis; -1 for
            all of them.
        variance_norm: of "xavier" and "msra": FAN_IN (elements per output), FAN_OUT, or AVERAGE of the two.
    """

    kind: str = "constant"
    value: float = 0.0
    min: float = 0.0
    max: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    sparse: int = -1
    variance_norm: str = "FAN_IN"

    @classmethod
    def from_message(cls, message: Any | None) -> Filler:
        """A FillerParameter's values; None gives constant zero. Raises NetError for a type that is not known."""
        if message is None:
            return cls()
        if message.type not in KINDS:
            raise NetError(f"filler type: expected one of {', '.join(KINDS)}, got '{message.type}'")
        if message.sparse >= 0 and message.type != "gaussian":
            raise NetError(f"filler sparse: only type 'gaussian' can be sparse, not '{message.type}'")
        return cls(message.type, message.value, message.min, message.max, message.mean, message.std, message.sparse,
                   NORMS[message.variance_norm])  # fmt: skip

    def fan(self, shape: tuple[int, ...]) -> float:
        """What the variance of "xavier" and "msra" is divided by, for an array of that shape."""
        count = math.prod(shape)
        fan_in = count / shape[0] if shape else count
        fan_out = count / shape[1] if len(shape) > 1 else count
        return {"FAN_IN": fan_in, "FAN_OUT": fan_out, "AVERAGE": (fan_in + fan_out) / 2}[self.variance_norm]

    def normal(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and standard deviation of "gaussian" and "msra"."""
        return (0.0, math.sqrt(2 / self.fan(shape))) if self.kind == "msra" else (self.mean, self.std)

    def bounds(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Between which "uniform", "xavier" and "positive_unitball" draw."""
        if self.kind == "xavier":
            high = math.sqrt(3 / self.fan(shape))
            return -high, high
        return (0.0, 1.0) if self.kind == "positive_unitball" else (self.min, self.max)

    def bilinear_width(self, shape: tuple[int, ...]) -> int:
        """Height and width of the planes of "bilinear". Raises NetError where they are not equal."""
        if len(shape) != 4 or shape[2] != shape[3]:
            raise NetError(f"filler 'bilinear': expected 4 axes with height equal to width, got shape {shape}")
        return shape[3]


def bilinear_scale(width: int) -> tuple[int, float]:
    """How many times a deconvolution with a bilinear kernel enlarges, and the kernel's centre as a multiple of that."""
    factor = math.ceil(width / 2)
    return factor, (2 * factor - 1 - factor % 2) / (2 * factor)


def bilinear_kernel(width: int) -> np.ndarray:
    """The (width, width) kernel that interpolates linearly when a deconvolution enlarges ceil(width / 2) times."""
    factor, center = bilinear_scale(width)
    line = 1 - np.abs(np.arange(width) / factor - center)
    return line[:, None] * line[None, :]


@op
def fill_random(y: np.ndarray, *, filler: Filler, draws: Draws) -> None:
    """Fill an array; the numbers depend on `draws` and an element's index alone.

    "xavier" draws from +-sqrt(3 / fan), "msra" with deviation sqrt(2 / fan) (Glorot and Bengio 2010, He et al. 2015);
    "positive_unitball" makes each y[i] sum to 1. Raises NetError where "bilinear" gets planes that are not square.
    """
    if y.size == 0:
        return
    if filler.kind == "constant":
        y.fill(filler.value)
    elif filler.kind == "bilinear":
        y[...] = bilinear_kernel(filler.bilinear_width(y.shape))
    else:
        _fill_drawn(y, filler, draws)


def _fill_drawn(y: np.ndarray, filler: Filler, draws: Draws) -> None:
    from blobmem.ops.host import philox
    from blobmem.ops.host.parallel import parallel_for

    flat, blocks = y.reshape(-1), -(-y.size // 4)
    if filler.kind in ("gaussian", "msra"):
        mean, std = filler.normal(y.shape)
        parallel_for(philox.fill_gauss, blocks, flat, draws.key(), mean, std, grain=512)
        if filler.kind == "gaussian" and filler.sparse >= 0:
            keep = filler.sparse / y.shape[0]
            parallel_for(philox.clear_some, blocks, flat, draws.key(1), keep, grain=1024)
        return
    low, high = filler.bounds(y.shape)
    parallel_for(philox.fill_uniform, blocks, flat, draws.key(), low, high - low, grain=1024)
    if filler.kind == "positive_unitball":
        parallel_for(philox.normalize_rows, y.shape[0], flat, y.size // y.shape[0], grain=64)
