"""Runs of layers with batch norms whose slices of the batch go abreast: the same numbers to rounding, in fewer bytes."""

import functools

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_nets import SPREAD, Choosing, assert_same, conv, iterate, layer, loss, made, nets_at_random, norm

from blobmem import SimulatedDevice
from blobmem.errors import OutOfDeviceMemory, SharedBlobError
from blobmem.memory import Intent
from blobmem.net.plan import levels
from blobmem.net.plan.abreast import Abreast, run_about
from blobmem.net.plan.places import draft
from blobmem.ops.registry import table

pytestmark = pytest.mark.usefixtures("few_plans")

DATA = """
name: "deep" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {
  data_filler { type: "gaussian" std: 2 } data_filler { type: "gaussian" }
  shape { dim: 8 dim: 4 dim: 8 dim: 8 } shape { dim: 8 dim: 4 } } }
"""
NEVER = 1 << 40


def block(name, bottom, outputs, projected):
    """A residual block with batch norms: one convolution wide, two narrow, and a sum."""
    a, b, c = f"{name}a", f"{name}b", f"{name}c"
    text, other = "", bottom
    if projected:
        other = f"{name}p"
        text += conv(other, bottom, outputs=outputs) + norm(other, relu=False)
    text += conv(a, bottom, outputs=4) + norm(a) + conv(b, a, outputs=4) + norm(b)
    text += conv(c, b, outputs=outputs) + norm(c, relu=False)
    return text + layer("Eltwise", name, f"{other} {c}", name) + layer("ReLU", f"{name}r", name, name)


POOL = layer("Pooling", "pool", "c", "pool", "pooling_param { kernel_size: 2 stride: 2 }")
NET = (
    DATA + conv("c", "data", outputs=8) + norm("c") + POOL + block("x", "pool", 16, True)
    + block("y", "x", 16, False) + conv("z", "y", outputs=8) + norm("z", scale=False) + conv("e", "z") + loss("e")
)  # fmt: skip


def simulated(capacity=None):
    return SimulatedDevice(capacity)


def emulated(capacity=None):
    device = EmulatedCuda(capacity)
    device.channels_last = False
    return device


def channels_last(capacity=None):
    device = EmulatedCuda(capacity)
    device.channels_last = True
    return device


SIMULATED = pytest.param(simulated, id="simulated")
EMULATED = pytest.param(emulated, id="emulated", marks=needs_compiler)
LAST = pytest.param(channels_last, id="channels last", marks=needs_compiler)
CUDA = pytest.param(lambda limit=None: EXACT_GPU.values[0](limit=limit), id="cuda", marks=EXACT_GPU.marks)


@pytest.fixture(params=[SIMULATED, EMULATED, LAST, CUDA])
def make(request):
    return request.param


@pytest.fixture
def abreast(monkeypatch):
    """Lets nets take those layers in slices, whatever room there is."""

    def take(number, twice=NEVER, first="c", last="zr", largest=0):
        def fit(net, usual):
            net._abreast = Abreast(*map(net.layer_names.index, (first, last)), number, twice, 0, largest)
            found = net._made(streams=1)
            assert found.sliced is not None and [run.number for run in found.sliced.runs] == [number]
            found.drawn = draft(net, found.schedules, found.kept)
            return found

        monkeypatch.setattr(levels, "fit", fit)

    return take


def assert_close(one, other):
    """Numbers of one pass, to rounding; what cancels, as in the gradient of a bias before a batch norm, to that of the
    largest."""
    assert len(one) == len(other) > 0
    rounding = 2e-7 * max(np.abs(each).max() for each in other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(2e-5 * np.abs(b).max(), rounding))


@functools.cache
def whole(text, make):
    """An iteration with the whole batch."""
    return iterate(made(text, make(), "train"))


@pytest.mark.parametrize("twice", [NEVER, 0, 1 << 13], ids=["once", "twice", "large ones twice"])
@pytest.mark.parametrize("number, largest", [(2, 0), (4, 0), (4, 1 << 12)], ids=["2", "4", "4 and 2"])
def test_numbers_are_those_of_the_whole_batch(make, abreast, number, largest, twice):
    expected = whole(NET, make)
    abreast(number, twice, largest=largest)
    net = made(NET, make(), "train")
    first = iterate(net)
    assert_close(first, expected)
    assert len(first) == len(expected)
    again = made(NET, make(), "train")
    assert_same(iterate(again), first)  # the same slices, the same bits
    kept = made_whole(make)
    for name in ("cn", "zn"):  # statistics that run on
        for one, other in zip(net.params[name], kept.params[name], strict=True):
            np.testing.assert_allclose(one.cpu_data(), other.cpu_data(), rtol=1e-5, atol=1e-6)


def test_the_input_of_a_batch_norm_that_others_read_is_there_for_them(make, abreast):
    """Though it is made anew only when somebody reads it, as it is made twice."""
    text = DATA + conv("c", "data", outputs=8) + layer("BatchNorm", "n", "c", "n") + conv("z", "c", outputs=8)
    text += norm("z", scale=False) + conv("e", "z") + loss("e")
    expected = whole(text, make)
    abreast(2, twice=0)
    assert_close(iterate(made(text, make(), "train")), expected)


def made_whole(make):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "fit", lambda net, usual: usual)
        net = made(NET, make(), "keep")
        iterate(net)
        return net


EVEN = SPREAD.replace("dim: 3 dim: 2 dim: 6 dim: 5 } shape { dim: 3", "dim: 4 dim: 2 dim: 8 dim: 8 } shape { dim: 4")


@settings(max_examples=60, deadline=None)
@given(
    text=nets_at_random(data=EVEN, axis=1, shape="dim: 2 dim: 8 dim: 8"),
    twice=st.sampled_from([NEVER, 0, 1 << 10]), place=st.integers(0, 99), number=st.sampled_from([2, 4]),
    largest=st.sampled_from([0, 1 << 10, 1 << 11, 1 << 12]),
)  # fmt: skip
def test_any_net_gives_the_numbers_of_the_whole_batch(text, twice, place, number, largest):
    def fit(net, usual):
        emitted, ops = net._emitted_with({}), table(net.device.family)
        runs = {run_about(emitted.forward, emitted.backward, at, ops) for at in range(len(net.layer_names))}
        runs = sorted((run for run in runs if run), key=lambda run: -len(run))
        if not runs:
            return usual
        run = runs[place % len(runs)]
        net._abreast = Abreast(run.start, run.stop - 1 - place % 3, number, twice, 0, largest)
        found = net._made(streams=1)
        found.drawn = draft(net, found.schedules, found.kept)
        return found

    with pytest.MonkeyPatch.context() as patch:
        expected = iterate(made(text, SimulatedDevice(), "train"))
        patch.setattr(levels, "fit", fit)
        assert_close(iterate(made(text, SimulatedDevice(), "train")), expected)


@pytest.mark.parametrize(
    "twice, part, seed, rounds", [(NEVER, 0.5, 0, False), (0, 0.5, 1, True), (0, 1, 2, False), (NEVER, 1, 3, True)]
)
def test_slices_of_two_sizes_are_made_anew_to_the_same_bits(make, abreast, monkeypatch, twice, part, seed, rounds):
    """Those that parts of others fill, too."""
    abreast(4, twice, largest=1 << 12)
    nets = [made(NET, make(), "train") for _ in range(2)]
    traces = [[*iterate(nets[0]), *iterate(nets[0])]]
    choosing = Choosing(monkeypatch, seed, part, rounds)
    traces.append([*iterate(nets[1]), *iterate(nets[1])])
    assert_same(*traces)
    filled = {each.name for call in nets[0].compiled()[0].calls for each in parts_filled(call)}
    assert filled and (part < 1 or filled <= {*choosing.again[-1]})


def parts_filled(call):
    """The slices of which a call fills a part."""
    operands = [each for each in call.present() if each.part is not None and each.intent is Intent.OVERWRITE]
    return [each.memory for each in operands if "(slice" in each.memory.name]


# -------------------------------------------------------------------- under a limit

LARGE = (
    DATA.replace("dim: 8", "dim: 4", 1).replace("shape { dim: 8 dim: 4 }", "shape { dim: 4 dim: 4 }")
    + conv("c", "data", outputs=8) + norm("c") + block("x", "c", 32, True)
    + layer("Pooling", "small", "x", "small", "pooling_param { kernel_size: 4 stride: 4 }") + conv("e", "small")
    + loss("e")
)  # fmt: skip


@functools.cache
def least(make):
    """The least limit that does, as the error says."""
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        made(LARGE, make(1), "train").compiled()
    return caught.value.requested


@pytest.mark.parametrize("make", [SIMULATED, EMULATED, LAST])
def test_a_net_trains_in_less_than_its_batch_norms_take_whole(make, monkeypatch):
    net = made(LARGE, make(least(make)), "train")
    assert_close(iterate(net), iterate(made(LARGE, make(), "train")))
    assert net.device.statistics.peak_bytes <= least(make) and net._sliced is not None
    before = net.device.statistics.snapshot()
    iterate(net)
    assert (net.device.statistics - before).allocator_calls == 0
    monkeypatch.setattr(levels, "_abreast", lambda *_: [])
    with pytest.raises(OutOfDeviceMemory, match="needs at least"):
        made(LARGE, make(least(make)), "train").compiled()


def pooled(name, bottom):
    return layer("Pooling", name, bottom, name, "pooling_param { kernel_size: 2 stride: 2 }")


DEEP = (
    DATA.replace("dim: 8 dim: 4 dim: 8 dim: 8", "dim: 16 dim: 4 dim: 16 dim: 16").replace("{ dim: 8", "{ dim: 16")
    + conv("c", "data", outputs=16) + norm("c") + block("x", "c", 32, True) + block("y", "x", 32, False)
    + pooled("p", "y") + block("z", "p", 32, True) + pooled("q", "z") + block("v", "q", 32, True)
    + layer("Pooling", "small", "v", "small", "pooling_param { kernel_size: 4 stride: 4 }") + conv("e", "small")
    + loss("e")
)  # fmt: skip


def test_what_is_smaller_is_in_fewer_slices_and_leaves_and_comes_as_such():
    whole = made(DEEP, simulated(), "train")
    expected = iterate(whole)
    net = made(DEEP, simulated(whole.device.statistics.peak_bytes // 5), "train")
    assert_close(iterate(net), expected)
    calls = [call for schedule in net.compiled() for call in schedule.calls]
    names = [each.memory.name for call in calls if call.op == "evict" for each in call.present()]
    of = {int(name.rpartition(" of ")[2].partition(")")[0]) for name in names if "(slice" in name}
    assert len(of) > 1 and max(of) == net._sliced.runs[0].number
    assert net.device.statistics.peak_bytes <= whole.device.statistics.peak_bytes // 5


def test_layers_amid_the_slices_are_not_run_alone():
    net = made(LARGE, simulated(least(simulated)), "train")
    iterate(net)
    with pytest.raises(SharedBlobError, match="in 4 slices of the batch"):
        net.run_forward(net.layer_names.index("xa"), net.layer_names.index("xb"))
    with pytest.raises(SharedBlobError, match="a slice of the batch of it at a time"):
        _ = net.blobs["x"].data
