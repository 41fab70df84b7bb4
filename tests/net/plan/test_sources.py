"""Gradients of batch norms behind 1x1 convolutions, had from what these convolve: the same to rounding, and nobody reads
the larger array."""

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import SCALE, conv, iterate, layer, loss, made

from blobmem.net.plan import levels, sources
from blobmem.net.plan.abreast import Abreast
from blobmem.net.plan.places import draft

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_price")]

DATA = """
name: "wide" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {
  data_filler { type: "gaussian" std: 2 } data_filler { type: "gaussian" }
  shape { dim: 8 dim: 4 dim: 6 dim: 8 } shape { dim: 8 dim: 4 } } }
"""


def wide(name, bottom, outputs=16, more="kernel_size: 1", scale=SCALE, relu=False):
    """A convolution without a bias, and a batch norm."""
    options = (
        f"convolution_param {{ num_output: {outputs} {more} bias_term: false weight_filler {{ type: 'xavier' }} }}"
    )
    text = layer("Convolution", name, bottom, name, options) + layer("BatchNorm", f"{name}n", name, name)
    text += layer("Scale", f"{name}s", name, name, scale) if scale else ""
    return text + (layer("ReLU", f"{name}r", name, name) if relu else "")


def block(name, bottom, projected=True, scale=SCALE):
    """A residual block with one wide convolution, or two."""
    a, b, c, p = (f"{name}{each}" for each in "abcp")
    text = wide(p, bottom, scale=scale) if projected else ""
    text += wide(a, bottom, 4, relu=True) + wide(b, a, 4, "kernel_size: 3 pad: 1", relu=True) + wide(c, b, scale=scale)
    return (
        text + layer("Eltwise", name, f"{p if projected else bottom} {c}", name) + layer("ReLU", f"{name}r", name, name)
    )


def net_of(scale=SCALE):
    blocks = block("x", "data", scale=scale) + block("y", "x", projected=False, scale=scale)
    return DATA + blocks + conv("e", "y") + loss("e")


def device_of(last=False, exact=False, limit=None):
    device = EmulatedCuda(limit)
    device.channels_last, device.deterministic = last, exact
    return device


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(sources, "LONG", 1)


@pytest.fixture
def short(monkeypatch):
    """Lets nets have gradients so whatever room there is, and that many slices of the batch abreast."""

    def take(number=1):
        def fit(net, usual):
            if not net.take_sources():
                return usual
            if number > 1:
                net.take_abreast(Abreast(*map(net.layer_names.index, ("xp", "yr")), number, 1 << 40))
            found = net._made(streams=1)
            assert (found.sliced is not None) == (number > 1)
            found.drawn = draft(net, found.schedules, found.kept)
            return found

        monkeypatch.setattr(levels, "fit", fit)

    return take


def ops_of(net):
    return [str(each.op) for schedule in net.compiled() for each in schedule.calls]


def assert_close(one, other):
    assert len(one) == len(other) > 0
    most = max(np.abs(np.asarray(each)).max() for each in other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=max(1e-4 * np.abs(b).max(), 1e-6 * most))


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("last", [False, True], ids=["channels second", "channels last"])
@pytest.mark.parametrize(
    "scale", [SCALE, "", "scale_param { bias_term: false }"], ids=["shifted", "unscaled", "scaled"]
)
def test_numbers_are_the_usual_ones_to_rounding(short, last, number, scale):
    text = net_of(scale)
    expected = iterate(made(text, device_of(last), "train"))
    short(number)
    net = made(text, device_of(last), "train")
    assert_close(iterate(net), expected)
    assert ops_of(net).count(sources.SETTLES) == 3
