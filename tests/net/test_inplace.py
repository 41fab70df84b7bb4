"""Chains of in-place layers: those that give wrong gradients are said, and no others."""

import logging

import numpy as np
import pytest

from blobmem import TRAIN, Blob, Net
from blobmem.net.inplace import stale_reads
from blobmem.ops.call import call, overwrite, read

CHAIN = """
force_backward: true
layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 3 }} }} }}
layer {{ name: "first" type: "{first}" bottom: "x" top: "y" }}
layer {{ name: "second" type: "{second}" bottom: "y" top: "{top}" }}
"""


def warnings_of(caplog, first, second, top):
    net = Net(CHAIN.format(first=first, second=second, top=top), TRAIN, seed=1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "blobmem"):
        for _ in range(2):
            net.forward(x=np.ones((2, 3)))
            net.backward(**{top: np.ones((2, 3))})
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("second", ["Dropout", "ReLU", "Sigmoid"])
@pytest.mark.parametrize("first", ["TanH", "Sigmoid", "ELU"])
def test_what_overwrites_an_earlier_gradients_input_is_said_once(caplog, first, second):
    (message,) = warnings_of(caplog, first, second, "y")
    assert "gradient of layer 'first' reads 'y', which layer 'second' has overwritten in place" in message
    assert warnings_of(caplog, first, second, "z") == []


@pytest.mark.parametrize(
    "chain",
    [("ReLU", "Dropout"), ("ReLU", "ReLU"), ("Dropout", "TanH"), ("Scale", "ReLU"), ("BatchNorm", "ReLU")],
    ids=lambda pair: "-".join(pair),
)
def test_chains_that_are_right_are_not(caplog, chain):
    assert warnings_of(caplog, *chain, "y") == []


@pytest.mark.parametrize("chain", [("ReLU", "Dropout"), ("ReLU", "ReLU")], ids=lambda pair: "-".join(pair))
def test_they_are_right(chain):
    values = np.random.default_rng(0).normal(size=(2, 3))
    grads = []
    for top in ("y", "z"):
        net = Net(CHAIN.format(first=chain[0], second=chain[1], top=top), TRAIN, seed=1)
        net.forward(x=values)
        grads.append(net.backward(**{top: values + 3})["x"].copy())
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("top, said", [("y", 1), ("z", 0)])
def test_calls_that_were_moved_among_those_of_other_layers_are_of_their_own(caplog, top, said):
    """As pieces of a gradient are, to where there is time for them."""
    net = Net(CHAIN.format(first="TanH", second="Dropout", top=top), TRAIN, seed=1)
    net.forward(x=np.ones((2, 3)))
    for each in net.compiled()[1].calls:
        each.layer = 0
    with caplog.at_level(logging.WARNING, "blobmem"):
        net.backward(**{top: np.ones((2, 3))})
    assert caplog.text.count("has overwritten in place") == said


def test_what_copies_bring_across_the_turn_is_no_layers():
    """Evicted state that backward needs may come among the calls of any layer of forward."""
    array = Blob((4,))
    bring, write = call("fetch", overwrite(array), home=array.data_view.memory), call("fill", overwrite(array))
    use = call("sgd_update", read(array))
    bring.layer = write.layer = 2
    assert not [*stale_reads([bring], [use])] and [*stale_reads([write], [use])]


BEHIND = """
force_backward: true
layer {{ name: "in" type: "Input" top: "x" top: "label"
  input_param {{ shape {{ dim: 4 dim: 5 }} shape {{ dim: 4 }} }} }}
layer {{ name: "scores" type: "Power" bottom: "x" top: "y" power_param {{ scale: 2 }} }}
layer {{ name: "{type}" type: "{type}" bottom: "y" top: "a" {tops} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "{scores}" bottom: "label" top: "loss" }}
layer {{ name: "behind" type: "ReLU" bottom: "a" top: "{top}" }}
"""


@pytest.mark.parametrize("memory", ["keep", "train"])
@pytest.mark.parametrize("kind", [("Split", 'top: "b"', "b"), ("Flatten", "", "y")], ids=lambda kind: kind[0])
def test_a_loss_keeps_scores_that_a_later_layer_overwrites(caplog, kind, memory):
    """As Caffe's does, which keeps probabilities; and no others."""
    rng = np.random.default_rng(0)
    values, grads, (layer, tops, scores) = rng.normal(size=(4, 5)), [], kind
    for top in ("a", "z"):
        net = Net(BEHIND.format(type=layer, tops=tops, scores=scores, top=top), TRAIN, seed=1, memory=memory)
        assert ("loss/bottom" in net.internals) == (top == "a")
        with caplog.at_level(logging.WARNING, "blobmem"):
            net.forward(x=values, label=np.arange(4))
            grads.append(net.backward()["x"].copy())
    assert grads[0].any() and "of layer 'loss'" not in caplog.text
    np.testing.assert_array_equal(*grads)
