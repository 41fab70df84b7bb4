"""More element-wise layers: options, work in place, what they keep and what they refuse."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TEST, TRAIN, Net, NetError
from blobmem.devices import HOST

VALUES = np.array([-7, -1.5, -0.5, 0, 0.25, 1, 5.5, 8])


def net_of(type_, options="", in_place=False, phase=TRAIN, device=HOST):
    top = "p" if in_place else "y"
    text = f"""
        force_backward: true
        layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 4 }} }} }}
        layer {{ name: "p" type: "Power" bottom: "x" top: "p" power_param {{ shift: 0 }} }}
        layer {{ name: "l" type: "{type_}" bottom: "p" top: "{top}" {options} }}
    """
    net = Net(text, phase, dtype=np.float64, device=device, seed=1)
    net.blobs["x"].data.flat[:] = VALUES
    return net


def output(*args, **kwargs):
    net = net_of(*args, **kwargs)
    net.run_forward()
    return net.blobs[net.outputs[0]].cpu_data().ravel()


FORMULAS = {
    "absval": ("AbsVal", "", np.abs),
    "bnll": ("BNLL", "", lambda x: np.log(1 + np.exp(x))),
    "clip": ("Clip", "clip_param { min: -1 max: 2 }", lambda x: np.clip(x, -1, 2)),
    "elu": ("ELU", "elu_param { alpha: 0.5 }", lambda x: np.where(x > 0, x, 0.5 * (np.exp(x) - 1))),
    "exp e": ("Exp", "exp_param { scale: 0.5 shift: 2 }", lambda x: np.exp(2 + 0.5 * x)),
    "exp 2": ("Exp", "exp_param { base: 2 scale: -1 shift: 3 }", lambda x: 2.0 ** (3 - x)),
    "exp 1": ("Exp", "exp_param { base: 1 }", np.ones_like),
    "log e": ("Log", "log_param { scale: 2 shift: 20 }", lambda x: np.log(20 + 2 * x)),
    "log 10": ("Log", "log_param { base: 10 shift: 8 }", lambda x: np.log10(8 + x)),
    "relu6": ("ReLU6", "", lambda x: np.clip(x, 0, 6)),
    "relu6 leaky": ("ReLU6", "relu_param { negative_slope: 0.5 }", lambda x: np.where(x > 0, np.minimum(x, 6), x / 2)),
    "swish": ("Swish", "swish_param { beta: 2 }", lambda x: x / (1 + np.exp(-2 * x))),
    "threshold": ("Threshold", "threshold_param { threshold: 0.25 }", lambda x: x > 0.25),
    "threshold 0": ("Threshold", "", lambda x: x > 0),
}


@pytest.mark.parametrize("make_device", DEVICES)
@pytest.mark.parametrize("name, in_place", [
    pytest.param(name, in_place, id=f"{name} in place" if in_place else name)
    for name in FORMULAS for in_place in (False, True) if name != "absval" or not in_place
])  # fmt: skip
def test_values(name, in_place, make_device):
    type_, options, formula = FORMULAS[name]
    got = output(type_, options, in_place, device=make_device())
    np.testing.assert_allclose(got, formula(VALUES), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("type_, options, keeps", [
    ("BNLL", "", False), ("ELU", "", False), ("Exp", "", False), ("ReLU", "", False), ("ReLU6", "", False),
    ("Threshold", "", False), ("ELU", "elu_param { alpha: -1 }", True),
    ("ReLU", "relu_param { negative_slope: -1 }", True), ("Clip", "clip_param { min: 0 max: 1 }", True),
    ("Log", "log_param { shift: 9 }", True), ("Swish", "", True),
], ids=["BNLL", "ELU", "Exp", "ReLU", "ReLU6", "Threshold", "ELU down", "ReLU down", "Clip", "Log", "Swish"])  # fmt: skip
def test_the_input_is_kept_in_place_where_the_output_does_not_do(type_, options, keeps):
    assert not net_of(type_, options).internals
    assert set(net_of(type_, options, in_place=True).internals) == ({"l/bottom"} if keeps else set())


def test_nothing_is_copied_without_a_backward_pass():
    text = """
        layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 } } }
        layer { name: "s" type: "Swish" bottom: "x" top: "x" }
    """
    assert [call.op for call in Net(text, TEST).compiled()[0].calls] == ["swish_forward"]


def test_a_threshold_hands_no_gradient_down():
    text = """
        layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
        layer { name: "p" type: "InnerProduct" bottom: "x" top: "h" inner_product_param { num_output: 3 } }
        layer { name: "t" type: "Threshold" bottom: "h" top: "y" }
        layer { name: "q" type: "InnerProduct" bottom: "y" top: "z" inner_product_param { num_output: 1 } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "z" top: "loss" }
    """
    net = Net(text, TRAIN, seed=1)
    net.run_forward()
    net.run_backward()
    assert {call.layer_name for call in net.compiled()[1].calls}.isdisjoint({"p", "t"})


@pytest.mark.parametrize("type_, options, message", [
    ("Clip", "", "min: expected a number, as it has no default"),
    ("Clip", "clip_param { min: 2 max: 1 }", "min: expected at most max, 1, got 2"),
    ("Exp", "exp_param { base: 0 }", "base: expected a number above 0, or -1 for e, got 0"),
    ("Exp", "exp_param { base: -2 }", "base: expected a number above 0, or -1 for e, got -2"),
    ("Log", "log_param { base: 1 }", "base: expected another number than 1"),
    ("Log", "log_param { base: inf }", "base: expected a number above 0, or -1 for e, got inf"),
    ("ReLU6", "relu_param { negative_slope: -0.5 }", "negative_slope: expected 0 or more, got -0.5"),
], ids=["none", "crossed", "zero", "negative", "one", "infinite", "slope"])  # fmt: skip
def test_wrong_options(type_, options, message):
    with pytest.raises(NetError, match=f"layer 'l' \\({type_}\\), {message}"):
        net_of(type_, options)


def test_absval_refuses_to_work_in_place():
    with pytest.raises(NetError, match=r"layer 'l' \(AbsVal\), top: expected another name"):
        net_of("AbsVal", in_place=True)
