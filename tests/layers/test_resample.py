"""Interp and Upsample: sizes from their options, values by hand, what they refuse."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError
from blobmem.devices import HOST


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def net_of(type_, options, *shapes, device=HOST, phase=TRAIN, top="y"):
    names = [f"x{i}" for i in range(len(shapes))]
    text = "force_backward: true\n"
    for name, shape in zip(names, shapes, strict=True):
        dims = " ".join(f"dim: {d}" for d in shape)
        text += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'
    bottoms = " ".join(f'bottom: "{name}"' for name in names)
    return Net(
        f'{text} layer {{ name: "l" type: "{type_}" {bottoms} top: "{top}" {options} }}', phase, device=device, seed=1
    )


def interp(options, *shapes, **kwargs):
    return net_of("Interp", f"interp_param {{ {options} }}", *(shapes or ((1, 1, 5, 9),)), **kwargs)


def upsample(options, *shapes, **kwargs):
    return net_of("Upsample", f"upsample_param {{ {options} }}", *(shapes or ((1, 1, 2, 3),)), **kwargs)


@pytest.mark.parametrize("options, size", [
    ("height: 7 width: 4", (7, 4)),
    ("zoom_factor: 8", (33, 65)),
    ("shrink_factor: 2", (3, 5)),
    ("shrink_factor: 3 zoom_factor: 2", (3, 5)),
    ("zoom_factor: 2 pad_beg: -1 pad_end: -2", (3, 11)),
    ("shrink_factor: 4 pad_beg: -1", (1, 2)),
    ("zoom_factor: 2 height: 3 width: 3", (9, 17)),
    ("zoom_factor: 2 shrink_factor: 2 height: 3 width: 4", (3, 4)),
], ids=["size", "zoom", "shrink", "both", "crop", "crop and shrink", "zoom first", "size before both"])  # fmt: skip
def test_sizes(options, size):
    net = interp(options)
    assert net.blobs["y"].shape == (1, 1, *size)
    net.run_forward()


def test_a_second_bottom_gives_the_size(device):
    net = interp("", (2, 3, 3, 3), (1, 7, 5, 9), device=device)
    net.blobs["x0"].data[...] = np.arange(9).reshape(3, 3)
    net.run_forward()
    assert net.blobs["y"].shape == (2, 3, 5, 9)
    expected = 3 * np.linspace(0, 2, 5)[:, None] + np.linspace(0, 2, 9)
    np.testing.assert_allclose(net.blobs["y"].cpu_data()[1, 2], expected, rtol=1e-6)
    net.blobs["x1"].reshape(1, 7, 1, 2)
    net.run_forward()
    assert net.blobs["y"].cpu_data()[0, 0].tolist() == [[0, 2]]
    net.run_backward()
    assert not net.blobs["x1"].cpu_diff().any()


def test_the_same_size_is_a_copy(device):
    net = interp("height: 5 width: 9", device=device)
    net.blobs["x0"].data[...] = np.arange(45).reshape(1, 1, 5, 9)
    net.blobs["x0"].data[0, 0, 0, 0] = np.inf
    net.run_forward()
    np.testing.assert_array_equal(net.blobs["y"].cpu_data(), net.blobs["x0"].cpu_data())
    net.blobs["y"].diff[...] = 3
    net.run_backward()
    assert (net.blobs["x0"].cpu_diff() == 3).all()


def test_cut_off_rows_and_columns_have_no_part(device):
    net = interp("height: 2 width: 3 pad_beg: -1 pad_end: -2", (1, 1, 5, 8), device=device)
    net.blobs["x0"].data[...] = np.arange(40).reshape(1, 1, 5, 8)
    net.run_forward()
    assert net.blobs["y"].cpu_data()[0, 0].tolist() == [[9, 11, 13], [17, 19, 21]]
    net.blobs["y"].diff[...] = 1
    net.run_backward()
    grad = net.blobs["x0"].cpu_diff()[0, 0]
    assert grad[1:3, 1:6].tolist() == [[1, 0, 1, 0, 1]] * 2
    assert grad.sum() == 6


@pytest.mark.parametrize("options, shapes, message", [
    ("", ((1, 1, 5, 9),), "height: expected height and width, a zoom_factor, a shrink_factor, or a second bottom"),
    ("height: 3", ((1, 1, 5, 9),), "height: expected both height and width"),
    ("height: 3 width: 0", ((1, 1, 5, 9),), "height: expected height and width of 1 or more"),
    ("zoom_factor: 0", ((1, 1, 5, 9),), "zoom_factor: expected 1 or more, got 0"),
    ("shrink_factor: -2", ((1, 1, 5, 9),), "shrink_factor: expected 1 or more, got -2"),
    ("zoom_factor: 2 pad_beg: 1", ((1, 1, 5, 9),), "pad_beg: expected 0, or less"),
    ("zoom_factor: 2 pad_end: -5", ((1, 1, 5, 9),), "pad_beg: expected pad_beg and pad_end that leave some"),
    ("zoom_factor: 2", ((5, 9),), "bottom: expected 4 axes"),
    ("", ((1, 1, 5, 9), (3, 4)), "bottom: expected 4 axes .*got blob 'x1'"),
], ids=["none", "height", "zero", "zoom", "shrink", "pad", "nothing left", "axes", "reference"])  # fmt: skip
def test_wrong_interp_options(options, shapes, message):
    with pytest.raises(NetError, match=rf"layer 'l' \(Interp\), {message}"):
        interp(options, *shapes)


@pytest.mark.parametrize("make", [interp, upsample], ids=["Interp", "Upsample"])
def test_not_in_place(make):
    with pytest.raises(NetError, match="top: expected another name"):
        make("", top="x0")


# ---------------------------------------------------------------- Upsample


@pytest.mark.parametrize("options, rows, columns", [
    ("scale: 2", [0, 0, 1, 1], [0, 0, 1, 1, 2, 2]),
    ("scale_h: 1 scale_w: 3", [0, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ("scale: 2 pad_out_h: true", [0, 0, 1], [0, 0, 1, 1, 2, 2]),
    ("scale: 2 pad_out_w: true", [0, 0, 1, 1], [0, 0, 1, 1, 2]),
    ("upsample_h: 3 upsample_w: 6", [0, 0, 1], [0, 0, 1, 1, 2, 2]),
    ("scale: 1", [0, 1], [0, 1, 2]),
], ids=["scale", "scales", "pad_out_h", "pad_out_w", "size", "one"])  # fmt: skip
def test_repetition(options, rows, columns, device):
    net = upsample(options, device=device)
    x = np.array([[1, 2, 3], [4, 5, 6]])
    net.blobs["x0"].data[0, 0] = x
    net.run_forward()
    np.testing.assert_array_equal(net.blobs["y"].cpu_data()[0, 0], x[rows][:, columns])


SEGNET = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: %d dim: %d } } }
    layer { name: "pool" type: "Pooling" bottom: "x" top: "pool" top: "mask" pooling_param { kernel_size: 2 stride: 2 } }
    layer { name: "up" type: "Upsample" bottom: "pool" bottom: "mask" top: "up" upsample_param { %s } }"""


@pytest.mark.parametrize("size, options", [
    ((4, 6), "scale: 2"), ((5, 7), "scale: 2 pad_out_h: true pad_out_w: true"), ((5, 7), "upsample_h: 5 upsample_w: 7"),
    ((5, 6), "scale_h: 2 scale_w: 2 pad_out_h: true"), ((5, 7), "scale: 9 upsample_h: 5 upsample_w: 7"),
], ids=["even", "odd", "size", "one odd", "size before scale"])  # fmt: skip
def test_maxima_go_back_to_where_they_were(size, options, device):
    net = Net(SEGNET % (*size, options), TEST, device=device, seed=1)
    x = np.random.default_rng(0).permutation(6 * size[0] * size[1]).reshape(2, 3, *size) + 1
    net.blobs["x"].data[...] = x
    net.run_forward()
    up, pooled = net.blobs["up"].cpu_data(), net.blobs["pool"].cpu_data()
    assert up.shape == x.shape
    assert np.isin(up, [0, *pooled.ravel()]).all()
    np.testing.assert_array_equal(np.where(np.isin(x, pooled), x, 0), up)


def test_a_size_that_the_pooling_did_not_have(device):
    net = Net(SEGNET % (5, 7, "upsample_h: 2 upsample_w: 2"), TEST, device=device, seed=1)
    net.blobs["x"].data[...] = np.arange(210).reshape(2, 3, 5, 7)
    with pytest.raises(
        ValueError, match="mask value .* is no place in a plane of 2 x 2: give the size of what was pooled"
    ):
        net.run_forward()
        device.synchronize()  # where a GPU tells


@pytest.mark.parametrize("options, shapes, message", [
    ("", ((1, 1, 2, 3),), "scale: expected either scale, or scale_h and scale_w, or upsample_h and upsample_w"),
    ("scale: 2 scale_h: 2 scale_w: 2", ((1, 1, 2, 3),), "scale: expected either scale"),
    ("scale_h: 2", ((1, 1, 2, 3),), "scale_h: expected both scale_h and scale_w"),
    ("upsample_w: 2", ((1, 1, 2, 3),), "upsample_h: expected both upsample_h and upsample_w"),
    ("upsample_h: 0 upsample_w: 2", ((1, 1, 2, 3),), "upsample_h: expected upsample_h and upsample_w of 1 or more"),
    ("scale: 0", ((1, 1, 2, 3),), "scale: expected 1 or more"),
    ("scale: 3 pad_out_w: true", ((1, 1, 2, 3),), "pad_out_w: expected a scale of 2.*got 3"),
    ("scale: 2", ((2, 3),), "bottom: expected 4 axes"),
    ("scale: 2", ((1, 1, 2, 3), (1, 1, 3, 2)), "bottom: expected a mask of the shape of blob 'x0'"),
], ids=["none", "both", "scale_h", "upsample_w", "zero", "scale", "pad", "axes", "mask"])  # fmt: skip
def test_wrong_upsample_options(options, shapes, message):
    with pytest.raises(NetError, match=rf"layer 'l' \(Upsample\), {message}"):
        upsample(options, *shapes)
