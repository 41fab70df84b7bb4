"""Coordinates of blobs over each other, beside where the pixels of nets that run really go."""

import numpy as np
import pytest

from blobmem import TEST, Net, NetSpec
from blobmem import layers as L
from blobmem import params as P
from blobmem.coord_map import (
    AxisMismatchException,
    CropError,
    NoMapError,
    UndefinedMapException,
    compose,
    coord_map,
    coord_map_from_to,
    crop,
    inverse,
)
from blobmem.errors import NetError


def image(*dims):
    return L.Input(shape={"dim": [1, 1, *dims]})


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (L.Convolution(kernel_size=3), (1, 1, -1)),
        (L.Convolution(kernel_size=3, pad=1, stride=2), (1, 0.5, 0)),
        (L.Convolution(convolution_param={"kernel_size": 3, "dilation": 2, "axis": 2}), (2, 1, -2)),
        (L.Deconvolution(kernel_size=4, stride=2, pad=1), (1, 2, 0.5)),
        (L.Pooling(kernel_size=2, stride=2), (1, 0.5, -0.25)),
        (L.Pooling(pooling_param={"kernel_size": 3}), (1, 1, -1)),
        (L.Crop(axis=3, offset=5), (2, 1, -5)),
        (L.Crop(), (1, 1, 0)),
        (L.ReLU(), (None, 1, 0)),
    ],
    ids=["conv", "pad", "dilation", "deconv", "pool", "pool-message", "crop", "crop-default", "relu"],
)
def test_maps_of_layers(top, expected):
    assert coord_map(top.fn) == expected


def test_maps_compose_and_turn_round():
    there = (1, np.array([0.5]), np.array([-0.25]))
    assert compose(there, inverse(there)) == (1, 1, 0) == compose(inverse(there), there)
    assert compose((None, 1, 0), there) == there == compose(there, (None, 1, 0))
    with pytest.raises(AxisMismatchException, match="axis 1 and from axis 2"):
        compose(there, (2, 1, 0))


def test_a_pixel_goes_where_the_map_says():
    n = NetSpec()
    n.data = image(17, 17)
    n.conv = L.Convolution(n.data, num_output=1, kernel_size=3, pad=1, weight_filler={"type": "constant", "value": 1})
    n.pool = L.Pooling(n.conv, pool=P.Pooling.AVE, kernel_size=1, stride=2)
    axis, scale, shift = coord_map_from_to(n.pool, n.data)
    net = Net(n.to_proto(), TEST)
    values = np.zeros((1, 1, 17, 17), dtype=np.float32)
    values[0, 0, 6, 10] = 1
    mass = net.forward(data=values)["pool"][0, 0]
    centre = [(mass.sum(1 - side) * np.arange(9)).sum() / mass.sum() for side in (0, 1)]
    assert axis == 1
    np.testing.assert_allclose(np.array(centre) * scale + shift, [6, 10])


def test_tops_that_branched_off_long_before():
    data = image(40, 40)
    trunk = L.Convolution(data, num_output=1, kernel_size=3)
    coarse = L.Deconvolution(L.Pooling(trunk, kernel_size=2, stride=2), num_output=1, kernel_size=4, stride=2)
    fine = L.ReLU(L.Eltwise(trunk, L.ReLU(trunk)))
    assert coord_map_from_to(coarse, fine) == (1, 1, -1)
    assert coord_map_from_to(fine, coarse) == (1, 1, 1)


def test_only_what_a_crop_cuts_counts():
    data, other = image(9, 9), image(5, 5)
    cut = L.Crop(data, other, axis=2, offset=[1, 3])
    axis, scale, shift = coord_map_from_to(cut, data)
    assert (axis, scale) == (1, 1) and list(shift) == [1, 3]
    with pytest.raises(NoMapError):
        coord_map_from_to(cut, other)


def test_a_crop_aligns():
    n = NetSpec()
    n.data = image(30, 30)
    n.pool = L.Pooling(L.Convolution(n.data, num_output=1, kernel_size=3, pad=10), kernel_size=2, stride=2)
    n.up = L.Deconvolution(n.pool, num_output=1, kernel_size=4, stride=2)
    n.score = crop(n.up, n.data)
    assert n.to_proto().layer[-1].crop_param.offset == [10]
    assert n.score.fn.params == {"crop_param": {"axis": 2, "offset": [10]}}
    assert Net(n.to_proto(), TEST).blobs["score"].shape == (1, 1, 30, 30)
    assert crop(L.ReLU(n.data), n.data).fn.params == {"crop_param": {"axis": 2, "offset": [0]}}


def test_offsets_by_axis():
    data = image(30, 30)
    top = L.Convolution(data, num_output=1, kernel_size=1, pad=[3, 4])
    assert crop(top, data).fn.params == {"crop_param": {"axis": 2, "offset": [3, 4]}}


def test_what_cannot_be_cropped():
    data = image(30, 30)
    half = L.Pooling(data, kernel_size=2, stride=2)
    with pytest.raises(CropError, match="tops of one scale"):
        crop(half, data)
    with pytest.raises(AssertionError, match="its offset there would be"):
        crop(L.Convolution(data, num_output=1, kernel_size=3), data)
    with pytest.raises(CropError, match="whole pixels"):
        crop(L.Convolution(data, num_output=1, kernel_size=2, pad=1), data)


def test_layers_without_a_map():
    with pytest.raises(UndefinedMapException, match="InnerProduct layers have no map"):
        coord_map(L.InnerProduct().fn)
    data = image(30, 30)
    with pytest.raises(RuntimeError, match="connected by layers"):
        coord_map_from_to(L.InnerProduct(data, num_output=1), data)
    with pytest.raises(CropError, match="kernel_h: expected kernel_size, stride and pad"):
        coord_map(L.Pooling(kernel_h=2, kernel_w=3).fn)
    with pytest.raises(NetError, match="kernel_size: expected one"):
        coord_map(L.Pooling(global_pooling=True).fn)
