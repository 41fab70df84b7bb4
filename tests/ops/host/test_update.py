"""Updates against NumPy in float64."""

import numpy as np
import pytest
from update_formulas import HISTORIES, OPTIONS, step

from blobmem.ops.host import update

COMMON = {"rate": 0.1, "decay": 0.05, "scale": 0.25}
OPS = {kind: getattr(update, f"{kind.lower()}_update") for kind in OPTIONS}


def arrays(dtype, shape, count=3):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


def operands(kind, dtype, shape):
    """Gradient, parameter and history, which is nowhere negative where it holds squares."""
    diff, data, *history = arrays(dtype, shape, 2 + HISTORIES[kind])
    return diff, data, [h if kind in ("SGD", "Nesterov") else np.abs(h, out=h) for h in history]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("regularization", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(1,), (), (7, 5), (101, 997), (0, 3)], ids=str)
def test_formula(kind, shape, regularization, dtype, close):
    diff, data, history = operands(kind, dtype, shape)
    if data.size > 1:
        data.flat[0] = 0  # whose sign is 0
    wide = [array.astype(np.float64) for array in (diff, data, *history)]
    pull = np.sign(data) if regularization == "L1" else wide[1]
    taken, expected = step(kind, 0.25 * wide[0] + 0.05 * pull, wide[2:], COMMON["rate"], **OPTIONS[kind])
    before = diff.copy()
    OPS[kind](diff, data, *history, regularization=regularization, **COMMON, **OPTIONS[kind])
    for array, values in zip(history, expected, strict=True):
        close(array, np.asarray(values), digits=4)
    close(data, np.asarray(wide[1] - taken), digits=4)
    np.testing.assert_array_equal(diff, before)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_parameter_without_rate_or_history_stays(kind, dtype):
    diff, data, history = operands(kind, dtype, (50,))
    before = data.copy()
    for array in history:
        array[...] = 0
    OPS[kind](diff, data, *history, regularization="L2", **{**COMMON, "rate": 0.0}, **OPTIONS[kind])
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize("kind", ["AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_no_gradient_and_no_history_moves_nothing(kind, dtype):
    data = np.ones(9, dtype)
    history = [np.zeros(9, dtype) for _ in range(HISTORIES[kind])]
    OPS[kind](np.zeros(9, dtype), data, *history, regularization="L2", **{**COMMON, "decay": 0.0}, **OPTIONS[kind])
    assert (data == 1).all()
    assert all((array == 0).all() for array in history)


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


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("regularization", ["L1", "L2"])
def test_threads_and_memory(kind, regularization, dtype, same_bits, frugal):
    diff, data, history = operands(kind, dtype, (111, 903))
    for check in (same_bits, frugal):
        check(OPS[kind], diff, data, *history, regularization=regularization, **COMMON, **OPTIONS[kind])


def test_threads_and_memory_of_sumsq(dtype, same_bits, frugal):
    (x,) = arrays(dtype, (111, 903), 1)
    same_bits(update.sumsq, x, np.ones(1, dtype))
    frugal(update.sumsq, x, np.ones(1, dtype))
