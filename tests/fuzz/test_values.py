"""Labels, indices, regions and masks that are none: an error that names the layer, before anything is read or written.

On a CUDA device it comes when the values are waited for, and what was computed from them is anything."""

import contextlib

import numpy as np
import pytest
from cuda_devices import DEVICES
from strangers import success_or_error

from blobmem import TRAIN, Net, NetError

ABSURD = {
    "-1": -1,
    "count": 5,
    "2^31": 2**31,
    "2^63": 2.0**63,
    "large": 1e30,
    "nan": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
}


def inputs(**shapes):
    shape = "shape {{ {} }}"
    return "".join(
        f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ '
        + shape.format(" ".join(f"dim: {dim}" for dim in dims))
        + " } }\n"
        for name, dims in shapes.items()
    )


def layer(kind, options="", bottoms="xi", tops="t"):
    wiring = "".join(f'bottom: "{name}" ' for name in bottoms) + "".join(f'top: "{name}" ' for name in tops)
    return f'force_backward: true layer {{ name: "culprit" type: "{kind}" {wiring} {options} }}'


CLASSES, ONE = inputs(x=(4, 5), i=(4,)), {"i": 1}
LABELLED = {
    "SoftmaxWithLoss": CLASSES + layer("SoftmaxWithLoss"),
    "SoftmaxWithLoss of planes": inputs(x=(2, 5, 3, 2), i=(2, 3, 2)) + layer("SoftmaxWithLoss", tops="tp"),
    "Accuracy": CLASSES + layer("Accuracy", tops="tp"),
    "InfogainLoss": inputs(x=(4, 5), i=(4,), h=(5, 5)) + layer("InfogainLoss", bottoms="xih"),
    "MultinomialLogisticLoss": CLASSES + layer("MultinomialLogisticLoss"),
    "HingeLoss": CLASSES + layer("HingeLoss"),
    "HingeLoss, L2": CLASSES + layer("HingeLoss", "hinge_loss_param { norm: L2 }"),
    "Embed": inputs(i=(4,)) + layer("Embed", "embed_param { input_dim: 5 num_output: 3 }", bottoms="i"),
    "BatchReindex": inputs(x=(5, 2), i=(4,)) + layer("BatchReindex"),
    "ROIPooling": inputs(x=(5, 2, 4, 4), i=(3, 5))
    + layer("ROIPooling", "roi_pooling_param { pooled_h: 2 pooled_w: 2 }"),
}
MASKED = inputs(x=(1, 2, 2, 2), i=(1, 2, 2, 2)) + layer("Upsample", "upsample_param { upsample_h: 1 upsample_w: 5 }")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


@contextlib.contextmanager
def an_error(device, match="layer 'culprit'"):
    """What runs in the block fails; on a GPU, when somebody waits for it."""
    with pytest.raises(NetError, match=match):
        yield
        device.synchronize()


def net_with(text, device, place, value):
    """A net that has passed once with good values, with `value` put at a place of `i`, and what was in its tops."""
    net = Net(text, TRAIN, device=device, seed=1)
    rng = np.random.default_rng(0)
    for name in net.inputs:
        net.blobs[name].data[...] = 1 if name == "i" else rng.random(net.blobs[name].shape)
    net.run_forward()
    net.blobs["i"].data.flat[place] = value
    return net


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("case", LABELLED)
def test_labels_and_indices(case, value, device):
    for place in (0, -5 if case == "ROIPooling" else -1):
        net = net_with(LABELLED[case], device, place, ABSURD[value])
        before = net.blobs["t"].cpu_data().copy()
        with an_error(device):
            net.run_forward()
        if device.family == "host":
            np.testing.assert_array_equal(net.blobs["t"].cpu_data(), before)
        if case != "Accuracy":
            with an_error(device):
                net.run_backward()


@pytest.mark.parametrize("value", [name for name in ABSURD if name != "-1"])
def test_masks(value, device):
    net = net_with(MASKED, device, -1, ABSURD[value])
    with an_error(device, "layer 'culprit': mask value .* is no place in a plane of 1 x 5"):
        net.run_forward()
    with an_error(device, "layer 'culprit': mask value"):
        net.run_backward()


@pytest.mark.parametrize("value", [name for name in ABSURD if name not in ("nan", "inf", "-inf")])
def test_regions_far_away_have_no_maximum(value, device):
    for place in (1, 2, 3, 4):
        net = net_with(LABELLED["ROIPooling"], device, place, ABSURD[value])
        net.run_forward()
        net.run_backward()
        assert net.blobs["t"].cpu_data().max() <= net.blobs["x"].cpu_data().max()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_regions_without_end(value, device):
    for place in (1, 2, 3, 4):
        net = net_with(LABELLED["ROIPooling"], device, place, ABSURD[value])
        with an_error(device, "layer 'culprit': region 0 (is|has) .*four finite coordinates"):
            net.run_forward()


def test_an_ignored_label_may_be_no_class(device):
    text = CLASSES + layer("SoftmaxWithLoss", "loss_param { ignore_label: 255 }")
    net = net_with(text, device, 0, 255)
    assert np.isfinite(net.run_forward())
    net.run_backward()
    assert (net.blobs["x"].cpu_diff()[0] == 0).all()


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("kind", ["Filter", "ContrastiveLoss"])
def test_flags_are_anything_but_zero(kind, value, device):
    if kind == "Filter":
        net = net_with(inputs(x=(4, 2), i=(4,)) + layer("Filter"), device, 0, ABSURD[value])
    else:
        net = net_with(
            inputs(x=(4, 2), y=(4, 2), i=(4,)) + layer("ContrastiveLoss", bottoms="xyi"), device, 0, ABSURD[value]
        )
    expected = net.blobs["t"].cpu_data().copy()  # of flags of 1
    net.run_forward()
    np.testing.assert_array_equal(net.blobs["t"].cpu_data(), expected)


SSD = inputs(l=(1, 8), c=(1, 4), i=(1, 2, 8)) + layer(
    "DetectionOutput", "detection_output_param { num_classes: 2 nms_param { nms_threshold: 0.5 } }", bottoms="lci"
).replace("force_backward: true", "")
RPN = inputs(s=(1, 18, 2, 2), d=(1, 36, 2, 2), i=(1, 3))
RPN += layer("Proposal", bottoms="sdi").replace("force_backward: true", "")


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("text", [SSD, RPN], ids=["DetectionOutput", "Proposal"])
def test_detectors(text, value, device):
    """What boxes and images are like is the net's business: an error that names the layer, or boxes."""
    for place in range(3):
        for name in Net(text, TRAIN, device=device).inputs:
            net = Net(text, TRAIN, device=device)
            net.blobs["i"].data[...] = np.arange(net.blobs["i"].count).reshape(net.blobs["i"].shape) + 1
            net.blobs[name].data.flat[place] = ABSURD[value]
            with success_or_error():
                net.run_forward()
                device.synchronize()
                continue
            with an_error(device):
                net.run_forward()
