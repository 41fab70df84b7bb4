"""Euclidean, sigmoid cross-entropy and contrastive losses against NumPy in float64."""

import numpy as np
import pytest

from blobmem.ops.host import pair_loss

SHAPES = [(4, 5), (7, 1), (3, 30_011), (1, 1), (600, 130)]
DIVISORS = {"FULL": lambda shape, counted: shape[0] * shape[1], "VALID": lambda shape, counted: counted,
            "BATCH_SIZE": lambda shape, counted: shape[0], "NONE": lambda shape, counted: 1}  # fmt: skip


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def near(got, expected):
    atol = {np.dtype(np.float32): 3e-6, np.dtype(np.float64): 1e-13}[got.dtype] * max(1, np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_euclidean_loss(shape, dtype, close, garbage):
    a, b = values(dtype, *shape), values(dtype, *shape, seed=1)
    diff, total = garbage(*shape), garbage()
    pair_loss.euclidean_loss_forward(a, b, diff, total)
    wide = a.astype(np.float64) - b
    close(diff, wide)
    close(total, (wide**2).sum() / shape[0] / 2, digits=3)
    for sign in (1.0, -1.0):
        da = garbage(*shape)
        pair_loss.euclidean_loss_backward(diff, np.array(3, dtype), da, sign=sign)
        close(da, sign * 3 / shape[0] * wide, digits=3)


@pytest.mark.parametrize("ignored", [None, -1, 0, 1])
@pytest.mark.parametrize("normalization", DIVISORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sigmoid_cross_entropy(shape, normalization, ignored, dtype, garbage):
    rng = np.random.default_rng(3)
    x = values(dtype, *shape) * 4
    target = rng.choice([-1, 0, 0.25, 0.75, 1], shape).astype(dtype)
    # as an integer of C would hold the target
    counts = np.trunc(target) != ignored if ignored is not None else np.ones(shape, bool)
    p = 1 / (1 + np.exp(-x.astype(np.float64)))
    losses = -(target * np.log(p) + (1.0 - target) * np.log(1 - p))
    divisor = max(1, DIVISORS[normalization](shape, counts.sum()))
    attributes = {"ignore_label": ignored, "normalization": normalization}
    total, dx = garbage(), garbage(*shape)
    pair_loss.sigmoid_cross_entropy_forward(x, target, total, **attributes)
    near(total, (losses * counts).sum() / divisor)
    pair_loss.sigmoid_cross_entropy_backward(x, target, np.array(1.75, dtype), dx, **attributes)
    near(dx, 1.75 / divisor * (p - target) * counts)


def test_sigmoid_cross_entropy_of_large_scores(dtype, garbage):
    x, target = np.array([[-1e4, 1e4, -1e4, 1e4]], dtype), np.array([[0, 1, 1, 0]], dtype)
    total, dx = garbage(), garbage(1, 4)
    attributes = {"ignore_label": None, "normalization": "NONE"}
    pair_loss.sigmoid_cross_entropy_forward(x, target, total, **attributes)
    assert total == 2e4
    pair_loss.sigmoid_cross_entropy_backward(x, target, np.ones((), dtype), dx, **attributes)
    assert dx.tolist() == [[0, 0, -1, 1]]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_contrastive_loss(shape, legacy, dtype, garbage):
    a, b = values(dtype, *shape), values(dtype, *shape, seed=1)
    similar = np.resize([0, 1, 0, 2, 0.5], shape[0]).astype(dtype)  # 0.5 is no, as its whole part
    yes = similar >= 1
    difference = a.astype(np.float64) - b
    squared = (difference**2).sum(1)
    distance = np.sqrt(squared)
    margin = float(np.median(squared if legacy else distance)) + 0.01
    short = np.maximum(0, margin - (squared if legacy else distance))
    losses = np.where(yes, squared, short if legacy else short**2)
    factor = np.where(yes, 1, -1.0 * (short > 0) if legacy else -short / (distance + 1e-4))
    total = garbage()
    attributes = {"margin": margin, "legacy": legacy}
    pair_loss.contrastive_loss_forward(a, b, similar, total, **attributes)
    near(total, losses.mean() / 2)
    for one, other, sign in ((a, b, 1), (b, a, -1)):
        done = garbage(*shape)
        pair_loss.contrastive_loss_backward(one, other, similar, np.array(1.75, dtype), done, **attributes)
        near(done, sign * 1.75 / shape[0] * factor[:, None] * difference)


def test_a_dissimilar_pair_at_one_place_has_no_direction(dtype, garbage):
    a, da, total = values(dtype, 1, 3), garbage(1, 3), garbage()
    pair_loss.contrastive_loss_forward(a, a, np.zeros(1, dtype), total, margin=1.0, legacy=False)
    assert total == 0.5
    pair_loss.contrastive_loss_backward(a, a, np.zeros(1, dtype), np.ones((), dtype), da, margin=1.0, legacy=False)
    assert not da.any()


VALID = {"ignore_label": 1, "normalization": "VALID"}


def cases(dtype, shape):
    x, y, z = (values(dtype, *shape, seed=i) for i in range(3))
    one, similar = np.ones((), dtype), np.resize([0, 1], shape[0]).astype(dtype)
    contrast = {"margin": 9.0, "legacy": False}
    return {
        "euclidean": (pair_loss.euclidean_loss_forward, (x, y, z, one), {}),
        "euclidean-backward": (pair_loss.euclidean_loss_backward, (x, one, y), {"sign": -1.0}),
        "entropy": (pair_loss.sigmoid_cross_entropy_forward, (x, y, one), VALID),
        "entropy-backward": (pair_loss.sigmoid_cross_entropy_backward, (x, y, one, z), VALID),
        "contrast": (pair_loss.contrastive_loss_forward, (x, y, similar, one), contrast),
        "contrast-backward": (pair_loss.contrastive_loss_backward, (x, y, similar, one, z), contrast),
    }


@pytest.mark.parametrize("shape", [(500, 150), (3, 21_111)], ids=["many", "long"])
@pytest.mark.parametrize("name", cases(np.float32, (1, 1)))
def test_threads_and_memory(name, shape, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype, shape)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)


@pytest.mark.parametrize("name", ["euclidean", "entropy", "contrast"])
def test_a_net_that_diverged_has_no_loss(name, dtype):
    op, operands, attributes = cases(dtype, (4, 5))[name]
    operands[0].fill(np.nan)
    op(*operands, **attributes)
    assert np.isnan(operands[-1])
