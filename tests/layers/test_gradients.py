"""Every layer that has a gradient, against numerical differences in float64 (central, relative to the largest).

On the host of every number by itself; elsewhere, where each pass takes far longer, of all numbers in random directions.
"""

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU
from layer_cases import CASES, MULTI_TOP

from blobmem import TRAIN, Net, devices, layer_types
from blobmem.devices import HOST

DIRECTIONS = 3
TESTED_ELSEWHERE = {
    "SoftmaxWithLoss", "HingeLoss", "InfogainLoss", "MultinomialLogisticLoss",  # below, since their second bottom is labels
    "ContrastiveLoss", "SigmoidCrossEntropyLoss",  # below, since a bottom has no gradient
    "Threshold",  # none, in test_activation
    "BatchReindex", "Crop", "Embed", "Filter",  # below, since they have bottoms without a gradient
    "Parameter",  # below, since it has no bottoms
    "Accuracy", "ArgMax",  # no gradient
    "Input", "DummyData", "MemoryData", "Data", "ImageData", "WindowData", "HDF5Data",  # no bottoms
    "HDF5Output",  # no tops
    "Silence",  # zero, in test_combine
    "RNN", "LSTM", "LSTMUnit",  # below, since cont has no gradient
    "Python",  # the user's own
    "PriorBox", "DetectionOutput", "Proposal",  # no gradient
    "ROIPooling",  # below, since its second bottom is regions; Upsample's second bottom, too
}  # fmt: skip


@pytest.fixture(autouse=True, params=[pytest.param(lambda: HOST, id="host"), EMULATED, GPU])
def device(request):
    """Where all nets here are."""
    before = devices.default()
    devices.set_default(request.param())
    yield devices.default()
    devices.set_default(before)


def test_every_layer_has_a_gradient_check():
    ours = {name for name, cls in layer_types().items() if cls.__module__.startswith("blobmem.")}
    assert ours == set(CASES) | set(MULTI_TOP) | TESTED_ELSEWHERE


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
    by_itself = devices.default().is_host
    for (name, blob), grad in zip(targets + learned, grads, strict=True):
        ways = np.eye(blob.count) if by_itself else rng.choice([-1.0, 1.0], (DIRECTIONS, blob.count))
        numeric, start = np.zeros(len(ways)), blob.cpu_data().copy()
        for i, way in enumerate(ways.reshape(-1, *blob.shape)):
            values = []
            for sign in (1, -1):
                blob.data[...] = start + sign * step * way
                values.append(objective(net, names, weights))
            numeric[i] = (values[0] - values[1]) / (2 * step)
        blob.data[...] = start
        assert np.abs(numeric).max() > 1e-3, f"{name}: the check would pass with no gradient at all"
        error = np.abs(numeric - ways @ grad.ravel()).max() / np.abs(numeric).max()
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


IN_PLACE = [
    "ReLU", "PReLU", "Sigmoid", "TanH", "BNLL", "Clip", "ELU", "Exp", "Log", "ReLU6", "Swish", "Power", "Dropout",
    "BatchNorm", "Scale", "Bias", "LRN", "MVN"
]  # fmt: skip


@pytest.mark.parametrize("type_", IN_PLACE)
def test_gradient_in_place(type_):
    options = {
        "Power": "power_param { power: 2 scale: 0.5 shift: 3 }",
        "Scale": "scale_param { bias_term: true }",
        "ReLU": "relu_param { negative_slope: 0.2 }",
        "Clip": "clip_param { min: -0.5 max: 0.6 }",
        "Log": "log_param { shift: 3 }",
        "Swish": "swish_param { beta: 1.5 }",
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


@pytest.mark.parametrize("type_, shapes, options, values", [
    pytest.param("BatchReindex", ["4 3 2", "5"], "", [2, 0, 2, 3, 2], id="BatchReindex"),
    pytest.param("Embed", ["3 2"], "embed_param { num_output: 4 input_dim: 5 }", [1, 4, 1, 0, 1, 4], id="Embed"),
    pytest.param("Filter", ["4 3 2", "4"], "", [1, 0, -1, 2], id="Filter"),
    pytest.param("Crop", ["2 4 5 6", "2 4 3 3"], "crop_param { offset: 1 offset: 2 }", 0, id="Crop"),
])  # fmt: skip
def test_gradient_with_a_bottom_that_has_none(type_, shapes, options, values):
    net, names = build(type_, shapes, options)
    last = f"x{len(shapes) - 1}"
    net.blobs[last].data.flat[:] = values
    net.run_forward()  # gives a filter's top its shape
    check_gradients(net, names, skip=(last,))
    assert not net.blobs[last].has_diff or not net.blobs[last].cpu_diff().any()


def test_gradient_of_a_parameter():
    check_gradients(*build("Parameter", [], "parameter_param { shape { dim: 2 dim: 3 } }"))


@pytest.mark.parametrize("options", ["coeff: 2 coeff: -0.5", "operation: MAX"], ids=["SUM", "MAX"])
def test_gradient_of_a_sum_or_maximum_in_place(options):
    text = inputs_text(["2 3 4", "2 3 4"]) + """
        layer { name: "p" type: "Power" bottom: "x0" top: "p" power_param { scale: 1.5 } }
        layer { name: "l" type: "Eltwise" bottom: "p" bottom: "x1" top: "p" eltwise_param { %s } }
    """  # fmt: skip
    net = Net("force_backward: true\n" + text % options, TRAIN, dtype=np.float64)
    for seed, name in enumerate(("x0", "x1")):
        net.blobs[name].data[...] = np.random.default_rng(seed).permutation(24).reshape(2, 3, 4) - 11.3 + seed / 4
    check_gradients(net, ["p"])


@pytest.mark.parametrize("type_, options", [
    ("ELU", "elu_param { alpha: -0.7 }"), ("ReLU", "relu_param { negative_slope: -0.5 }"),
], ids=["ELU", "ReLU"])  # fmt: skip
def test_gradient_in_place_where_the_output_does_not_tell_the_side(type_, options):
    check_gradients(*build(type_, ["2 3 4"], options, in_place=True))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", ["", "relu_param { negative_slope: 0.2 }"], ids=["plain", "leaky"])
def test_gradient_of_relu6_on_both_sides_of_6(options, in_place):
    net, names = build("ReLU6", ["2 3 4"], options, in_place=in_place)
    net.blobs["x0"].data[...] *= 10
    check_gradients(net, names)


@pytest.mark.parametrize("scale_shape", ["2 3", "2 3 1 1"], ids=["flat", "of ones"])
def test_gradient_of_axpy(scale_shape):
    check_gradients(*build("Axpy", [scale_shape, "2 3 2 2", "2 3 2 2"], ""))


@pytest.mark.parametrize("type_, options", [
    ("HingeLoss", ""), ("HingeLoss", "hinge_loss_param { norm: L2 } loss_weight: 0.3"),
    ("MultinomialLogisticLoss", ""), ("MultinomialLogisticLoss", "loss_weight: 0.3"),
], ids=["hinge L1", "hinge L2", "multinomial", "weighted"])  # fmt: skip
def test_gradient_of_losses_of_rows(type_, options):
    net, names = build(type_, ["4 5", "4"], options)
    net.blobs["x1"].data[...] = [3, 0, 4, 3]
    if type_ == "MultinomialLogisticLoss":
        net.blobs["x0"].data[...] += 1.2  # positive, as probabilities are
    check_gradients(net, names, is_loss=True, skip=("x1",))


@pytest.mark.parametrize("options", [
    "", "loss_param { ignore_label: 1 }", "loss_param { normalization: FULL }", "loss_param { normalize: false }",
    "loss_param { normalization: NONE } loss_weight: 0.3", "infogain_loss_param { axis: -2 }",
], ids=["valid", "ignore", "full", "batch", "none", "axis"])  # fmt: skip
def test_gradient_of_infogain_loss(options):
    net, names = build("InfogainLoss", ["4 5 2", "4 2", "5 5"], options)
    net.blobs["x1"].data[...] = np.arange(8).reshape(4, 2) % 5
    check_gradients(net, names, is_loss=True, skip=("x1", "x2"))


@pytest.mark.parametrize("options", [
    "", "loss_param { ignore_label: 1 normalization: VALID }", "loss_param { normalization: FULL } loss_weight: 0.3",
], ids=["batch", "valid", "full"])  # fmt: skip
def test_gradient_of_sigmoid_cross_entropy_loss(options):
    net, names = build("SigmoidCrossEntropyLoss", ["4 5", "4 5"], options)
    net.blobs["x1"].data[...] = np.arange(20).reshape(4, 5) % 5 / 4
    check_gradients(net, names, is_loss=True, skip=("x1",))


@pytest.mark.parametrize("legacy", [False, True])
def test_gradient_of_contrastive_loss(legacy):
    options = "margin: 1.5 legacy_version: true" if legacy else "margin: 2000"
    shapes = ["5 3", "5 3", "5"]
    net, names = build("ContrastiveLoss", shapes, f"contrastive_loss_param {{ {options} }} loss_weight: 0.3")
    if not legacy:
        # distances beside which the 0.0001 that Caffe adds to them does not count
        for name in ("x0", "x1"):
            net.blobs[name].data[...] *= 1000
    net.blobs["x2"].data[...] = [0, 1, 0, 0, 1]
    check_gradients(net, names, is_loss=True, skip=("x2",))


def test_gradient_of_roi_pooling():
    net, names = build(
        "ROIPooling", ["2 2 5 6", "5 5"], "roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }"
    )
    # inside, over the edge, a point, outside, backwards
    regions = [[0, 0, 0, 9, 7], [1, 4, 3, 30, 20], [1, 5, 5, 5, 5], [0, 40, 2, 50, 6], [0, 9, 6, 3, 2]]
    net.blobs["x1"].data[...] = regions
    check_gradients(net, names, skip=("x1",))


def test_gradient_of_upsample_by_a_mask():
    net, names = build("Upsample", ["2 2 2 3", "2 2 2 3"], "upsample_param { scale: 2 }")
    places = [np.random.default_rng(i).permutation(24)[:6] for i in range(4)]
    net.blobs["x1"].data[...] = np.reshape(places, (2, 2, 2, 3))
    net.blobs["x1"].data[1, 1, 1, 2] = -1  # of an empty window
    check_gradients(net, names, skip=("x1",))


@pytest.mark.parametrize("shared", ["true", "false"])
def test_gradient_of_normalize_in_place(shared):
    options = f"norm_param {{ across_spatial: false channel_shared: {shared} eps: 0.1 }}"
    check_gradients(*build("Normalize", ["2 3 2 4"], options, in_place=True))


@pytest.mark.parametrize("exposed", [False, True], ids=["carried", "exposed"])
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("type_, states", [("RNN", 1), ("LSTM", 2)], ids=["RNN", "LSTM"])
def test_gradient_of_recurrent_layers(type_, states, static, exposed):
    shapes = ["5 3 1 2", "5 3", *["3 2 2"] * static, *["1 3 3"] * states * exposed]
    options = f"recurrent_param {{ num_output: 3 expose_hidden: {str(exposed).lower()} }}"
    net, names = build(type_, shapes, options, tops=1 + states * exposed)
    # 0.5 is none of the values in use, but the gradient should hold for it, too; a carried state would differ each time
    first = [1, 0.5, 0] if exposed else [0, 0, 0]
    net.blobs["x1"].data[...] = [first, [1, 1, 1], [0, 1, 0.5], [1, 0, 1], [1, 1, 1]]
    for i, blob in enumerate(net.params["l"]):
        blob.data[...] = np.random.default_rng(i).normal(scale=0.7, size=blob.shape)
    check_gradients(net, names, skip=("x1",))
    assert not net.blobs["x1"].has_diff or not net.blobs["x1"].cpu_diff().any()


def test_gradient_of_an_lstm_unit():
    net, names = build("LSTMUnit", ["1 3 4", "1 3 16", "1 3"], "", tops=2)
    net.blobs["x2"].data[...] = [1, 0, 0.5]
    check_gradients(net, names, skip=("x2",))
