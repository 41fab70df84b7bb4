"""Planes scaled and added on CUDA."""

import numpy as np
import pytest


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(6, 7), (3000, 1), (2, 4001), (5, 128), (3, 2), (4, 0)], ids=str)
def test_axpy(cuda, rng, shape, dtype):
    scale, x, y = (rng.normal(size=s).astype(dtype) for s in (shape[0], shape, shape))
    cuda.compare("axpy_forward", scale, x, y, np.full(shape, np.nan, dtype))
    cuda.compare("axpy_forward", scale, x, y, y)
