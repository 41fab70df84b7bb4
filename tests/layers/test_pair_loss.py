"""Losses between two blobs in nets: normalization, similarity, weights, errors."""

import numpy as np
import pytest

from blobmem import TRAIN, Net, NetError

A, B = np.random.default_rng(0).normal(size=(2, 4, 6))


def net_of(type_, options="", first="dim: 4 dim: 6", second="dim: 4 dim: 6", third=None, top="y"):
    shapes = {"a": first, "b": second} | ({"s": third} if third else {})
    text = "force_backward: true\n"
    for name, shape in shapes.items():
        text += f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ shape {{ {shape} }} }} }}\n'
    bottoms = " ".join(f'bottom: "{name}"' for name in shapes)
    net = Net(
        text + f'layer {{ name: "loss" type: "{type_}" {bottoms} top: "{top}" {options} }}', TRAIN, dtype=np.float64
    )
    net.blobs["a"].data.flat[:], net.blobs["b"].data.flat[:] = A.ravel(), B.ravel()
    return net


TARGETS = np.resize([0, 1, 0.5, -1], (4, 6))


@pytest.mark.parametrize("options, divisor", [
    ("", 4), ("normalization: VALID", 18), ("normalization: FULL", 24), ("normalization: BATCH_SIZE", 4),
    ("normalization: NONE", 1), ("normalize: true", 18), ("normalize: false", 4),
], ids=["default", "valid", "full", "batch", "none", "old true", "old false"])  # fmt: skip
def test_sigmoid_cross_entropy_normalization(options, divisor):
    net = net_of("SigmoidCrossEntropyLoss", f"loss_param {{ ignore_label: -1 {options} }}")
    net.blobs["b"].data[...] = TARGETS
    p = 1 / (1 + np.exp(-A))
    losses = -(TARGETS * np.log(p) + (1 - TARGETS) * np.log(1 - p))
    assert net.run_forward() == pytest.approx(losses[TARGETS >= 0].sum() / divisor, rel=1e-12)
    net.run_backward()
    expected = np.where(TARGETS >= 0, p - TARGETS, 0) / divisor
    np.testing.assert_allclose(net.blobs["a"].cpu_diff(), expected, rtol=0, atol=1e-14)


def test_nothing_is_ignored_unless_asked_for():
    net = net_of("SigmoidCrossEntropyLoss", "loss_weight: 0.5")
    net.blobs["b"].data[...] = 0
    assert net.run_forward() == pytest.approx(0.5 * np.log(1 + np.exp(A)).sum() / 4, rel=1e-12)


@pytest.mark.parametrize("legacy", [False, True])
def test_contrastive_loss(legacy):
    options = f"contrastive_loss_param {{ margin: 3 legacy_version: {str(legacy).lower()} }}"
    net = net_of("ContrastiveLoss", options, third="dim: 4")
    net.blobs["s"].data[...] = [1, 0, 0, 1]
    squared = ((A - B) ** 2).sum(1)
    short = np.maximum(0, 3 - squared) if legacy else np.maximum(0, 3 - np.sqrt(squared)) ** 2
    assert net.run_forward() == pytest.approx((squared[[0, 3]].sum() + short[[1, 2]].sum()) / 8, rel=1e-12)
    net.run_backward()
    np.testing.assert_array_equal(net.blobs["a"].cpu_diff(), -net.blobs["b"].cpu_diff())
    assert net.blobs["a"].cpu_diff()[0].any()


def test_features_may_have_axes_of_one():
    net = net_of("ContrastiveLoss", first="dim: 4 dim: 6 dim: 1 dim: 1", third="dim: 4 dim: 1")
    net.blobs["s"].data[...] = 1
    assert net.run_forward() == pytest.approx(((A - B) ** 2).sum() / 8, rel=1e-12)


@pytest.mark.parametrize("type_", ["EuclideanLoss", "SigmoidCrossEntropyLoss", "ContrastiveLoss"])
def test_what_does_not_fit_is_said(type_):
    third = "dim: 4" if type_ == "ContrastiveLoss" else None
    for wrong in ("dim: 4 dim: 5", "dim: 6 dim: 4"):
        with pytest.raises(NetError, match=rf"layer 'loss' \({type_}\), bottom: expected as many values as"):
            net_of(type_, second=wrong, third=third)
    with pytest.raises(NetError, match="top: expected another name than the bottoms'"):
        net_of(type_, third=third, top="a")


def test_flags_of_pairs():
    with pytest.raises(NetError, match="bottom: expected 4 flags, one for each pair"):
        net_of("ContrastiveLoss", third="dim: 4 dim: 2")


@pytest.mark.parametrize("type_, down", [("SigmoidCrossEntropyLoss", (1, 1)), ("ContrastiveLoss", (1, 1, 1))],
                         ids=["entropy", "contrastive"])  # fmt: skip
def test_labels_have_no_gradient(type_, down):
    options = " ".join("propagate_down: true" for _ in down)
    with pytest.raises(NetError, match="propagate_down: expected false for the labels"):
        net_of(type_, options, third="dim: 4" if len(down) > 2 else None)
