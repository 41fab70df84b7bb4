"""Reduction."""

import numpy as np
import pytest

from blobmem import NetError

TEXT = 'layer { name: "l" type: "Reduction" bottom: "x" top: "y" %s reduction_param { %s } }'
VALUES = {
    "SUM": np.sum,
    "ASUM": lambda x, axis: np.abs(x).sum(axis),
    "SUMSQ": lambda x, axis: (x**2).sum(axis),
    "MEAN": np.mean,
}


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("operation", VALUES)
def test_reduction(layer_net, device, operation, axis):
    net = layer_net(TEXT % ("", f"operation: {operation} axis: {axis} coeff: -1.5"), device=device, x=(2, 3, 4))
    net.forward()
    x = net.blobs["x"].cpu_data().astype(np.float64)
    expected = -1.5 * VALUES[operation](x, tuple(range(axis % 3, 3)))
    assert net.blobs["y"].shape == np.shape(expected)
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), expected, rtol=1e-5)


def test_the_default_is_the_sum_of_everything(layer_net):
    net = layer_net(TEXT % ("", ""), x=(2, 3, 4))
    net.forward()
    np.testing.assert_allclose(net.blobs["y"].cpu_data(), net.blobs["x"].cpu_data().sum(), rtol=1e-5)


def test_as_a_loss(layer_net):
    net = layer_net(TEXT % ("loss_weight: 3", "operation: SUMSQ coeff: 0.5"), x=(2, 3))
    x = net.blobs["x"].cpu_data()
    assert net.run_forward() == pytest.approx(1.5 * (x.astype(np.float64) ** 2).sum())
    net.run_backward()
    np.testing.assert_allclose(net.blobs["x"].cpu_diff(), 3 * x, rtol=1e-6)


@pytest.mark.parametrize("operation", VALUES)
def test_nothing_reduces_to_zero(layer_net, operation):
    net = layer_net(TEXT % ("", f"operation: {operation} axis: 1"), x=(2, 0, 3))
    net.blobs["y"].data[...] = 7
    net.forward()
    assert net.blobs["y"].cpu_data().tolist() == [0, 0]


def test_what_does_not_fit_is_said(layer_net):
    with pytest.raises(NetError, match="axis: expected an axis of"):
        layer_net(TEXT % ("", "axis: 3"), x=(2, 3, 4))
    with pytest.raises(NetError, match="top: expected another name"):
        layer_net((TEXT % ("", "")).replace('"y"', '"x"'), x=(2, 3, 4))
