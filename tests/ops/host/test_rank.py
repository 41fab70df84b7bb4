"""Accuracy and argmax against a plain sort."""

import numpy as np
import pytest

from blobmem import NetError
from blobmem.ops.host import rank

SHAPES = [(6, 5, 1), (3, 4, 7), (400, 3, 2), (1, 9, 2100)]


def values(dtype, *shape, seed=0):
    # few different values, so that there are ties
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def judged(x, label, top_k, ignored):
    """(class, right) of all labels that count."""
    for o, i in np.ndindex(label.shape):
        true = int(label[o, i])
        if true != ignored:
            scores = x[o, :, i]
            others = np.delete(scores, true)
            yield true, (others >= scores[true]).sum() < top_k


@pytest.mark.parametrize("ignored", [None, -1, 0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_accuracy(shape, top_k, ignored, dtype, close, garbage):
    x = values(dtype, *shape)
    label = np.random.default_rng(1).integers(0, max(1, shape[1] - 1), (shape[0], shape[2])).astype(dtype)
    if ignored is not None:
        label[:, ::2] = ignored
    attributes = {"top_k": top_k, "ignore_label": ignored, "layer": "top"}
    results = list(judged(x, label, top_k, ignored))
    accuracy, per_class = garbage(), garbage(shape[1])
    rank.accuracy_forward(x, label, accuracy, None, **attributes)
    expected = np.mean([right for _, right in results]) if results else 0.0
    close(accuracy, expected)
    accuracy.fill(np.nan)
    rank.accuracy_forward(x, label, accuracy, per_class, **attributes)
    close(accuracy, expected)
    rights = [[right for c, right in results if c == k] for k in range(shape[1])]
    close(per_class, np.array([np.mean(r) if r else 0 for r in rights]))


def test_accuracy_of_a_net_that_diverged(dtype, garbage):
    accuracy = garbage()
    rank.accuracy_forward(np.full((2, 3, 1), np.nan, dtype), np.zeros((2, 1), dtype), accuracy, None, top_k=1,
                          ignore_label=None, layer="top")  # fmt: skip
    assert accuracy == 0


@pytest.mark.parametrize("wrong", [5, -1, np.nan])
def test_a_label_that_is_no_class(wrong, dtype):
    label, accuracy = np.zeros((6, 1), dtype), np.ones((), dtype)
    label[4] = wrong
    with pytest.raises(NetError, match=r"layer 'top': label (5|-1|nan) .*4 .*0 to 4"):
        rank.accuracy_forward(values(dtype, 6, 5, 1), label, accuracy, None, top_k=1, ignore_label=9, layer="top")
    assert accuracy == 1


def largest(scores, top_k):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], -i))[:top_k]


@pytest.mark.parametrize("out_max_val", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("shape", [(4, 7), (3, 2, 5), (300, 3, 4, 2)])
def test_argmax_of_items(shape, top_k, out_max_val, dtype, garbage):
    x = values(dtype, *shape)
    y = garbage(shape[0], 1 + out_max_val, top_k, *[1] * (len(shape) - 3))
    rank.argmax_forward(x, y, top_k=top_k, out_max_val=out_max_val, axis=None)
    for item, got in zip(x.reshape(shape[0], -1), y, strict=True):
        places = largest(item, top_k)
        assert got[0].ravel().tolist() == places
        if out_max_val:
            assert got[1].ravel().tolist() == item[places].tolist()


@pytest.mark.parametrize("out_max_val", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_argmax_along_an_axis(axis, top_k, out_max_val, dtype, garbage):
    x = values(dtype, 4, 5, 6)
    dims = list(x.shape)
    dims[axis] = top_k
    y = garbage(*dims)
    rank.argmax_forward(x, y, top_k=top_k, out_max_val=out_max_val, axis=axis)
    lines, got = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]), np.moveaxis(y, axis, -1).reshape(-1, top_k)
    for line, result in zip(lines, got, strict=True):
        places = largest(line, top_k)
        assert result.tolist() == (line[places].tolist() if out_max_val else places)


def test_argmax_of_not_a_number_stays_inside(dtype, garbage):
    x, y = np.full((2, 4), np.nan, dtype), garbage(2, 2, 4)
    x[1, 2] = 5
    rank.argmax_forward(x, y, top_k=4, out_max_val=True, axis=None)
    for item in y[:, 0]:
        assert sorted(item.tolist()) == [0, 1, 2, 3]
    assert y[1, 0, 0] == 2


def test_threads_and_memory(dtype, same_bits, frugal):
    x, label = values(dtype, 700, 60, 2), np.random.default_rng(1).integers(0, 60, (700, 2)).astype(dtype)
    for per_class in (None, np.zeros(60, dtype)):
        attributes = {"top_k": 2, "ignore_label": None, "layer": "top"}
        same_bits(rank.accuracy_forward, x, label, np.zeros((), dtype), per_class, **attributes)
        frugal(rank.accuracy_forward, x, label, np.zeros((), dtype), per_class, **attributes)
    attributes = {"top_k": 2, "out_max_val": True, "axis": 1}
    same_bits(rank.argmax_forward, x, np.zeros((700, 2, 2), dtype), **attributes)
    frugal(rank.argmax_forward, x, np.zeros((700, 2, 2), dtype), **attributes)
