"""Updates and sums of squares on CUDA against the host's."""

import numpy as np
import pytest
from update_formulas import HISTORIES, OPTIONS

from blobmem.ops.registry import table

COMMON = {"rate": 0.1, "decay": 0.05, "scale": 0.25}
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("regularization", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(1,), (), (7, 5), (31, 97), (0, 3)], ids=str)
@DTYPES
def test_update(cuda, rng, kind, regularization, shape, dtype):
    diff, data, *history = (np.array(rng.normal(size=shape), dtype) for _ in range(2 + HISTORIES[kind]))
    if kind not in ("SGD", "Nesterov"):
        history = [np.abs(h, out=h) for h in history]
    if data.size > 1:
        data.flat[0] = 0  # whose sign is 0
    attributes = {"regularization": regularization, **COMMON, **OPTIONS[kind]}
    got = cuda.compare(
        f"{kind.lower()}_update", diff, data, *history, rtol=4e-6 if dtype == np.float32 else 1e-14, **attributes
    )
    np.testing.assert_array_equal(got[0], diff)


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 4097, 300_007])
@pytest.mark.parametrize("out", [np.float32, np.float64], ids=["to-float32", "to-float64"])
@DTYPES
def test_sumsq_adds(cuda, rng, size, dtype, out):
    x, total = rng.normal(size=size).astype(dtype), np.array([3], out)
    got = cuda.run("sumsq", x, total)[1]
    expected = 3 + (x.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose(got, [expected], rtol=2e-7 if out == np.float32 else 1e-14)


def test_sumsq_of_many_does_not_drift(cuda):
    x = np.full(4096 * 1024 + 12_345, 0.1, np.float32)
    got = cuda.run("sumsq", x, np.zeros(1, np.float32))[1]
    assert got[0] == pytest.approx(x.size * float(np.float32(0.1)) ** 2, rel=2e-7)


def test_a_small_sum_of_squares_needs_no_second_launch_nor_much_room(cuda):
    class Spec:
        size = 4096

    assert table("cuda")["sumsq"].workspace_bytes(Spec, None, device=cuda.device) == 8
    Spec.size = 10**9
    assert table("cuda")["sumsq"].workspace_bytes(Spec, None, device=cuda.device) == 8 * 1024
