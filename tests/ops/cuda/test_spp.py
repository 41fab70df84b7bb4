"""Pyramids of poolings on a CUDA device against the host."""

import numpy as np
import pytest

from blobmem.ops.host.random import draws_at

PLANES = {
    "odd": ((9, 10), (((9, 10), (0, 0), 1), ((5, 5), (1, 0), 2), ((3, 3), (2, 1), 4))),
    "even": ((8, 12), (((8, 12), (0, 0), 1), ((4, 6), (0, 0), 2), ((2, 3), (0, 0), 4))),
    "one level": ((3, 2), (((3, 2), (0, 0), 1),)),
}


@pytest.fixture(params=PLANES.values(), ids=PLANES.keys())
def pyramid(request):
    return request.param


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_pyramid(cuda, rng, pyramid, dtype):
    plane, levels = pyramid
    x = rng.integers(0, 5, (3, 5, *plane)).astype(dtype)
    y = np.full((3, 5 * sum(bins * bins for _, _, bins in levels)), np.nan, dtype)
    mask, dx, dy = np.full(y.shape, -7, np.int32), np.full_like(x, np.nan), rng.normal(size=y.shape).astype(dtype)
    _, _, places = cuda.compare("spp_max_forward", x, y, mask, levels=levels, rtol=0)
    cuda.compare("spp_max_forward", x, y, None, levels=levels, rtol=0)
    cuda.compare("spp_max_backward", dy, places, dx, levels=levels)
    cuda.compare("spp_ave_forward", x, y, levels=levels)
    cuda.compare("spp_ave_backward", dy, dx, levels=levels)
    cuda.compare("spp_stochastic_forward", x, y, None, draws=None, levels=levels)
    draws = draws_at(1, "spp", 4)
    _, _, places = cuda.compare("spp_stochastic_forward", x, y, mask, draws=draws, levels=levels, rtol=0)
    cuda.compare("spp_max_backward", dy, places, dx, levels=levels)
