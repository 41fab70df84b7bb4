"""Hinge, multinomial and infogain losses against the host's."""

import numpy as np
import pytest

from blobmem.errors import NetError

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SHAPES = pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 10), (300, 3), (3, 1100)], ids=str)


def rows(rng, shape, dtype):
    return rng.normal(size=shape).astype(dtype), rng.integers(0, shape[1], shape[0]).astype(dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_hinge(norm, shape, dtype, cuda, rng):
    x, label = rows(rng, shape, dtype)
    x.reshape(-1)[:4] = [-1, 1, np.nan, 5][: min(4, x.size)]
    cuda.compare("hinge_loss_forward", x, label, np.full(1, np.nan, dtype), norm=norm, layer="loss")
    dloss, dx = np.full(1, 0.5, dtype), np.full_like(x, np.nan)
    cuda.compare("hinge_loss_backward", x, label, dloss, dx, norm=norm, layer="loss")


def test_hinge_by_hand(cuda):
    x, label = np.array([[0.5, -2, 0.25]], np.float32), np.zeros(1, np.float32)
    for norm, loss, dx in (("L1", 0.5 + 1.25, [-1, 0, 1]), ("L2", 0.25 + 1.5625, [-1, 0, 2.5])):
        assert cuda.run("hinge_loss_forward", x, label, x[0, :1], norm=norm, layer="")[2].tolist() == [loss]
        got = cuda.run("hinge_loss_backward", x, label, np.ones(1, np.float32), x.copy(), norm=norm, layer="")[3]
        assert got.tolist() == [dx]


@DTYPES
@SHAPES
def test_multinomial(shape, dtype, cuda, rng):
    x, label = rows(rng, shape, dtype)
    prob = np.abs(x)
    prob.reshape(-1)[:2] = 1e-25
    cuda.compare("multinomial_loss_forward", prob, label, np.full(1, np.nan, dtype), layer="loss")
    dloss, dprob = np.full(1, 0.5, dtype), np.full_like(x, np.nan)
    cuda.compare("multinomial_loss_backward", prob, label, dloss, dprob, layer="loss")


def test_multinomial_of_many_rows(cuda, rng):
    x, label = rows(rng, (2100, 3), np.float32)  # more than a block's
    cuda.compare("multinomial_loss_forward", np.abs(x), label, np.full(1, np.nan, np.float32), layer="loss")


@DTYPES
@pytest.mark.parametrize("shape", [(0, 3, 1), (9, 10, 1), (2, 21, 7), (3, 300, 2), (2, 3, 1100)], ids=str)
@pytest.mark.parametrize("ignored, normalization", [(None, "VALID"), (2, "VALID"), (2, "FULL"), (2, "BATCH_SIZE")])
def test_infogain(ignored, normalization, shape, dtype, cuda, rng):
    outer, classes, inner = shape
    x = rng.normal(size=shape).astype(dtype)
    label = rng.integers(0, classes, (outer, inner)).astype(dtype)
    gain = (rng.normal(size=(classes, classes)) * rng.integers(0, 2, (classes, classes))).astype(dtype)
    attributes = {"ignore_label": ignored, "normalization": normalization, "layer": "loss"}
    outputs = np.full_like(x, np.nan), np.full(1, np.nan, dtype)
    prob = cuda.compare("infogain_loss_forward", x, label, gain, *outputs, **attributes)[3]
    dloss, dx = np.full(1, 1.5, dtype), np.full_like(x, np.nan)
    cuda.compare("infogain_loss_backward", prob, label, gain, dloss, dx, **attributes)


CALLS = {
    "hinge_loss": {"norm": "L1"},
    "multinomial_loss": {},
    "infogain_loss": {"ignore_label": 1, "normalization": "VALID"},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [5, -1, np.nan], ids=str)
def test_a_label_that_is_no_class(value, name, cuda):
    shape = (3, 5, 1) if name == "infogain_loss" else (3, 5)
    x, label, one = np.ones(shape, np.float32), np.zeros(3, np.float32), np.ones(1, np.float32)
    gain = [np.eye(5, dtype=np.float32)] if name == "infogain_loss" else []
    label[2] = value
    message = f"layer 'ip': label {value:g} of item 2 is no class: expected 0 to 4"
    prob = [x.copy()] if gain else []
    with pytest.raises(NetError, match=message):
        cuda.run(f"{name}_forward", x, label, *gain, *prob, one, **CALLS[name], layer="ip")
    with pytest.raises(NetError, match=message):
        cuda.run(f"{name}_backward", x, label, *gain, one, x.copy(), **CALLS[name], layer="ip")
