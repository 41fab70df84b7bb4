"""PriorBox and DetectionOutput: SSD's own numbers, found boxes by hand, options, and a small SSD from end to end."""

import math

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice
from blobmem.devices import HOST


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def inputs(**shapes):
    tops = " ".join(f'top: "{name}"' for name in shapes)
    dims = " ".join(f"shape {{ {' '.join(f'dim: {d}' for d in shape)} }}" for shape in shapes.values())
    return f'layer {{ name: "in" type: "Input" {tops} input_param {{ {dims} }} }}\n'


# ---------------------------------------------------------------- PriorBox


def priors(options, plane=(2, 3), image=(20, 60), device=HOST):
    text = inputs(x=(1, 4, *plane), image=(1, 3, *image))
    text += (
        f'layer {{ name: "p" type: "PriorBox" bottom: "x" bottom: "image" top: "p" prior_box_param {{ {options} }} }}'
    )
    net = Net(text, TEST, device=device, seed=1)
    net.run_forward()
    return net


def corners(net):
    """The boxes of each point, in pixels of an image of 20 x 60."""
    return net.blobs["p"].cpu_data()[0, 0].reshape(-1, 4) * [60, 20, 60, 20]


def square(x, y, wide, tall=None):
    tall = wide if tall is None else tall
    return [x - wide / 2, y - tall / 2, x + wide / 2, y + tall / 2]


def test_a_square_at_each_point(device):
    net = priors("min_size: 4", device=device)
    assert net.blobs["p"].shape == (1, 2, 24)
    expected = [square(x, y, 4) for y in (5, 15) for x in (10, 30, 50)]
    np.testing.assert_allclose(corners(net), expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(net.blobs["p"].cpu_data()[0, 1], 0.1, rtol=1e-6)


def test_sizes_and_ratios_in_ssds_order():
    net = priors("min_size: 4 min_size: 6 max_size: 9 max_size: 24 aspect_ratio: 2 aspect_ratio: 1 aspect_ratio: 0.5 "
                 "variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.3")  # fmt: skip
    root = math.sqrt(2)
    expected = []
    for low, high in ((4, 9), (6, 24)):
        expected += [square(10, 5, low), square(10, 5, math.sqrt(low * high))]
        expected += [square(10, 5, low * root, low / root), square(10, 5, low / root, low * root)]
    np.testing.assert_allclose(corners(net)[:8], expected, rtol=1e-5, atol=1e-4)
    assert net.blobs["p"].shape == (1, 2, 2 * 3 * 8 * 4)
    np.testing.assert_allclose(net.blobs["p"].cpu_data()[0, 1].reshape(-1, 4)[13], [0.1, 0.1, 0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize("options, expected", [
    ("flip: false aspect_ratio: 4", [square(10, 5, 4), square(10, 5, 8, 2)]),
    ("offset: 0", [square(0, 0, 4)]),
    ("step: 8", [square(4, 4, 4)]),
    ("step_h: 2 step_w: 6", [square(3, 1, 4)]),
    ("clip: true offset: 0", [[0, 0, 2, 2]]),
    ("img_size: 120", [square(10, 5, 2, 2 / 3)]),
    ("img_h: 40 img_w: 60", [square(10, 5, 4, 2)]),
], ids=["no flip", "offset", "step", "steps", "clip", "img_size", "img_h"])  # fmt: skip
def test_prior_options(options, expected):
    net = priors("min_size: 4 " + options)
    np.testing.assert_allclose(corners(net)[: len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_fractions_of_pixels_are_cut_off_as_ssd_does():
    np.testing.assert_allclose(corners(priors("min_size: 4.8 max_size: 9.9"))[:2], [square(10, 5, 4), square(10, 5, 6)],
                               rtol=1e-5)  # fmt: skip


def test_ssd300_conv4_3():
    """The first and the last boxes of SSD300's finest layer, from its published settings."""
    text = (
        inputs(x=(1, 512, 38, 38), data=(1, 3, 300, 300))
        + """
        layer { name: "p" type: "PriorBox" bottom: "x" bottom: "data" top: "p" prior_box_param {
          min_size: 30 max_size: 60 aspect_ratio: 2 flip: true clip: false step: 8 offset: 0.5
          variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 } }"""
    )
    net = Net(text, TEST, seed=1)
    net.run_forward()
    boxes = net.blobs["p"].cpu_data()[0, 0].reshape(38, 38, 4, 4) * 300
    np.testing.assert_allclose(boxes[0, 0, 0], [-11, -11, 19, 19], rtol=1e-5)
    np.testing.assert_allclose(boxes[37, 37, 1], square(300, 300, math.sqrt(1800)), rtol=1e-5)
    np.testing.assert_allclose(boxes[0, 2, 3], square(20, 4, 30 / math.sqrt(2), 30 * math.sqrt(2)), rtol=1e-4)


def test_priors_are_made_once_for_each_shape(device):
    net = priors("min_size: 4", device=device)
    net.blobs["p"].data[...] = 7
    net.run_forward()
    assert (net.blobs["p"].cpu_data() == 7).all()
    net.blobs["x"].reshape(1, 4, 1, 1)
    net.run_forward()
    np.testing.assert_allclose(corners(net), [square(30, 10, 4)], rtol=1e-5)


@pytest.mark.parametrize("options, message", [
    ("", "min_size: expected values of 1 or more, got none"),
    ("min_size: 0.5", "min_size: expected values of 1 or more"),
    ("min_size: 4 max_size: 4", "max_size: expected none, or 1 values, each above its min_size"),
    ("min_size: 4 max_size: 8 max_size: 9", "max_size: expected none, or 1 values"),
    ("min_size: 4 aspect_ratio: 0", "aspect_ratio: expected values above 0"),
    ("min_size: 4 variance: 1 variance: 2", "variance: expected 1 or 4 values"),
    ("min_size: 4 variance: -1", "variance: expected 1 or 4 values above 0"),
    ("min_size: 4 step: 8 step_h: 8 step_w: 8", "step: expected either step, or both step_h and step_w"),
    ("min_size: 4 step_h: 8", "step: expected either step, or both step_h and step_w"),
    ("min_size: 4 step: 0", "step: expected above 0"),
    ("min_size: 4 img_h: 0 img_w: 9", "img_size: expected above 0"),
], ids=["none", "small", "max_size", "max_sizes", "ratio", "variances", "variance", "steps", "step_h", "step", "image"])  # fmt: skip
def test_wrong_prior_options(options, message):
    with pytest.raises(NetError, match=rf"layer 'p' \(PriorBox\), {message}"):
        priors(options)


# ---------------------------------------------------------------- DetectionOutput

# four boxes: the second overlaps with the first (intersection over union 0.6), the others are apart
BOXES = np.array([[0.0, 0.0, 0.4, 0.4], [0.1, 0.0, 0.5, 0.4], [0.6, 0.6, 0.9, 0.9], [0.0, 0.6, 0.2, 0.8]])
OPTIONS = "num_classes: 3 nms_param { nms_threshold: 0.5 } code_type: CENTER_SIZE"


def detector(options=OPTIONS, images=1, device=HOST, classes=3, places=1, rows=2, tail="", extra=""):
    text = inputs(loc=(images, 16 * places), conf=(images, 4 * classes), prior=(1, rows, 16), image=(images, 3, 8, 8))
    text += f'layer {{ name: "d" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" {extra} top: "d"'
    text += f" detection_output_param {{ {options} }} }}\n{tail}"
    net = Net(text, TEST, device=device, seed=1)
    net.blobs["prior"].data[0, 0] = BOXES.ravel()
    net.blobs["prior"].data[0, 1:] = 0.1
    return net


SCORES = [[0.05, 0.9, 0.0], [0.1, 0.8, 0.3], [0.2, 0.1, 0.7], [0.9, 0.05, 0.6]]


def found(net, scores=None):
    """Rows of [image, class, index of the box, score]."""
    if scores is not None:
        net.blobs["conf"].data[...] = np.reshape(scores, net.blobs["conf"].shape)
    net.run_forward()
    rows = net.blobs["d"].cpu_data()
    assert rows.shape[:2] == (1, 1) and rows.shape[3] == 7
    result = []
    for image, label, score, *box in rows[0, 0].tolist():
        index = np.abs(BOXES - box).sum(1).argmin()
        np.testing.assert_allclose(box, BOXES[index], atol=1e-6)
        result.append((int(image), int(label), int(index), round(score, 3)))
    return result


def test_what_is_found(device):
    net = detector(device=device)
    # class 1: box 1 overlaps with box 0; class 2 by score; the background is none
    expected = [(0, 1, 0, 0.9), (0, 1, 2, 0.1), (0, 1, 3, 0.05), (0, 2, 2, 0.7), (0, 2, 3, 0.6), (0, 2, 1, 0.3)]
    # box 0 of class 2, at 0, overlaps with box 1
    assert found(net, SCORES) == expected
    assert net.outputs == ["d", "image"]


@pytest.mark.parametrize("options, kept", [
    ("confidence_threshold: 0.5", [(1, 0), (2, 2), (2, 3)]),
    ("confidence_threshold: 0.6", [(1, 0), (2, 2)]),
    ("confidence_threshold: 0.65", [(1, 0), (2, 2)]),
    ("confidence_threshold: 0.05 keep_top_k: 2", [(1, 0), (2, 2)]),
    ("confidence_threshold: 0.25 keep_top_k: 0", []),
    ("confidence_threshold: 0.25 background_label_id: 1", [(0, 3), (2, 2), (2, 3), (2, 1)]),
    ("confidence_threshold: 0.25 background_label_id: -1", [(0, 3), (1, 0), (2, 2), (2, 3), (2, 1)]),
    ("confidence_threshold: 0.25 nms_param { nms_threshold: 0.65 }", [(1, 0), (1, 1), (2, 2), (2, 3), (2, 1)]),
    ("confidence_threshold: 0.25 nms_param { nms_threshold: 0.65 eta: 0.9 }", [(1, 0), (2, 2), (2, 3), (2, 1)]),
    ("nms_param { top_k: 1 }", [(1, 0), (2, 2)]),
    ("nms_param { top_k: 2 }", [(1, 0), (2, 2), (2, 3)]),
    ("nms_param { top_k: 0 }", []),
    ("confidence_threshold: 0.25 nms_param { top_k: -1 }", [(1, 0), (2, 2), (2, 3), (2, 1)]),
], ids=range(13))  # fmt: skip
def test_detection_options(options, kept, device):
    usual = "" if "nms_param" in options else "nms_param { nms_threshold: 0.5 } "
    net = detector("num_classes: 3 code_type: CENTER_SIZE " + usual + options, device=device)
    if not kept:
        net.blobs["conf"].data[...] = np.reshape(SCORES, (1, 12))
        net.run_forward()
        assert net.blobs["d"].cpu_data().tolist() == [[[[0] + [-1] * 6]]]
    else:
        assert [row[1:3] for row in found(net, SCORES)] == kept


def test_images_and_none_of_them(device):
    net = detector(OPTIONS + " confidence_threshold: 0.5", images=3, device=device)
    scores = np.zeros((3, 4, 3))
    scores[1, 2, 1], scores[2, 0, 2], scores[2, 1, 2] = 0.8, 0.7, 0.9
    # rows only of images in which something was found ...
    assert found(net, scores) == [(1, 1, 2, 0.8), (2, 2, 1, 0.9)]
    # ... unless there is nothing at all
    net.blobs["conf"].data[...] = 0
    net.run_forward()
    assert net.blobs["d"].cpu_data()[0, 0].tolist() == [[n] + [-1] * 6 for n in range(3)]
    assert found(net, scores) == [(1, 1, 2, 0.8), (2, 2, 1, 0.9)]


def test_what_follows_takes_the_shape_of_what_was_found(device):
    tail = """
        layer { name: "s" type: "Slice" bottom: "d" top: "who" top: "box" slice_param { axis: 3 slice_point: 3 } }
        layer { name: "f" type: "Flatten" bottom: "box" top: "f" flatten_param { end_axis: 2 } }"""
    net = detector(OPTIONS + " confidence_threshold: 0.5", device=device, tail=tail)
    for count in (2, 1, 3, 1):
        scores = np.zeros((4, 3))
        scores[[0, 2, 3][:count], 1] = 0.9
        net.blobs["conf"].data[...] = scores.reshape(1, 12)
        net.run_forward()
        assert net.blobs["f"].shape == (1, count, 4)
        np.testing.assert_allclose(net.blobs["f"].cpu_data()[0], BOXES[[0, 2, 3][:count]], atol=1e-6)


def test_boxes_for_each_class(device):
    net = detector("num_classes: 3 share_location: false code_type: CORNER confidence_threshold: 0.5", places=3,
                   device=device)  # fmt: skip
    offsets = np.zeros((4, 3, 4))
    offsets[:, 1] += [1, 2, 3, 4]
    net.blobs["loc"].data[...] = offsets.reshape(1, 48)
    scores = np.zeros((4, 3))
    scores[2, 1], scores[3, 2] = 0.9, 0.8
    net.blobs["conf"].data[...] = scores.reshape(1, 12)
    net.run_forward()
    expected = [[0, 1, 0.9, 0.7, 0.8, 1.2, 1.3], [0, 2, 0.8, 0, 0.6, 0.2, 0.8]]
    np.testing.assert_allclose(net.blobs["d"].cpu_data()[0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("in_target", [False, True], ids=["variances", "in target"])
@pytest.mark.parametrize("code, expected", [
    ("CORNER", [0.7, 0.8, 1.2, 1.3]),
    ("CORNER_SIZE", [0.63, 0.66, 0.99, 1.02]),
    ("CENTER_SIZE", [0.78 - 0.15 * math.exp(0.3), 0.81 - 0.15 * math.exp(0.4), 0.78 + 0.15 * math.exp(0.3), 0.81 + 0.15 * math.exp(0.4)]),
])  # fmt: skip
def test_codes(code, expected, in_target):
    options = f"num_classes: 3 code_type: {code} confidence_threshold: 0.5 variance_encoded_in_target: "
    net = detector(options + ("true" if in_target else "false"), rows=1 if in_target else 2)
    net.blobs["loc"].data.reshape(4, 4)[2] = np.array([1, 2, 3, 4]) * (0.1 if in_target else 1)
    net.blobs["conf"].data.reshape(4, 3)[2, 1] = 0.9
    net.run_forward()
    np.testing.assert_allclose(net.blobs["d"].cpu_data()[0, 0, 0, 3:], expected, rtol=1e-5)


def test_the_fourth_bottom_and_what_only_ssds_evaluation_reads():
    options = (
        OPTIONS
        + """ confidence_threshold: 0.65 visualize: true visualize_threshold: 0.6 save_file: "a.avi"
        save_output_param { output_directory: "/nowhere" output_format: "VOC" resize_param { height: 3 width: 4 } }"""
    )
    assert [row[1:3] for row in found(detector(options, extra='bottom: "image"'), SCORES)] == [(1, 0), (2, 2)]


def test_nothing_is_computed_or_touched_without_arithmetic():
    net = detector(device=SimulatedDevice(compute=False))
    net.run_forward()
    assert net.blobs["d"].shape == (1, 1, 12, 7)


def test_steady_passes_allocate_nothing_on_the_device():
    device = SimulatedDevice()
    net = detector(device=device)
    for _ in range(2):
        found(net, SCORES)
    before = device.statistics.allocator_calls
    found(net, SCORES)
    assert device.statistics.allocator_calls == before


def test_no_gradient_passes_it():
    text = (
        inputs(prior=(1, 2, 16), x=(1, 3))
        + """force_backward: true
        layer { name: "loc" type: "InnerProduct" bottom: "x" top: "loc" inner_product_param { num_output: 16 } }
        layer { name: "conf" type: "InnerProduct" bottom: "x" top: "conf" inner_product_param { num_output: 12 } }
        layer { name: "d" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "d"
          detection_output_param { num_classes: 3 } }"""
    )
    net = Net(text, TRAIN, seed=1)
    net.run_forward()
    net.blobs["d"].diff[...] = 1
    net.run_backward()
    assert not net.params["loc"][0].cpu_diff().any()


@pytest.mark.parametrize("options, message", [
    ("", "num_classes: expected 1 or more, got 0"),
    ("num_classes: 3 nms_param { nms_threshold: -1 }", "nms_threshold: expected 0 or more, got -1"),
    ("num_classes: 3 nms_param { eta: 0 }", "eta: expected above 0, up to 1, got 0"),
    ("num_classes: 3 nms_param { eta: 1.5 }", "eta: expected above 0, up to 1, got 1.5"),
    ("num_classes: 4", "bottom: expected 1 x 16 values for blob 'prior' .*, got blob 'conf'"),
    ("num_classes: 3 share_location: false", "bottom: expected 1 x 48 values for blob 'prior' .*, got blob 'loc'"),
], ids=["classes", "threshold", "eta", "large eta", "scores", "places"])  # fmt: skip
def test_wrong_detection_options(options, message):
    with pytest.raises(NetError, match=rf"layer 'd' \(DetectionOutput\), {message}"):
        detector(options)


def test_priors_without_variances_or_area():
    with pytest.raises(NetError, match="bottom: expected prior boxes of shape 1 x 2 x boxes"):
        detector(rows=1)
    net = detector()
    net.blobs["prior"].data[0, 0, 6] = 0.1
    with pytest.raises(
        NetError, match="layer 'd'.*prior box 1, .* has no area, which code type CENTER_SIZE divides by"
    ):
        net.run_forward()


# ---------------------------------------------------------------- a small SSD


def head(name, bottom, outputs):
    return f"""
        layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}"
          convolution_param {{ num_output: {outputs} kernel_size: 1 }} }}
        layer {{ name: "{name}_perm" type: "Permute" bottom: "{name}" top: "{name}_perm"
          permute_param {{ order: 0 order: 2 order: 3 order: 1 }} }}
        layer {{ name: "{name}_flat" type: "Flatten" bottom: "{name}_perm" top: "{name}_flat" }}"""


def small_ssd():
    text = inputs(data=(2, 2, 8, 8))
    text += """
        layer { name: "pool1" type: "Pooling" bottom: "data" top: "pool1" pooling_param { pool: MAX kernel_size: 4 stride: 4 } }
        layer { name: "pool2" type: "Pooling" bottom: "pool1" top: "pool2" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }"""
    for index, size in ((1, 4), (2, 8)):
        text += head(f"loc{index}", f"pool{index}", 4) + head(f"conf{index}", f"pool{index}", 3)
        text += f"""
        layer {{ name: "prior{index}" type: "PriorBox" bottom: "pool{index}" bottom: "data" top: "prior{index}"
          prior_box_param {{ min_size: {size} variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 }} }}"""
    for name, suffix, axis in (("loc", "_flat", 1), ("conf", "_flat", 1), ("prior", "", 2)):
        text += f"""
        layer {{ name: "{name}" type: "Concat" bottom: "{name}1{suffix}" bottom: "{name}2{suffix}" top: "{name}"
          concat_param {{ axis: {axis} }} }}"""
    return (
        text
        + """
        layer { name: "conf_reshape" type: "Reshape" bottom: "conf" top: "conf_reshape"
          reshape_param { shape { dim: 0 dim: -1 dim: 3 } } }
        layer { name: "softmax" type: "Softmax" bottom: "conf_reshape" top: "softmax" softmax_param { axis: 2 } }
        layer { name: "conf_flat" type: "Flatten" bottom: "softmax" top: "conf_flat" }
        layer { name: "out" type: "DetectionOutput" bottom: "loc" bottom: "conf_flat" bottom: "prior" top: "out"
          detection_output_param { num_classes: 3 code_type: CENTER_SIZE keep_top_k: 10 confidence_threshold: 0.3
            nms_param { nms_threshold: 0.45 top_k: 100 } } }"""
    )


def test_a_small_ssd(device):
    """Class c scores by channel c - 1: 10 where it is lit on the fine grid; the coarse one finds background only."""
    net = Net(small_ssd(), TEST, device=device, seed=1)
    for name in ("conf1", "conf2", "loc1", "loc2"):
        for blob in net.params[name]:
            blob.data[...] = 0
    net.params["conf1"][0].data[1, 0] = net.params["conf1"][0].data[2, 1] = 10
    net.params["conf1"][1].data[0] = net.params["conf2"][1].data[0] = 5
    net.params["loc1"][1].data[...] = [5, 0, 0, 0]  # half a box to the right: variance 0.1, 4 wide
    data = np.zeros((2, 2, 8, 8))
    data[0, 0, 1, 6] = 1  # class 1 at the upper right
    data[0, 1, 7, 2] = 0.5  # class 2 at the lower left, as bright as the background
    data[1, 1, 5, 5] = 1  # class 2 at the lower right
    net.blobs["data"].data[...] = data
    out = net.forward()["out"][0, 0]
    strong, even = math.exp(5) / (math.exp(5) + 1 + math.exp(-5)), 1 / (2 + math.exp(-5))
    expected = [
        [0, 1, strong, 0.75, 0, 1.25, 0.5],
        [0, 2, even, 0.25, 0.5, 0.75, 1],
        [1, 2, strong, 0.75, 0.5, 1.25, 1],
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    net.blobs["data"].data[...] = 0
    assert net.forward()["out"][0, 0].tolist() == [[n] + [-1] * 6 for n in range(2)]
