"""Updates against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import update

SETTINGS = {"rate": 0.1, "momentum": 0.9, "decay": 0.05, "scale": 0.25}


def arrays(dtype, shape, count=3):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("regularization", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(1,), (), (7, 5), (101, 997), (0, 3)])
def test_sgd(shape, regularization, dtype, close):
    diff, data, history = arrays(dtype, shape)
    if data.size > 1:
        data.flat[0] = 0  # whose sign is 0
    pull = np.sign(data) if regularization == "L1" else data
    expected = 0.9 * history.astype(np.float64) + 0.1 * (0.25 * diff.astype(np.float64) + 0.05 * pull)
    moved, before = data - expected, diff.copy()
    update.sgd_update(diff, data, history, regularization=regularization, **SETTINGS)
    close(history, expected, digits=3)
    close(data, moved, digits=3)
    np.testing.assert_array_equal(diff, before)


def test_a_parameter_without_rate_or_history_stays(dtype):
    diff, data, _ = arrays(dtype, (50,))
    before = data.copy()
    update.sgd_update(
        diff, data, np.zeros_like(data), rate=0.0, momentum=0.9, decay=0.1, regularization="L2", scale=1.0
    )
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize("size", [0, 1, 5, 16_385, 300_007])
def test_sumsq_adds(size, dtype, close):
    (x,) = arrays(dtype, (size,), 1)
    out = np.array([3], dtype)
    expected = 3 + (x.astype(np.float64) ** 2).sum()
    update.sumsq(x, out)
    close(out, np.array([expected]))


def test_sumsq_of_many_does_not_drift():
    x = np.full(3_000_000, 0.1, np.float32)
    out = np.zeros(1, np.float32)
    update.sumsq(x, out)
    assert out[0] == pytest.approx(3_000_000 * float(np.float32(0.1)) ** 2, rel=2e-7)


def test_threads_and_memory(dtype, same_bits, frugal):
    operands = arrays(dtype, (111, 903))
    for regularization in ("L1", "L2"):
        same_bits(update.sgd_update, *operands, regularization=regularization, **SETTINGS)
        frugal(update.sgd_update, *operands, regularization=regularization, **SETTINGS)
    same_bits(update.sumsq, operands[0], np.ones(1, dtype))
    frugal(update.sumsq, operands[0], np.ones(1, dtype))
