"""Hinge, multinomial logistic and infogain losses against NumPy in float64."""

import numpy as np
import pytest

from blobmem import NetError
from blobmem.ops.host import class_loss, loss
from blobmem.ops.registry import ArraySpec, table

ROWS = [(4, 5), (300, 40), (1, 1), (7, 1031)]
SHAPES = [(4, 5, 1), (3, 4, 7), (300, 40, 1), (2, 6, 1031)]
DIVISORS = {"FULL": lambda shape, counted: shape[0] * shape[2], "VALID": lambda shape, counted: counted,
            "BATCH_SIZE": lambda shape, counted: shape[0], "NONE": lambda shape, counted: 1}  # fmt: skip


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def labels(dtype, classes, *shape):
    return np.random.default_rng(7).integers(0, classes, shape).astype(dtype)


def infogain_backward(*operands, **attributes):
    """The op with the workspace that it asks for."""
    nbytes = table()["infogain_loss_backward"].workspace_bytes(*map(ArraySpec.of, operands), **attributes)
    class_loss.infogain_loss_backward(*operands, ws=np.full(nbytes, 255, np.uint8), **attributes)


def near(got, expected):
    atol = {np.dtype(np.float32): 3e-6, np.dtype(np.float64): 1e-13}[got.dtype] * max(1, np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("shape", ROWS)
def test_hinge_loss(shape, norm, dtype, garbage):
    x, label = values(dtype, *shape) * 2, labels(dtype, shape[1], shape[0])
    sign = np.ones(shape)
    sign[np.arange(shape[0]), label.astype(int)] = -1
    margin = np.maximum(0, 1 + sign * x.astype(np.float64))
    total, dx = garbage(), garbage(*shape)
    class_loss.hinge_loss_forward(x, label, total, norm=norm, layer="l")
    near(total, (margin if norm == "L1" else margin**2).sum() / shape[0])
    class_loss.hinge_loss_backward(x, label, np.array(1.75, dtype), dx, norm=norm, layer="l")
    slope = (margin > 0) * sign if norm == "L1" else 2 * margin * sign
    near(dx, 1.75 / shape[0] * slope)


def test_a_margin_just_kept_costs_nothing(dtype, garbage):
    x, total, dx = np.array([[1, -1]], dtype), garbage(), garbage(1, 2)
    class_loss.hinge_loss_forward(x, np.zeros(1, dtype), total, norm="L1", layer="l")
    class_loss.hinge_loss_backward(x, np.zeros(1, dtype), np.ones((), dtype), dx, norm="L1", layer="l")
    assert total == 0
    assert not dx.any()


@pytest.mark.parametrize("shape", ROWS)
def test_multinomial_loss(shape, dtype, garbage):
    prob = np.random.default_rng(0).uniform(0.1, 1, shape).astype(dtype)
    label = labels(dtype, shape[1], shape[0])
    at = np.arange(shape[0]), label.astype(int)
    total, dprob = garbage(), garbage(*shape)
    class_loss.multinomial_loss_forward(prob, label, total, layer="l")
    near(total, -np.log(prob[at].astype(np.float64)).mean())
    class_loss.multinomial_loss_backward(prob, label, np.array(1.75, dtype), dprob, layer="l")
    expected = np.zeros(shape)
    expected[at] = -1.75 / shape[0] / prob[at].astype(np.float64)
    near(dprob, expected)


def test_a_probability_that_vanished(dtype, garbage):
    prob, label, total, dprob = np.array([[0, 1]], dtype), np.zeros(1, dtype), garbage(), garbage(1, 2)
    class_loss.multinomial_loss_forward(prob, label, total, layer="l")
    np.testing.assert_allclose(total, -np.log(1e-20), rtol=1e-6)
    class_loss.multinomial_loss_backward(prob, label, np.ones((), dtype), dprob, layer="l")
    np.testing.assert_allclose(dprob, [[-1e20, 0]], rtol=1e-6)


def infogain_expected(x, label, gain, counts):
    """(prob, the sum of losses, its gradient), in float64."""
    e = np.exp(x - x.max(1, keepdims=True), dtype=np.float64)
    prob = e / e.sum(1, keepdims=True)
    rows = gain.astype(np.float64)[np.where(counts, label, 0).astype(int)]  # (outer, inner, classes)
    rows = np.moveaxis(rows, 2, 1) * counts[:, None, :]
    return prob, -(rows * np.log(np.maximum(prob, 1e-20))).sum(), prob * rows.sum(1, keepdims=True) - rows


@pytest.mark.parametrize("ignored", [None, -1, 1])
@pytest.mark.parametrize("normalization", DIVISORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_infogain_loss(shape, normalization, ignored, dtype, garbage):
    outer, classes, inner = shape
    x, gain = values(dtype, *shape) * 3, values(dtype, classes, classes, seed=1)
    gain[0] = 0
    label = labels(dtype, classes, outer, inner)
    if ignored is not None:
        label[:, ::3] = ignored
    counts = label != ignored if ignored is not None else np.ones(label.shape, bool)
    prob, total, dx = garbage(*shape), garbage(), garbage(*shape)
    attributes = {"ignore_label": ignored, "normalization": normalization, "layer": "l"}
    class_loss.infogain_loss_forward(x, label, gain, prob, total, **attributes)
    probabilities, loss_sum, gradient = infogain_expected(x.astype(np.float64), label, gain, counts)
    divisor = max(1, DIVISORS[normalization](shape, counts.sum()))
    near(prob, probabilities)
    near(total, loss_sum / divisor)
    infogain_backward(prob, label, gain, np.array(1.75, dtype), dx, **attributes)
    near(dx, 1.75 / divisor * gradient)
    assert not dx[np.broadcast_to(~counts[:, None, :], shape)].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_with_the_identity_infogain_is_the_softmax_loss(shape, dtype, garbage):
    x, label = values(dtype, *shape), labels(dtype, shape[1], shape[0], shape[2])
    attributes = {"ignore_label": 2, "normalization": "VALID", "layer": "l"}
    one, gain = np.ones((), dtype), np.eye(shape[1], dtype=dtype)
    prob, sums = garbage(*shape), garbage(shape[0], 2, shape[2])
    totals, gradients = (garbage(), garbage()), (garbage(*shape), garbage(*shape))
    class_loss.infogain_loss_forward(x, label, gain, prob, totals[0], **attributes)
    infogain_backward(prob, label, gain, one, gradients[0], **attributes)
    loss.softmax_loss_forward(x, label, sums, totals[1], **attributes)
    loss.softmax_loss_backward(x, label, sums, one, gradients[1], **attributes)
    np.testing.assert_allclose(*totals, rtol=1e-6)
    near(*gradients)


LOSS = {"ignore_label": -1, "normalization": "VALID", "layer": "l"}


def cases(dtype, batch=500, classes=150):
    x, y = values(dtype, batch, classes), values(dtype, batch, classes, seed=1)
    wide, other = x.reshape(batch, classes, 1), y.reshape(batch, classes, 1)
    label, one, gain = labels(dtype, classes, batch), np.ones((), dtype), values(dtype, classes, classes)
    column = label.reshape(batch, 1)
    return {
        "hinge": (class_loss.hinge_loss_forward, (x, label, one), {"norm": "L2", "layer": "l"}),
        "hinge-backward": (class_loss.hinge_loss_backward, (x, label, one, y), {"norm": "L2", "layer": "l"}),
        "multinomial": (class_loss.multinomial_loss_forward, (np.abs(x), label, one), {"layer": "l"}),
        "multinomial-backward": (class_loss.multinomial_loss_backward, (np.abs(x), label, one, y), {"layer": "l"}),
        "infogain": (class_loss.infogain_loss_forward, (wide, column, gain, other, one), LOSS),
        "infogain-backward": (infogain_backward, (wide, column, gain, one, other), LOSS),
    }


@pytest.mark.parametrize("name", cases(np.float32, 1, 1))
def test_threads_and_memory(name, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)


@pytest.mark.parametrize("name", cases(np.float32, 1, 1))
@pytest.mark.parametrize("wrong", [5, -2, np.nan])
def test_a_label_that_is_no_class(name, wrong, dtype):
    op, operands, attributes = cases(dtype, 4, 5)[name]
    operands[1][2] = wrong
    before = [operand.copy() for operand in operands]
    with pytest.raises(NetError, match=r"layer 'l': label (5|-2|nan) of item 2 is no class: expected 0 to 4"):
        op(*operands, **attributes)
    for one, other in zip(before, operands, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", [name for name in cases(np.float32, 1, 1) if "backward" not in name])
def test_a_net_that_diverged_has_no_loss(name, dtype):
    op, operands, attributes = cases(dtype, 4, 5)[name]
    operands[0].fill(np.nan)
    op(*operands, **attributes)
    assert np.isnan(operands[-1])
