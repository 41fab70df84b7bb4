"""Fillers on CUDA: the host's numbers."""

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.ops.host.fillers import Filler
from blobmem.ops.host.random import draws_at

DRAWS = draws_at(11, "layer/0", 1 << 34)
FILLERS = [
    Filler(),
    Filler("constant", 0.25),
    Filler("uniform", min=-1.0, max=3.0),
    Filler("gaussian", mean=2.0, std=0.5),
    Filler("gaussian", std=3.0, sparse=2),
    Filler("positive_unitball"),
    Filler("xavier", variance_norm="AVERAGE"),
    Filler("msra", variance_norm="FAN_OUT"),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [(7, 3, 3, 5), (1,), (5,), (0, 4), (2, 1001)], ids=str)
@pytest.mark.parametrize("filler", FILLERS, ids=lambda filler: filler.kind)
def test_the_numbers_of_the_host(cuda, filler, shape, dtype):
    y = np.full(shape, np.nan, dtype)
    cuda.compare("fill_random", y, filler=filler, draws=DRAWS, rtol=1e-7 if dtype == np.float32 else 1e-14)


def test_without_axes(cuda):
    y = np.array(np.nan, np.float32)
    for filler in FILLERS[1:4]:
        cuda.compare("fill_random", y, filler=filler, draws=DRAWS)


def test_sparse_leaves_zeros(cuda):
    y = cuda.run("fill_random", np.ones((100, 40), np.float32), filler=Filler("gaussian", sparse=15), draws=DRAWS)[0]
    assert 0.1 < (y != 0).mean() < 0.2


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 7])
def test_bilinear(cuda, width):
    y = np.full((2, 3, width, width), np.nan, np.float32)
    cuda.compare("fill_random", y, filler=Filler("bilinear"), draws=DRAWS, rtol=1e-7)


def test_bilinear_needs_squares(cuda):
    with pytest.raises(NetError, match=r"bilinear.*\(2, 3, 4, 5\)"):
        cuda.run("fill_random", np.empty((2, 3, 4, 5), np.float32), filler=Filler("bilinear"), draws=DRAWS)
