"""The dtypes that a net's numbers may have."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.errors import DeviceError

NAMES = ("float32", "float64", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")
"""Those of two bytes. A net in one has statistics, labels, indices, boxes and losses in float32 (`exact`)."""

FIRST_SCALE = 2.0**15
"""What the losses of a float16 net are multiplied by, to begin with."""

_OF_TWO_BYTES = "eE"  # NumPy's codes of them, which are found faster than names


def of(dtype: Any) -> np.dtype:
    """The dtype of a net, from a NumPy dtype or its name.

    bfloat16 is that of the package ml_dtypes. Raises TypeError for one that nets do not compute in, DeviceError where
    ml_dtypes is missing.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16 as dtype
        except ImportError as error:
            raise DeviceError(f"bfloat16 needs ml_dtypes ({error}): pip install 'blobmem[cuda]' installs it") from error
    result = np.dtype(dtype)
    if result.name not in NAMES or not result.isnative:
        raise TypeError(f"a net computes in one of {', '.join(NAMES)}, not {result}")
    return result


def is_half(dtype: np.dtype) -> bool:
    """Whether it is one of two bytes."""
    return dtype.char in _OF_TWO_BYTES


def exact(dtype: np.dtype) -> np.dtype:
    """What a net of the dtype reckons in, and keeps what has to be exact in: float32 for halves, else the dtype."""
    return np.dtype(np.float32) if is_half(dtype) else dtype
