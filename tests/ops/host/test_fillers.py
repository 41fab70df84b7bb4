"""Fillers: what they fill in, and how it is distributed."""

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.ops.host.fillers import Filler, bilinear_kernel, fill_random
from blobmem.ops.host.random import draws_at
from blobmem.proto import caffe_pb2

SHAPE = (100, 30, 5, 7)
DRAWS = draws_at(11, "layer/0", 0)


def filled(filler, shape=SHAPE, dtype=np.float32, draws=DRAWS):
    y = np.full(shape, np.nan, dtype)
    fill_random(y, filler=filler, draws=draws)
    return y


def test_constant():
    assert (filled(Filler()) == 0).all()
    assert (filled(Filler("constant", 0.25)) == 0.25).all()


def test_uniform(dtype):
    y = filled(Filler("uniform", min=-1.0, max=3.0), dtype=dtype)
    assert -1 <= y.min() < -0.99 and 2.99 < y.max() < 3
    np.testing.assert_allclose([y.mean(), y.var()], [1, 16 / 12], rtol=0.02)


def test_gaussian(dtype):
    y = filled(Filler("gaussian", mean=2.0, std=0.5), dtype=dtype)
    np.testing.assert_allclose([y.mean(), y.std()], [2, 0.5], rtol=0.01)
    inside = [(np.abs(y - 2) < 0.5 * n).mean() for n in (1, 2, 3)]
    np.testing.assert_allclose(inside, [0.6827, 0.9545, 0.9973], atol=0.005)
    assert abs(np.corrcoef(y.reshape(-1)[::2], y.reshape(-1)[1::2])[0, 1]) < 0.02


def test_sparse_gaussian_keeps_some_per_output():
    y = filled(Filler("gaussian", std=3.0, sparse=15))
    np.testing.assert_allclose((y != 0).mean(), 15 / 100, rtol=0.05)
    np.testing.assert_allclose(y[y != 0].std(), 3, rtol=0.02)


def test_positive_unitball():
    y = filled(Filler("positive_unitball"))
    assert y.min() >= 0
    np.testing.assert_allclose(y.reshape(100, -1).sum(axis=1, dtype=float), 1, rtol=1e-5)


FANS = [("FAN_IN", SHAPE, 1050), ("FAN_OUT", SHAPE, 3500), ("AVERAGE", SHAPE, 2275), ("FAN_OUT", (50,), 50),
        ("FAN_IN", (), 1)]  # fmt: skip


@pytest.mark.parametrize("norm, shape, fan", FANS)
def test_fans(norm, shape, fan):
    assert Filler("xavier", variance_norm=norm).fan(shape) == fan


@pytest.mark.parametrize("norm", ["FAN_IN", "FAN_OUT", "AVERAGE"])
def test_xavier_and_msra(norm):
    xavier, msra = Filler("xavier", variance_norm=norm), Filler("msra", variance_norm=norm)
    limit = np.sqrt(3 / xavier.fan(SHAPE))
    y = filled(xavier)
    assert 0.99 * limit < np.abs(y).max() <= np.float32(limit)
    np.testing.assert_allclose(y.var(), limit**2 / 3, rtol=0.02)
    y = filled(msra)
    np.testing.assert_allclose(y.std(), np.sqrt(2 / msra.fan(SHAPE)), rtol=0.01)
    np.testing.assert_allclose(y.mean() / y.std(), 0, atol=0.01)


def test_bilinear_interpolates():
    np.testing.assert_allclose(bilinear_kernel(4)[0] * 16, [1, 3, 3, 1])
    np.testing.assert_allclose(bilinear_kernel(6)[2] * 3, [1, 2, 3, 2, 1, 0], atol=1e-12)
    y = filled(Filler("bilinear"), (2, 3, 4, 4))
    np.testing.assert_allclose(y, np.broadcast_to(bilinear_kernel(4), y.shape), rtol=1e-6)
    with pytest.raises(NetError, match=r"bilinear.*\(2, 3, 4, 5\)"):
        filled(Filler("bilinear"), (2, 3, 4, 5))


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "positive_unitball", "xavier", "msra"])
def test_threads_and_odd_sizes(kind, threads):
    filler = Filler(kind, sparse=2 if kind == "gaussian" else -1)
    for shape in ((7, 3001), (1,), (5,), (0, 4)):
        threads(1)
        one = filled(filler, shape)
        assert np.isfinite(one).all()
        threads(3)
        assert filled(filler, shape).tobytes() == one.tobytes()


def test_messages():
    assert Filler.from_message(None) == Filler("constant", 0.0)
    message = caffe_pb2.FillerParameter(type="msra", variance_norm="AVERAGE")
    assert Filler.from_message(message) == Filler("msra", variance_norm="AVERAGE")
    message = caffe_pb2.FillerParameter(type="gaussian", mean=1.0, std=2.0, sparse=3)
    assert Filler.from_message(message) == Filler("gaussian", mean=1.0, std=2.0, sparse=3)
    with pytest.raises(NetError, match="expected one of constant, .*got 'gausian'"):
        Filler.from_message(caffe_pb2.FillerParameter(type="gausian"))
    with pytest.raises(NetError, match="only type 'gaussian'"):
        Filler.from_message(caffe_pb2.FillerParameter(type="uniform", sparse=3))
