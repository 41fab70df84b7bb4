"""Proposal and ROIPooling: py-faster-rcnn's anchors, proposals by hand, options, and both in a small detector."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice
from blobmem.devices import HOST
from blobmem.layers.region import anchor_boxes


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def inputs(**shapes):
    tops = " ".join(f'top: "{name}"' for name in shapes)
    dims = " ".join(f"shape {{ {' '.join(f'dim: {d}' for d in shape)} }}" for shape in shapes.values())
    return f'layer {{ name: "in" type: "Input" {tops} input_param {{ {dims} }} }}\n'


def test_the_anchors_of_py_faster_rcnn():
    # Matlab's, which count from 1, as Faster R-CNN published them
    expected = [
        [-83, -39, 100, 56], [-175, -87, 192, 104], [-359, -183, 376, 200],
        [-55, -55, 72, 72], [-119, -119, 136, 136], [-247, -247, 264, 264],
        [-35, -79, 52, 96], [-79, -167, 96, 184], [-167, -343, 184, 360],
    ]  # fmt: skip
    np.testing.assert_array_equal(anchor_boxes(16, [0.5, 1, 2], [8, 16, 32]), np.array(expected) - 1)


# ---------------------------------------------------------------- Proposal

# one anchor of 16 x 16, at 16-pixel steps: the boxes at the points of a plane tile the image of 32 x 48, but for one
# pixel too many at their ends, since decoding adds half the size to the centre and the end counts
TILES = "ratio: 1 scale: 1 min_size: 4"


def proposer(options=TILES, images=1, plane=(2, 3), anchors=1, device=HOST, info=3, described=None, tops=2, tail=""):
    text = inputs(
        prob=(images, 2 * anchors, *plane), delta=(images, 4 * anchors, *plane), info=(described or images, info)
    )
    text += 'layer { name: "p" type: "Proposal" bottom: "prob" bottom: "delta" bottom: "info" top: "rois"'
    text += ' top: "scores"' * (tops - 1)
    net = Net(f"{text} proposal_param {{ {options} }} }}\n{tail}", TEST, device=device, seed=1)
    net.blobs["info"].data[...] = [32, 48, 1, 1][:info]
    return net


def tile(row, column):
    return [16 * column, 16 * row, min(16 * column + 16, 47), min(16 * row + 16, 31)]


def proposals(net):
    net.run_forward()
    rois, scores = net.blobs["rois"].cpu_data(), net.blobs["scores"].cpu_data()
    assert rois.shape[1:] == (5,) and scores.shape == (len(rois), 1)
    return rois.tolist(), [round(value, 4) for value in scores.ravel().tolist()]


def test_best_first(device):
    net = proposer(device=device)
    net.blobs["prob"].data[0, 1] = [[0.3, 0.9, 0.1], [0.2, 0.8, 0.4]]
    rois, scores = proposals(net)
    order = [(0, 1), (1, 1), (1, 2), (0, 0), (1, 0), (0, 2)]
    assert rois == [[0, *tile(*place)] for place in order]
    assert scores == [0.9, 0.8, 0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize("options, order", [
    ("pre_nms_topn: 2", [(0, 1), (1, 1)]),
    ("post_nms_topn: 3", [(0, 1), (1, 1), (1, 2)]),
    ("pre_nms_topn: 0 post_nms_topn: 0", [(0, 1), (1, 1), (1, 2), (0, 0), (1, 0), (0, 2)]),
    ("min_size: 18", []),
    ("min_size: 17", [(0, 1), (0, 0)]),
], ids=["pre", "post", "all", "none", "whole"])  # fmt: skip
def test_limits(options, order, device):
    net = proposer(f"ratio: 1 scale: 1 {options}", device=device)
    net.blobs["prob"].data[0, 1] = [[0.3, 0.9, 0.1], [0.2, 0.8, 0.4]]
    rois, scores = proposals(net)
    assert rois == [[0, *tile(*place)] for place in order]
    assert len(scores) == len(order)


def test_deltas_clipping_and_suppression(device):
    net = proposer(device=device)
    net.blobs["prob"].data[0, 1] = [[0.3, 0.9, 0.1], [0.2, 0.8, 0.4]]
    deltas = net.blobs["delta"].data
    deltas[0, 0, 0, 1] = 0.25  # four pixels to the right
    deltas[0, 2:, 0, 1] = np.log(1.5), np.log(0.5)
    deltas[0, 0, 1, 2] = 0.5  # out over the edge
    deltas[0, 0, 1, 0] = 0.9  # nearly onto the next one, which is better
    rois, scores = proposals(net)
    assert scores == [0.9, 0.8, 0.4, 0.3, 0.1]
    # centre (24, 8) + (4, 0), 24 x 8
    np.testing.assert_allclose(rois[0], [0, 16, 4, 40, 12], rtol=1e-5)
    np.testing.assert_allclose(rois[1], [0, 16, 16, 32, 31], rtol=1e-5)
    np.testing.assert_allclose(rois[2], [0, 40, 16, 47, 31], rtol=1e-5)


def test_min_size_follows_the_scale(device):
    net = proposer("ratio: 1 scale: 1 min_size: 7", device=device)
    net.blobs["prob"].data[0, 1] = 0.5
    net.blobs["delta"].data[0, 2, 0, 0] = np.log(0.6)  # 9.6 wide, and one more for the end
    net.blobs["info"].data[0] = [32, 48, 1]
    assert len(proposals(net)[0]) == 6
    net.blobs["info"].data[0] = [32, 48, 1.6]
    assert len(proposals(net)[0]) == 5
    both = proposer("ratio: 1 scale: 1 min_size: 7", device=device, info=4)
    both.blobs["prob"].data[0, 1] = 0.5
    both.blobs["delta"].data[0, 2, 0, 0] = np.log(0.6)
    both.blobs["info"].data[0] = [32, 48, 1.6, 1]
    assert len(proposals(both)[0]) == 6
    both.blobs["info"].data[0] = [32, 48, 1, 1.6]
    assert len(proposals(both)[0]) == 5


def test_several_images_and_anchors(device):
    net = proposer("ratio: 1 scale: 1 scale: 2 min_size: 1 nms_thresh: 1 post_nms_topn: 2", images=2, anchors=2,
                   plane=(1, 1), device=device)  # fmt: skip
    net.blobs["prob"].data[:, :, 0, 0] = [[0.9, 0.9, 0.1, 0.6], [0, 0, 0.7, 0.2]]
    rois, scores = proposals(net)
    # the second anchor, 32 x 32 around the same centre, clipped
    assert rois == [[0, 0, 0, 24, 24], [0, 0, 0, 16, 16], [1, 0, 0, 16, 16], [1, 0, 0, 24, 24]]
    assert scores == [0.6, 0.1, 0.7, 0.2]


def test_the_defaults_are_nine_anchors():
    net = proposer("", anchors=9, tops=1)
    net.blobs["info"].data[0] = [600, 800, 1]
    net.blobs["prob"].data[0, 9:] = np.linspace(0, 1, 54).reshape(9, 2, 3)
    net.run_forward()
    # the last anchor at the last point: (-168, -344, 183, 359) moved by (32, 16)
    assert net.blobs["rois"].cpu_data()[0].tolist() == [0, 0, 0, 216, 376]


FASTER = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 2 dim: 3 } } }
    layer { name: "roi" type: "ROIPooling" bottom: "x" bottom: "rois" top: "roi"
      roi_pooling_param { pooled_h: 1 pooled_w: 1 spatial_scale: 0.0625 } }
    layer { name: "fc" type: "InnerProduct" bottom: "roi" top: "fc" inner_product_param { num_output: 3 } }
    layer { name: "relu" type: "ReLU" bottom: "fc" top: "fc" }
    layer { name: "prob_out" type: "Softmax" bottom: "fc" top: "prob_out" }"""


def test_regions_are_pooled_and_classified(device):
    net = proposer(TILES + " post_nms_topn: 4", device=device, tail=FASTER)
    net.blobs["x"].data[...] = np.arange(12).reshape(1, 2, 2, 3)
    net.params["fc"][0].data[...] = np.eye(3, 2)
    for count in (4, 2, 0, 3):
        # too small boxes are no proposals
        sizes = np.where(np.arange(6) < count, 0, -9).reshape(2, 3)
        net.blobs["delta"].data[0, 2:] = sizes
        net.blobs["prob"].data[0, 1] = np.linspace(0.9, 0.1, 6).reshape(2, 3)
        out = net.forward(blobs=["roi"])
        assert out["prob_out"].shape == (count, 3)
        # 16 k to 16 k + 16 (the next pixel counts), a sixteenth of it: columns k and k + 1
        places = [[np.pad(np.arange(12).reshape(2, 2, 3), ((0, 0), (0, 1), (0, 1)), constant_values=-1)[c, r : r + 2, q : q + 2].max()
                   for c in range(2)] for r, q in list(np.ndindex(2, 3))[:count]]  # fmt: skip
        np.testing.assert_array_equal(out["roi"].reshape(-1, 2), np.reshape(places, (-1, 2)))
        np.testing.assert_allclose(out["prob_out"].sum(1), 1, rtol=1e-5)


def test_nothing_is_computed_or_touched_without_arithmetic():
    net = proposer(device=SimulatedDevice(compute=False), tail=FASTER)
    net.run_forward()
    assert net.blobs["rois"].shape == (6, 5)
    assert net.blobs["prob_out"].shape == (6, 3)


@pytest.mark.parametrize("options, message", [
    ("ratio: 0", "ratio: expected values above 0"),
    ("scale: -1", "scale: expected values above 0"),
    ("feat_stride: 0", "feat_stride: expected 1 or more, got 0"),
    ("base_size: 0", "base_size: expected 1 or more, got 0"),
    ("nms_thresh: -1", "nms_thresh: expected 0 or more, got -1"),
    ("ratio: 1 ratio: 2 scale: 1", "bottom: expected 4 axes, with 2 channels for each of 2 anchors, got blob 'prob'"),
], ids=["ratio", "scale", "stride", "size", "threshold", "anchors"])  # fmt: skip
def test_wrong_proposal_options(options, message):
    with pytest.raises(NetError, match=rf"layer 'p' \(Proposal\), {message}"):
        proposer(options)


def test_images_that_were_not_described():
    with pytest.raises(NetError, match="expected height, width and scale of each of 1 images, got blob 'info'"):
        proposer(info=2)
    for one in (1, 2):
        with pytest.raises(NetError, match=f"expected height, width and scale of each of {one} images"):
            proposer(images=one, described=3 - one)
    net = proposer()
    net.blobs["info"].data[...] = 0
    with pytest.raises(NetError, match=r"layer 'p'.*image 0 has height, width and scale \[0.0, 0.0, 0.0\]"):
        net.run_forward()


# ---------------------------------------------------------------- ROIPooling


def pooler(options="pooled_h: 2 pooled_w: 2", phase=TRAIN, device=HOST, rois=(2, 5), x=(1, 1, 4, 6)):
    text = "force_backward: true\n" + inputs(x=x, rois=rois)
    text += 'layer { name: "r" type: "ROIPooling" bottom: "x" bottom: "rois" top: "y"'
    text += f" roi_pooling_param {{ {options} }} }}"
    return Net(text, phase, device=device, seed=1)


@pytest.mark.parametrize("rois", [(2, 5), (2, 5, 1, 1)], ids=["2 axes", "4 axes"])
def test_regions_by_hand(rois, device):
    net = pooler(device=device, rois=rois)
    net.blobs["x"].data[...] = np.arange(24).reshape(1, 1, 4, 6)
    net.blobs["rois"].data[...] = np.reshape([[0, 0, 0, 3, 2], [0, 4, 1, 9, 2]], rois)
    net.run_forward()
    # rows 0 to 2 make cells 0-1 and 1-2; of the second region's columns 4 to 9 only 4 and 5 are there
    assert net.blobs["y"].cpu_data()[:, 0].tolist() == [[[7, 9], [13, 15]], [[11, 0], [17, 0]]]
    net.blobs["y"].diff[...] = np.arange(1, 9).reshape(2, 1, 2, 2)
    net.run_backward()
    expected = np.zeros(24)
    expected[[7, 9, 13, 15, 11, 17]] = [1, 2, 3, 4, 5, 7]
    np.testing.assert_array_equal(net.blobs["x"].cpu_diff().ravel(), expected)


def test_a_region_of_an_image_that_is_not_there():
    net = pooler()
    net.blobs["rois"].data[1, 0] = 1
    with pytest.raises(ValueError, match="region 1 is .*it is an image, 0 to 0"):
        net.run_forward()


@pytest.mark.parametrize("case, message", [
    ({"options": "pooled_h: 2"}, "pooled_h: expected pooled_h and pooled_w of 1 or more"),
    ({"options": "pooled_h: 2 pooled_w: 2 spatial_scale: 0"}, "spatial_scale: expected above 0, got 0"),
    ({"rois": (2, 4)}, "bottom: expected regions of 5 values .*got blob 'rois'"),
    ({"x": (1, 4, 6)}, "bottom: expected 4 axes .*got blob 'x'"),
], ids=["grid", "scale", "regions", "axes"])  # fmt: skip
def test_wrong_pooling_options(case, message):
    with pytest.raises(NetError, match=rf"layer 'r' \(ROIPooling\), {message}"):
        pooler(**case)
