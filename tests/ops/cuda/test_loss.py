"""Softmax and its loss against the host's."""

import numpy as np
import pytest

from blobmem.errors import NetError

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SHAPES = pytest.mark.parametrize(
    "shape", [(0, 5, 1), (3, 1, 1), (70, 10, 1), (5, 1030, 1), (2, 21, 7), (1, 40, 500), (3, 300, 2)], ids=str
)


def labels(rng, shape, dtype, ignored=None):
    result = rng.integers(0, shape[1], (shape[0], shape[2])).astype(dtype)
    if ignored is not None:
        result[rng.uniform(size=result.shape) < 0.3] = ignored
    return result


def sums_of(x):
    return np.full((x.shape[0], 2, x.shape[2]), np.nan, x.dtype)


@DTYPES
@SHAPES
def test_softmax(shape, dtype, cuda, rng):
    x, dy = (rng.normal(size=shape).astype(dtype) * 5 for _ in range(2))
    x.reshape(-1)[:3] = 500  # the largest is taken off before the exponential
    _, y = cuda.compare("softmax_forward", x, np.full_like(x, np.nan))
    cuda.compare("softmax_backward", y, dy, np.full_like(x, np.nan))


@DTYPES
def test_softmax_in_place(dtype, cuda, rng):
    for shape in ((4, 9, 1), (2, 600, 1), (2, 5, 6)):
        x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
        apart = cuda.run("softmax_forward", x, np.zeros_like(x))[1]
        np.testing.assert_array_equal(cuda.run("softmax_forward", x, x)[0], apart)
        gradient = cuda.run("softmax_backward", apart, dy, np.zeros_like(x))[2]
        np.testing.assert_array_equal(cuda.run("softmax_backward", apart, dy, dy)[1], gradient)


def test_softmax_keeps_what_is_not_a_number_to_its_row(cuda):
    x = np.zeros((3, 5, 1), np.float32)
    x[1, 2], x[2] = np.nan, -np.inf
    y = cuda.run("softmax_forward", x, np.zeros_like(x))[1]
    assert (y[0] == np.float32(0.2)).all()
    assert np.isnan(y[1:]).all()


@DTYPES
@SHAPES
@pytest.mark.parametrize("normalization", ["FULL", "VALID", "BATCH_SIZE", "NONE"])
@pytest.mark.parametrize("ignored", [None, -1], ids=["all", "ignoring"])
def test_softmax_loss(ignored, normalization, shape, dtype, cuda, rng):
    x, label = rng.normal(size=shape).astype(dtype) * 3, labels(rng, shape, dtype, ignored)
    attributes = {"ignore_label": ignored, "normalization": normalization, "layer": "loss"}
    sums, loss, dloss = sums_of(x), np.full((), np.nan, dtype), np.array([1.75], dtype)
    _, _, sums, _ = cuda.compare("softmax_loss_forward", x, label, sums, loss, **attributes)
    dx = cuda.compare("softmax_loss_backward", x, label, sums, dloss, np.full_like(x, np.nan), **attributes)[4]
    in_place = cuda.run("softmax_loss_backward", x, label, sums, dloss, x, **attributes)[4]
    np.testing.assert_array_equal(in_place, dx)


@DTYPES
def test_all_labels_ignored_or_fractional(dtype, cuda, rng):
    x = rng.normal(size=(6, 4, 3)).astype(dtype)
    attributes = {"ignore_label": 2, "normalization": "VALID", "layer": "loss"}
    for label in (np.full((6, 3), 2, dtype), np.full((6, 3), 1.75, dtype)):
        sums = cuda.compare("softmax_loss_forward", x, label, sums_of(x), np.ones(1, dtype), **attributes)[2]
        cuda.compare("softmax_loss_backward", x, label, sums, np.ones(1, dtype), np.ones_like(x), **attributes)


@DTYPES
@pytest.mark.parametrize("ignored", [0, 7], ids=["some", "no such"])
def test_divide_by_labels(ignored, dtype, cuda, rng):
    label = rng.integers(0, 3, (40, 70)).astype(dtype)  # which several blocks count
    attributes = {"classes": 3, "ignore_label": ignored, "layer": "loss"}
    for given in (label, np.full((2, 3), ignored, dtype)):
        cuda.compare("divide_by_labels", np.array([5], dtype), given, np.full(1, np.nan, dtype), **attributes)


def test_a_probability_that_vanished(cuda):
    x = np.array([[[0], [-2000]], [[-300], [0]]], np.float32)
    attributes = {"ignore_label": None, "normalization": "FULL", "layer": "loss"}
    label, loss = np.array([[1], [0]], np.float32), np.zeros(1, np.float32)
    loss = cuda.compare("softmax_loss_forward", x, label, sums_of(x), loss, **attributes)[3]
    assert 87 < loss[0] < 88


def test_many_positions_are_summed_in_parts(cuda, rng):
    """More than one block; and the same bits each time."""
    x = rng.normal(size=(2, 3, 1500)).astype(np.float32)
    label = labels(rng, x.shape, x.dtype, 255)
    attributes = {"ignore_label": 255, "normalization": "VALID", "layer": "loss"}
    operands = x, label, sums_of(x), np.zeros(1, np.float32)
    first = cuda.compare("softmax_loss_forward", *operands, **attributes)
    again = cuda.run("softmax_loss_forward", *operands, **attributes)
    assert first[3].tobytes() == again[3].tobytes()
    cuda.compare("softmax_loss_backward", x, label, first[2], np.ones(1, np.float32), np.zeros_like(x), **attributes)


def test_scores_that_are_not_finite(cuda, rng):
    """A row is not a number if one of its scores is, or all are -infinity; ignored ones have no gradient even so."""
    x, label = rng.normal(size=(6, 700, 1)).astype(np.float32), np.zeros((6, 1), np.float32)
    x[1, 650], x[2], x[3, 1], x[4, 1:], x[5, 0], label[5] = np.nan, -np.inf, np.inf, -np.inf, np.nan, 9
    attributes = {"ignore_label": 9, "normalization": "FULL", "layer": "loss"}
    _, _, sums, loss = cuda.run("softmax_loss_forward", x, label, sums_of(x), np.zeros(1, np.float32), **attributes)
    dx = cuda.run("softmax_loss_backward", x, label, sums, np.ones(1, np.float32), np.zeros_like(x), **attributes)[4]
    assert np.isnan(loss[0]) and np.isnan(dx[1:4]).any((1, 2)).all() and np.isfinite(dx[[0, 4]]).all()
    assert not dx[4:].any()
    x, label = x[4:5], label[4:5]  # whose only score that counts is the label's
    assert not cuda.run("softmax_loss_forward", x, label, sums_of(x), np.ones(1, np.float32), **attributes)[3]


@DTYPES
@pytest.mark.parametrize("value", [3, -1, np.nan, 1e9], ids=str)
def test_a_label_that_is_no_class(value, dtype, cuda, rng):
    x, label = rng.normal(size=(2, 3, 4)).astype(dtype), np.zeros((2, 4), dtype)
    label[1, 2] = value
    attributes = {"ignore_label": None, "normalization": "FULL", "layer": "ip"}
    message = f"layer 'ip': label {float(np.float32(value)):g} of item 6 is no class: expected 0 to 2; check the data"
    with pytest.raises(NetError) as caught:
        cuda.run("softmax_loss_forward", x, label, sums_of(x), np.zeros(1, dtype), **attributes)
    assert str(caught.value).startswith(message)
    with pytest.raises(NetError, match="item 6 is no class"):
        cuda.run("softmax_loss_backward", x, label, sums_of(x), np.ones(1, dtype), np.zeros_like(x), **attributes)
    with pytest.raises(NetError) as of_host:
        cuda.compare("softmax_loss_forward", x, label, sums_of(x), np.zeros(1, dtype), **attributes)
    assert str(of_host.value) == str(caught.value)
    label[1, 2] = 2  # what went wrong is told once
    cuda.compare("softmax_loss_forward", x, label, sums_of(x), np.zeros(1, dtype), **attributes)
