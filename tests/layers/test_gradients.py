"""Every layer that has a gradient, against numerical differences in float64 (central, relative to the largest)."""

import numpy as np
import pytest

from blobmem import TRAIN, Net, layer_types

CONV = "convolution_param { num_output: 4 kernel_size: 3 %s }"
CASES = {
    "Convolution": [("2 3 5 6", CONV % ""), ("2 4 6 5", CONV % "group: 2 stride: 2 pad: 1 dilation: 1"),
                    ("2 2 7 7", CONV % "dilation: 2"), ("2 2 7", CONV % ""),
                    ("1 2 4 4 4", "convolution_param { num_output: 2 kernel_size: 2 }")],
    "Deconvolution": [("2 3 4 3", CONV % "stride: 2"), ("2 4 3 4", CONV % "group: 2 pad: 1")],
    "Pooling": [("2 3 6 5", "pooling_param { kernel_size: 3 stride: 2 }"),
                ("2 3 6 5", "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }"),
                ("2 3 4 4", "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"),
                ("2 3 4 4", "pooling_param { pool: AVE global_pooling: true }")],
    "LRN": [("2 7 3 3", "lrn_param { local_size: 3 alpha: 0.5 }"),
            ("2 3 5 5", "lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL }")],
    "InnerProduct": [("3 4 2", "inner_product_param { num_output: 5 }"),
                     ("3 2 4", "inner_product_param { num_output: 5 axis: 2 transpose: true bias_term: false }")],
    "ReLU": [("2 3 4", ""), ("2 3 4", "relu_param { negative_slope: 0.2 }")],
    "PReLU": [("2 3 4 4", ""), ("2 3 4 4", "prelu_param { channel_shared: true }")],
    "Sigmoid": [("2 3 4", "")],
    "TanH": [("2 3 4", "")],
    "Power": [("2 3 4", "power_param { power: 2 scale: 0.5 shift: 3 }")],
    "Dropout": [("2 3 4", "dropout_param { dropout_ratio: 0.4 }")],
    "BatchNorm": [("4 3 5 4", ""), ("6 3", ""), ("4 3 2 2", "batch_norm_param { use_global_stats: true }")],
    "Scale": [("2 3 4 5", "scale_param { bias_term: true }"), ("2 3 4 5", "scale_param { axis: 2 num_axes: 2 }")],
    "Bias": [("2 3 4 5", ""), ("2 3 4", "bias_param { axis: 0 num_axes: -1 }")],
    "Softmax": [("2 5 3", ""), ("2 5 3", "softmax_param { axis: 2 }")],
    "Flatten": [("2 3 4", "")],
    "Reshape": [("2 3 4", "reshape_param { shape { dim: 0 dim: -1 dim: 2 } }")],
    "Eltwise": [("2 3 4", "", 2), ("2 3 4", "eltwise_param { operation: PROD }", 3),
                ("2 3 4", "eltwise_param { operation: PROD stable_prod_grad: false }", 2),
                ("2 3 4", "eltwise_param { operation: MAX }", 3),
                ("2 3 4", "eltwise_param { coeff: 2 coeff: -0.5 }", 2)],
    "Concat": [("2 3 4", "", 3), ("2 3 4", "concat_param { axis: 0 }", 2), ("2 3 4", "", 1)],
    "EuclideanLoss": [("4 3", "", 2)],
}  # fmt: skip
MULTI_TOP = {
    "Slice": [("2 6 4", "slice_param { slice_point: 1 slice_point: 4 }", 3), ("2 6 4", "slice_param { axis: 1 }", 2)],
    "Split": [("2 3 4", "", 3)],
}
TESTED_ELSEWHERE = {
    "SoftmaxWithLoss",  # below, since its second bottom is labels
    "Accuracy", "ArgMax",  # no gradient
    "Input", "DummyData", "MemoryData", "Data",  # no bottoms
    "Silence",  # zero, in test_combine
}  # fmt: skip


def test_every_layer_has_a_gradient_check():
    assert set(layer_types()) == set(CASES) | set(MULTI_TOP) | TESTED_ELSEWHERE


def inputs_text(shapes):
    text = ""
    for i, shape in enumerate(shapes):
        dims = " ".join(f"dim: {d}" for d in shape.split())
        text += f'layer {{ name: "in{i}" type: "Input" top: "x{i}" input_param {{ shape {{ {dims} }} }} }}\n'
    return text


def build(type_, shapes, options, tops=1, in_place=False):
    bottoms = " ".join(f'bottom: "x{i}"' for i in range(len(shapes)))
    names = ["x0"] if in_place else [f"y{i}" for i in range(tops)]
    extra = ""
    if in_place:
        # a layer below, so that the input keeps its values
        bottoms, names = 'bottom: "p"', ["p"]
        extra = 'layer { name: "p" type: "Power" bottom: "x0" top: "p" power_param { scale: 1.5 } }\n'
    top_text = " ".join(f'top: "{n}"' for n in names)
    text = inputs_text(shapes) + extra
    text += f'layer {{ name: "l" type: "{type_}" {bottoms} {top_text} {options} }}'
    net = Net('name: "check" force_backward: true\n' + text, TRAIN, seed=7, dtype=np.float64)
    rng = np.random.default_rng(3)
    for i in range(len(shapes)):
        # distinct values, away from kinks, so that maxima and signs hold under small steps
        values = rng.permutation(net.blobs[f"x{i}"].count) + rng.uniform(0.2, 0.8)
        net.blobs[f"x{i}"].data.flat[:] = (values / len(values) * 2 - 1) + 0.013
    for blob in net.params.get("l", []):
        blob.data[...] = rng.uniform(0.5, 1.5, blob.shape)
    return net, names


def objective(net, names, weights):
    net.state.iteration = 0  # the same random draws each time
    loss = net.run_forward()
    return loss + sum(float((net.blobs[n].cpu_data() * w).sum()) for n, w in zip(names, weights, strict=True))


def check_gradients(net, names, is_loss=False, skip=(), step=1e-5):
    rng = np.random.default_rng(5)
    weights = [np.zeros(net.blobs[n].shape) if is_loss else rng.normal(size=net.blobs[n].shape) for n in names]
    objective(net, names, weights)
    if not is_loss:
        for name, values in zip(names, weights, strict=True):
            net.blobs[name].diff[...] = values
    net.clear_param_diffs()
    net.run_backward()
    targets = [(name, net.blobs[name]) for name in net.inputs if name not in skip]
    grads = [blob.cpu_diff().copy() for _, blob in targets]
    learned = [(f"param {i}", p) for i, p in enumerate(net.params.get("l", [])) if net.layers[-1].type != "BatchNorm"]
    grads += [blob.cpu_diff().copy() for _, blob in learned]
    for (name, blob), grad in zip(targets + learned, grads, strict=True):
        numeric = np.zeros(blob.count)
        for i in range(blob.count):
            values = []
            for sign in (1, -1):
                blob.data.flat[i] += sign * step
                values.append(objective(net, names, weights))
                blob.data.flat[i] -= sign * step
            numeric[i] = (values[0] - values[1]) / (2 * step)
        assert np.abs(numeric).max() > 1e-3, f"{name}: the check would pass with no gradient at all"
        error = np.abs(numeric.reshape(blob.shape) - grad).max() / np.abs(numeric).max()
        assert error < 1e-6, f"{name}: {error}"


def flat(cases):
    return [pytest.param(t, c, id=f"{t}-{i}") for t, options in cases.items() for i, c in enumerate(options)]


@pytest.mark.parametrize("type_, case", flat(CASES))
def test_gradient(type_, case):
    shape, options, *count = case
    net, names = build(type_, [shape] * (count[0] if count else 1), options)
    check_gradients(net, names, is_loss=type_.endswith("Loss"))


@pytest.mark.parametrize("type_, case", flat(MULTI_TOP))
def test_gradient_of_several_tops(type_, case):
    shape, options, tops = case
    check_gradients(*build(type_, [shape], options, tops))


IN_PLACE = ["ReLU", "PReLU", "Sigmoid", "TanH", "Power", "Dropout", "BatchNorm", "Scale", "Bias"]


@pytest.mark.parametrize("type_", IN_PLACE)
def test_gradient_in_place(type_):
    options = {
        "Power": "power_param { power: 2 scale: 0.5 shift: 3 }",
        "Scale": "scale_param { bias_term: true }",
        "ReLU": "relu_param { negative_slope: 0.2 }",
    }.get(type_, "")
    check_gradients(*build(type_, ["2 3 4 4"], options, in_place=True))


@pytest.mark.parametrize("type_", ["Scale", "Bias"])
def test_gradient_of_a_second_bottom(type_):
    option = {"Scale": "scale_param", "Bias": "bias_param"}[type_]
    check_gradients(*build(type_, ["2 3 4 5", "3 4"], f"{option} {{ axis: 1 }}"))


@pytest.mark.parametrize("options", [
    "", "loss_param { ignore_label: 1 }", "loss_param { normalization: FULL }",
    "loss_param { normalization: BATCH_SIZE }", "loss_param { normalization: NONE }",
    "loss_weight: 0.3", "softmax_param { axis: 1 }",
])  # fmt: skip
def test_gradient_of_softmax_with_loss(options):
    net, names = build("SoftmaxWithLoss", ["4 5 2", "4 1 2"], options)
    net.blobs["x1"].data[...] = np.arange(8).reshape(4, 1, 2) % 5
    check_gradients(net, names, is_loss=True, skip=("x1",))
