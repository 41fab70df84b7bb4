"""Moments and gradients of batch norms behind 1x1 convolutions, had from what these convolve: the same to rounding, and
nobody reads the larger array."""

import numpy as np
import pytest
from cuda_devices import GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from plan_nets import SCALE, assert_same, conv, iterate, layer, loss, made, norm

from blobmem.errors import SharedBlobError
from blobmem.net.plan import levels, sources
from blobmem.net.plan.abreast import MOMENTS, SETTLES, Abreast
from blobmem.net.plan.places import draft

pytestmark = pytest.mark.usefixtures("few_plans")

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
    return layer("Convolution", name, bottom, name, options) + norm(name, scale, relu)


def block(name, bottom, projected=True, scale=SCALE):
    """A residual block with one wide convolution, or two."""
    a, b, c, p = (f"{name}{each}" for each in "abcp")
    text = wide(p, bottom, scale=scale) if projected else ""
    text += wide(a, bottom, 4, relu=True) + wide(b, a, 4, "kernel_size: 3 pad: 1", relu=True) + wide(c, b, scale=scale)
    return (
        text + layer("Eltwise", name, f"{p if projected else bottom} {c}", name) + layer("ReLU", f"{name}r", name, name)
    )


def net_of(scale=SCALE):
    pool = layer("Pooling", "q", "data", "q", "pooling_param { kernel_size: 3 stride: 1 pad: 1 }")
    blocks = block("x", "q", scale=scale) + block("y", "x", projected=False, scale=scale)
    return DATA + norm("data") + pool + blocks + conv("e", "y") + loss("e")


def emulated(last, exact, limit):
    device = EmulatedCuda(limit)
    device.channels_last, device.deterministic = last, exact
    return device


def channels_second(limit=None, exact=False):
    return emulated(False, exact, limit)


def channels_last(limit=None, exact=False):
    return emulated(True, exact, limit)


def on_gpu(limit=None, exact=False):
    return GPU.values[0](limit=limit, deterministic=exact)


@pytest.fixture(params=[
    pytest.param(channels_second, marks=needs_compiler), pytest.param(channels_last, marks=needs_compiler),
    pytest.param(on_gpu, marks=GPU.marks),
])  # fmt: skip
def make(request):
    return request.param


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(sources, "LONG", 1)


@pytest.fixture
def short(monkeypatch):
    """Lets nets have gradients so whatever room there is, and that many slices of the batch abreast."""

    def take(number=1, twice=1 << 40):
        def fit(net, usual):
            if not net.take_sources():
                return usual
            if number > 1:
                net.take_abreast(Abreast(*map(net.layer_names.index, ("xp", "yr")), number, twice))
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


@pytest.mark.parametrize("number, twice", [(1, 1), (2, 1 << 40), (4, 1 << 40), (4, 1)])
@pytest.mark.parametrize(
    "scale", [SCALE, "", "scale_param { bias_term: false }"], ids=["shifted", "unscaled", "scaled"]
)
def test_numbers_are_the_usual_ones_to_rounding(make, short, number, twice, scale):
    text = net_of(scale)
    expected = iterate(made(text, make(), "train"))
    short(number, twice)
    net = made(text, make(), "train")
    first = iterate(net)
    assert_close(first, expected)
    assert ops_of(net).count(SETTLES) == ops_of(net).count(MOMENTS) == 3
    ran = [step.call.op for step in net.compiled()[1]._program()]
    assert ("sums_relu_bias_backward" in ran) == net._images_last  # x is split, and its ReLU just before
    assert_same(iterate(made(text, make(), "train")), first)


def test_what_nobody_reads_is_not_there(make, short):
    short()
    net = made(net_of(), make(), "train")
    iterate(net)
    for layer_name in ("xpn", "xcn", "ycn"):
        assert all(f"{layer_name}/normalized" not in operand.memory.name for operand in operands(net))
    with pytest.raises(SharedBlobError, match="xc"):
        _ = net.blobs["xc"].diff


def operands(net):
    return [operand for schedule in net.compiled() for each in schedule.calls for operand in each.present()]


@pytest.mark.parametrize("text", [
    net_of().replace("num_output: 16", "num_output: 7"),  # too few
    net_of().replace("num_output: 16 kernel_size: 1", "num_output: 16 kernel_size: 3 pad: 1"),
    net_of().replace("num_output: 16 kernel_size: 1", "num_output: 16 kernel_size: 1 group: 2"),
    net_of().replace("num_output: 16 kernel_size: 1 bias_term: false", "num_output: 16 kernel_size: 1"),
    net_of().replace(norm("data"), "").replace(norm("xb"), "").replace(norm("yb"), ""),  # what is convolved may be large
], ids=["narrow", "windows", "groups", "bias", "not normalised"])  # fmt: skip
@needs_compiler
def test_others_stay_as_they_are(short, text):
    short()
    expected = iterate(made(text, channels_last(), "keep"))
    net = made(text, channels_last(), "train")
    assert_close(iterate(net), expected)
    assert not {MOMENTS, SETTLES} & {*ops_of(net)}


@needs_compiler
@pytest.mark.parametrize("make", [channels_second, channels_last])
def test_it_is_for_where_there_is_no_room_and_bits_may_differ(make):
    mean = layer("Pooling", "p", "e", "p", "pooling_param { pool: AVE global_pooling: true }")
    text = net_of().replace(
        loss("e"), mean + layer("Flatten", "f", "p", "f") + layer("EuclideanLoss", "loss", "f t", "loss")
    )
    text = text.replace("dim: 6 dim: 8", "dim: 24 dim: 32")

    def run(limit=None, exact=False):
        net = made(text, make(limit, exact), "train")
        trace = iterate(net)
        return trace, net.device.statistics.peak_bytes, SETTLES in ops_of(net)

    expected, needed, there = run()
    assert not there
    limit = int(0.6 * needed)
    found, peak, there = run(limit)
    assert there and peak <= limit
    assert_close(found, expected)
    exact, _, there = run(limit, exact=True)
    assert not there
    assert_same(exact, run(exact=True)[0])
