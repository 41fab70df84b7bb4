"""Losses against class labels in nets: normalization, H from a file or a bottom, weights, errors."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, NetError, SimulatedDevice
from blobmem.devices import HOST
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import fill_blob
from blobmem.proto.text import write_binary

SCORES = np.random.default_rng(0).normal(size=(4, 3, 2))
LABELS = np.array([[0, 2], [1, 255], [255, 2], [2, 0]])


def net_of(type_, options="", bottoms='bottom: "x" bottom: "l"', top="y", device=HOST, labels="dim: 4 dim: 2"):
    text = f"""
        force_backward: true
        layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 4 dim: 3 dim: 2 }} }} }}
        layer {{ name: "labels" type: "Input" top: "l" input_param {{ shape {{ {labels} }} }} }}
        layer {{ name: "gains" type: "Input" top: "h" input_param {{ shape {{ dim: 3 dim: 3 }} }} }}
        layer {{ name: "loss" type: "{type_}" {bottoms} top: "{top}" {options} }}
    """
    net = Net(text, TRAIN, dtype=np.float64, device=device, seed=1)
    net.blobs["x"].data[...] = SCORES
    net.blobs["l"].data[...] = np.resize(LABELS, net.blobs["l"].shape)
    net.blobs["h"].data[...] = np.eye(3)
    return net


def softmax_losses():
    """-log softmax at the labels that are not 255."""
    logs = SCORES - np.log(np.exp(SCORES).sum(1, keepdims=True))
    return [-logs[i, LABELS[i, j], j] for i in range(4) for j in range(2) if LABELS[i, j] != 255]


THREE = 'bottom: "x" bottom: "l" bottom: "h"'


@pytest.mark.parametrize("type_, bottoms", [("SoftmaxWithLoss", 'bottom: "x" bottom: "l"'), ("InfogainLoss", THREE)],
                         ids=["softmax", "infogain"])  # fmt: skip
@pytest.mark.parametrize("options, divisor", [
    ("", 6), ("normalization: VALID", 6), ("normalization: FULL", 8), ("normalization: BATCH_SIZE", 4),
    ("normalization: NONE", 1), ("normalize: true", 6), ("normalize: false", 4),
    ("normalize: true normalization: FULL", 8),
], ids=["default", "valid", "full", "batch", "none", "old true", "old false", "both"])  # fmt: skip
def test_normalization(type_, bottoms, options, divisor):
    net = net_of(type_, f"loss_param {{ ignore_label: 255 {options} }}", bottoms)
    assert net.run_forward() == pytest.approx(sum(softmax_losses()) / divisor, rel=1e-12)


def write_matrix(path, matrix):
    proto = caffe_pb2.BlobProto()
    fill_blob(proto, matrix)
    write_binary(proto, path)


GAINS = np.array([[1, 0.25, 0], [0.5, 2, 0], [0, -0.125, 1]], np.float32)
IGNORE = "loss_param { ignore_label: 255 }"


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 3, 3)], ids=["square", "legacy"])
@pytest.mark.parametrize("make_device", DEVICES)
def test_infogain_from_a_file_is_that_of_a_bottom(tmp_path, make_device, shape):
    write_matrix(tmp_path / "h.binaryproto", GAINS.reshape(shape))
    source = f'infogain_loss_param {{ source: "{tmp_path}/h.binaryproto" }}'
    results = []
    for options, bottoms in ((IGNORE, THREE), (IGNORE + source, 'bottom: "x" bottom: "l"')):
        net = net_of("InfogainLoss", options, bottoms, device=make_device())
        net.blobs["h"].data[...] = GAINS
        loss = net.run_forward()
        net.run_backward()
        results.append((loss, net.blobs["x"].cpu_diff().copy()))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_the_matrix_is_uploaded_once(tmp_path):
    write_matrix(tmp_path / "h.binaryproto", GAINS)
    device = SimulatedDevice()
    net = net_of(
        "InfogainLoss", IGNORE + f'infogain_loss_param {{ source: "{tmp_path}/h.binaryproto" }}', device=device
    )
    net.run_forward()
    before = device.statistics.htod_copies
    net.run_forward()
    assert device.statistics.htod_copies == before


@pytest.mark.parametrize("type_, bottoms", [("SoftmaxWithLoss", 'bottom: "x" bottom: "l"'), ("InfogainLoss", THREE)],
                         ids=["softmax", "infogain"])  # fmt: skip
def test_a_second_top_takes_the_probabilities(type_, bottoms):
    net = net_of(type_, IGNORE, bottoms, top='y" top: "p')
    net.run_forward()
    expected = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
    np.testing.assert_allclose(net.blobs["p"].cpu_data(), expected, rtol=1e-12)
    if type_ == "InfogainLoss":  # whose gradient reads them
        assert net.blobs["p"].data_view == net.internals["loss/prob"].data_view


def test_softmax_with_loss_keeps_two_numbers_for_each_prediction():
    net = net_of("SoftmaxWithLoss", IGNORE)
    assert {name: blob.shape for name, blob in net.internals.items()} == {"loss/sums": (4, 2, 2)}


def test_infogain_along_another_axis():
    text = """
        layer { name: "in" type: "Input" top: "x" top: "l" top: "h"
          input_param { shape { dim: 4 dim: 2 dim: 3 } shape { dim: 8 } shape { dim: 3 dim: 3 } } }
        layer { name: "loss" type: "InfogainLoss" bottom: "x" bottom: "l" bottom: "h" top: "y"
          infogain_loss_param { axis: -1 } softmax_param { axis: 0 } loss_param { ignore_label: 255 } }
    """
    net = Net(text, TRAIN, dtype=np.float64)
    net.blobs["x"].data[...] = SCORES.transpose(0, 2, 1)
    net.blobs["l"].data[...] = LABELS.ravel()
    net.blobs["h"].data[...] = np.eye(3)
    assert net.run_forward() == pytest.approx(sum(softmax_losses()) / 6, rel=1e-12)


@pytest.mark.parametrize("type_, losses", [
    ("HingeLoss", "hinge_loss_param { norm: L1 }"), ("HingeLoss", "hinge_loss_param { norm: L2 }"),
    ("MultinomialLogisticLoss", ""),
], ids=["L1", "L2", "multinomial"])  # fmt: skip
def test_weight_and_batch(type_, losses):
    """Items are what the first axis counts, whatever the others; the loss weight is in the loss and its gradient."""
    results = []
    for weight in ("", "loss_weight: 0.25"):
        net = net_of(type_, losses + weight, labels="dim: 4")
        net.blobs["x"].data[...] = np.abs(SCORES)
        net.blobs["l"].data[...] = [0, 5, 2, 5]
        results.append((net.run_forward(), net.blobs["y"].cpu_data().item()))
        net.run_backward()
        results[-1] += (net.blobs["x"].cpu_diff().copy(),)
    (loss, top, diff), (weighted, same_top, quarter) = results
    rows = np.abs(SCORES).reshape(4, 6)
    at = np.arange(4), [0, 5, 2, 5]
    sign = np.ones((4, 6))
    sign[at] = -1
    margins = np.maximum(0, 1 + sign * rows)
    expected = -np.log(rows[at]) if type_ != "HingeLoss" else margins ** (2 if "L2" in losses else 1)
    assert loss == top == same_top == pytest.approx(expected.sum() / 4, rel=1e-12)
    assert weighted == pytest.approx(loss / 4)
    np.testing.assert_allclose(quarter, diff / 4, rtol=1e-12)


def test_a_loss_may_leave_its_top_out():
    net = net_of("HingeLoss", labels="dim: 4", top="loss")
    assert net.outputs == ["h", "loss"]
    text = str(net.param).replace('top: "loss"', "")
    assert Net(text, TRAIN).outputs == ["h", "loss"]


@pytest.mark.parametrize("type_", ["HingeLoss", "MultinomialLogisticLoss", "InfogainLoss", "SoftmaxWithLoss"])
def test_what_does_not_fit_is_said(type_):
    bottoms = THREE if type_ == "InfogainLoss" else 'bottom: "x" bottom: "l"'
    with pytest.raises(NetError, match=r"layer 'loss' .*bottom: expected \d labels, one for each prediction of"):
        net_of(type_, bottoms=bottoms, labels="dim: 3")
    down = "propagate_down: true propagate_down: true" + (" propagate_down: false" if bottoms == THREE else "")
    labels = "dim: 4" if type_ in ("HingeLoss", "MultinomialLogisticLoss") else "dim: 4 dim: 2"
    with pytest.raises(NetError, match="propagate_down: expected false for the labels"):
        net_of(type_, down, bottoms, labels=labels)
    with pytest.raises(NetError, match="top: expected another name than the bottoms'"):
        net_of(type_, "", bottoms, top="x", labels=labels)
    net = net_of(type_, "", bottoms, labels=labels)
    net.blobs["l"].data.flat[:] = 1
    net.blobs["l"].data.flat[3] = 9
    with pytest.raises(NetError, match=r"layer 'loss': label 9 of item 3 is no class: expected 0 to [25]; check"):
        net.run_forward()


@pytest.mark.parametrize("case", ["absent", "another", "empty", "size", "bottom"])
def test_what_is_wrong_with_an_infogain_matrix(case, tmp_path):
    path, bottoms = tmp_path / "h.binaryproto", 'bottom: "x" bottom: "l"'
    options = f'infogain_loss_param {{ source: "{path}" }}'
    if case == "another":
        path.write_text("layer { }")
    elif case == "empty":
        write_binary(caffe_pb2.BlobProto(num=1, channels=1, height=0, width=0), path)
    elif case == "size":
        write_matrix(path, np.eye(4, dtype=np.float32))
    elif case == "bottom":
        bottoms, options = 'bottom: "x" bottom: "l" bottom: "l"', ""
    message = {
        "absent": rf"source: expected a binaryproto file with the matrix H \(there is no file {path}.*\), got '{path}'",
        "another": r"source: expected a binaryproto file with the matrix H \(.* is a text file",
        "empty": "source: expected a binaryproto file with the matrix H, got .* which has no values",
        "size": r"source: expected 3 x 3 values of H, for the classes of .*, got 16, of shape \(4, 4\)",
        "bottom": "bottom: expected 3 x 3 values of H, for the classes of",
    }[case]
    with pytest.raises(NetError, match=r"layer 'loss' \(InfogainLoss\), " + message):
        net_of("InfogainLoss", options, bottoms)


def test_infogain_needs_a_matrix():
    with pytest.raises(
        NetError, match=r"source: expected a binaryproto file with the matrix H, or H as a third bottom"
    ):
        net_of("InfogainLoss")
