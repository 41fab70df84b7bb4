"""Softmax and its loss against NumPy in float64."""

import numpy as np
import pytest

from blobmem import NetError
from blobmem.ops.host import loss

SHAPES = [(4, 5, 1), (3, 4, 7), (1, 3, 1031), (300, 40, 1), (2, 1, 3)]
NORMALIZERS = {"FULL": lambda shape, counted: shape[0] * shape[2], "VALID": lambda shape, counted: counted,
               "BATCH_SIZE": lambda shape, counted: shape[0], "NONE": lambda shape, counted: 1}  # fmt: skip


def values(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def labels(dtype, shape, ignored=None):
    label = np.random.default_rng(7).integers(0, shape[1], (shape[0], shape[2])).astype(dtype)
    if ignored is not None:
        label[:, ::3] = ignored
    return label


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, in_place, dtype, close, garbage):
    x = values(dtype, *shape) * 4
    expected = softmax(x.astype(np.float64))
    y = x if in_place else garbage(*shape)
    loss.softmax_forward(x, y)
    close(y, expected)


def test_softmax_of_large_scores(dtype, garbage):
    y = garbage(1, 3, 1)
    loss.softmax_forward(np.array([1e4, 1e4, -1e4], dtype).reshape(1, 3, 1), y)
    assert y.ravel().tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_backward(shape, in_place, dtype, close, garbage):
    y, dy = softmax(values(dtype, *shape)), values(dtype, *shape, seed=1)
    wide = dy.astype(np.float64)
    expected = y * (wide - (y * wide).sum(1, keepdims=True))
    dx = dy if in_place else garbage(*shape)
    loss.softmax_backward(y, dy, dx)
    np.testing.assert_allclose(dx, expected, atol={np.float32: 1e-6, np.float64: 1e-14}[dtype])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ignored", [None, -1, 1, 255])
@pytest.mark.parametrize("normalization", NORMALIZERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_loss(shape, normalization, ignored, in_place, dtype, close, garbage):
    x, label = values(dtype, *shape) * 3, labels(dtype, shape, ignored)
    sums, total = garbage(shape[0], 2, shape[2]), garbage()
    attributes = {"ignore_label": ignored, "normalization": normalization, "layer": "l"}
    loss.softmax_loss_forward(x, label, sums, total, **attributes)
    wide, most = x.astype(np.float64), x.max(1)
    close(sums, np.stack([most, np.exp(wide - most[:, None]).sum(1)], 1))
    p = softmax(wide)
    counts = label != ignored if ignored is not None else np.ones(label.shape, bool)
    outer, inner = np.nonzero(counts)
    classes = label[counts].astype(int)
    normalizer = max(1, NORMALIZERS[normalization](shape, counts.sum()))
    close(total, -np.log(p[outer, classes, inner]).sum() / normalizer, digits=5)
    expected = p.copy()
    expected[outer, classes, inner] -= 1
    expected *= counts[:, None, :] * (1.75 / normalizer)
    dx = x if in_place else garbage(*shape)
    loss.softmax_loss_backward(x, label, sums, np.array(1.75, dtype), dx, **attributes)
    np.testing.assert_allclose(dx, expected, atol={np.float32: 2e-6, np.float64: 1e-14}[dtype])
    assert not dx[np.broadcast_to(~counts[:, None, :], shape)].any()


def test_all_labels_ignored(dtype, garbage):
    x, label = values(dtype, 2, 3, 1), np.full((2, 1), 9, dtype)
    x[0, 1] = np.nan
    sums, total, dx = garbage(2, 2, 1), garbage(), garbage(2, 3, 1)
    attributes = {"ignore_label": 9, "normalization": "VALID", "layer": "l"}
    loss.softmax_loss_forward(x, label, sums, total, **attributes)
    assert total == 0
    loss.softmax_loss_backward(x, label, sums, np.ones((), dtype), dx, **attributes)
    assert not dx.any()


def test_numbers_are_divided_by_the_labels_that_count(dtype, garbage):
    attributes = {"classes": 3, "ignore_label": 1, "layer": "l"}
    for label, expected in (([[0, 1, 2], [1, 0, 0]], 1.75), ([[1]], 7)):
        y = garbage()
        loss.divide_by_labels(np.array(7, dtype), np.array(label, dtype), y, **attributes)
        assert y == expected
    with pytest.raises(NetError, match="layer 'l': label 3 of item 1 is no class"):
        loss.divide_by_labels(np.array(7, dtype), np.array([[0, 3]], dtype), garbage(), **attributes)


def test_a_probability_that_vanished_gives_a_finite_loss(dtype, garbage):
    x, sums, total = np.array([[[0], [1e4]]], dtype), garbage(1, 2, 1), garbage()
    loss.softmax_loss_forward(
        x, np.zeros((1, 1), dtype), sums, total, ignore_label=None, normalization="VALID", layer="l"
    )
    # Caffe's bound is the smallest normal float
    assert 87 < total <= -np.log(np.finfo(dtype).tiny)


@pytest.mark.parametrize("scores", [(np.nan, 1), (1, np.nan), (-np.inf, -np.inf), (np.inf, 0)], ids=str)
def test_a_net_that_diverged_has_no_loss(scores, dtype, garbage):
    x, label, sums = np.array(scores, dtype).reshape(1, 2, 1), np.zeros((1, 1), dtype), garbage(1, 2, 1)
    total, dx = garbage(), np.zeros_like(x)
    attributes = {"ignore_label": None, "normalization": "VALID", "layer": "l"}
    loss.softmax_loss_forward(x, label, sums, total, **attributes)
    loss.softmax_loss_backward(x, label, sums, np.ones((), dtype), dx, **attributes)
    assert np.isnan(total) and np.isnan(dx).any()


@pytest.mark.parametrize("wrong", [3, -1, 1e9, np.nan, np.inf])
def test_a_label_that_is_no_class(wrong, dtype):
    x, label = values(dtype, 4, 3, 2), labels(dtype, (4, 3, 2))
    label[2, 1] = wrong
    sums, dx, total = np.ones((4, 2, 2), dtype), np.ones_like(x), np.ones((), dtype)
    attributes = {"ignore_label": 2, "normalization": "VALID", "layer": "l"}
    with pytest.raises(NetError, match=r"layer 'l': label (3|-1|1e\+09|nan|inf) .*5 .*0 to 2"):
        loss.softmax_loss_forward(x, label, sums, total, **attributes)
    with pytest.raises(NetError, match="0 to 2"):
        loss.softmax_loss_backward(x, label, sums, total, dx, **attributes)
    for array in (sums, dx, total):
        assert (array == 1).all(), "written before the labels were looked at"


def cases(dtype, shape):
    x, y, dy = (values(dtype, *shape, seed=i) for i in range(3))
    label, one, sums = labels(dtype, shape, -1), np.ones((), dtype), np.ones((shape[0], 2, shape[2]), dtype)
    attributes = {"ignore_label": -1, "normalization": "VALID", "layer": "l"}
    return {
        "softmax": (loss.softmax_forward, (x, y), {}),
        "softmax_backward": (loss.softmax_backward, (x, dy, y), {}),
        "loss": (loss.softmax_loss_forward, (x, label, sums, one), attributes),
        "loss_backward": (loss.softmax_loss_backward, (x, label, sums, one, y), attributes),
    }


@pytest.mark.parametrize("shape", [(500, 150, 1), (3, 21, 1111)])
@pytest.mark.parametrize("name", cases(np.float32, (1, 1, 1)))
def test_threads_and_memory(name, shape, dtype, same_bits, frugal):
    op, operands, attributes = cases(dtype, shape)[name]
    same_bits(op, *operands, **attributes)
    frugal(op, *operands, **attributes)
