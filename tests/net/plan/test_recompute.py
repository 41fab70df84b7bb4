"""Tops of normalisations that are made anew for backward: the same bits, only where nobody can tell, and what it saves."""

import importlib
import logging
import math

import numpy as np
import pytest
from cuda_devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_nets import DATA, ask_at_random, assert_same, conv, iterate, layer, lives_on, loss, made, remade

from benchmarks.inputs import solver_of, with_inputs
from blobmem import Blob, Layer, SharedBlobError, SimulatedDevice, register_layer
from blobmem.devices import HOST
from blobmem.memory import Side
from blobmem.net.emitted import calls_of
from blobmem.net.plan import Lifetime
from blobmem.net.plan.again import Less
from blobmem.net.plan.ways import again_in, usual_ways
from blobmem.net.sharing import Spent
from blobmem.ops.call import call, overwrite, overwrite_diff, read, read_diff

RECOMPUTE = importlib.import_module("blobmem.net.plan.recompute")  # the package has a function of that name
SHARE = RECOMPUTE.SHARE
SCALE = """scale_param { bias_term: true filler { type: "gaussian" mean: 1 std: 0.3 }
  bias_filler { type: "gaussian" std: 0.3 } }"""


NORM = layer("BatchNorm", "bn", "c", "c")
SCALED = NORM + layer("Scale", "s", "c", "c", SCALE)
WHOLE = SCALED + layer("ReLU", "r", "c", "c")


BEFORE, AFTER = conv("c", "data"), conv("d", "c") + loss("d")


def net_of(middle, more=AFTER, before=BEFORE):
    return DATA + before + middle + more


RELU = layer("ReLU", "r", "c", "c")
NEXT = WHOLE.replace('"c"', '"d"').replace('name: "', 'name: "2')
BESIDE = NORM.replace('top: "c"', 'top: "n"') + WHOLE[len(NORM) :].replace('"c"', '"n"')
SCALED_ASIDE = NORM + layer("Scale", "s", "c", "n", SCALE)


def normalised(name, bottom, relu=False):
    """A convolution and its normalisation."""
    chain = (WHOLE if relu else SCALED).replace('"c"', f'"{name}"').replace('name: "', f'name: "{name}')
    return conv(name, bottom) + chain


def summed(name, bottoms, options=""):
    return layer("Eltwise", name, bottoms, name, options) + layer("ReLU", f"{name}r", name, name)


NO_RELU = (layer("ReLU", "xr", "x", "x"), "")
WEIGHTED = ('type: "Eltwise"', 'type: "Eltwise" eltwise_param { coeff: 0.3 coeff: -1.7 }')
JOINED = ('type: "Eltwise"', 'type: "Concat"')
BLOCK = normalised("p", "data") + normalised("a", "data", relu=True) + normalised("b", "a") + summed("x", "p b")
"""A residual block with a projection."""
BLOCKS = BLOCK + "".join(
    normalised(f"a{i}", bottom, relu=True) + normalised(f"b{i}", f"a{i}") + summed(f"x{i}", f"{bottom} b{i}")
    for i, bottom in enumerate(("x", "x0"))
)
"""Three of them."""
CHAINS = {
    "norm, scale": (net_of(SCALED), 1),
    "norm, relu": (net_of(NORM + RELU), 1),
    "norm, scale, relu": (net_of(WHOLE), 1),
    "leaky": (net_of(SCALED + layer("ReLU", "r", "c", "c", "relu_param { negative_slope: 0.1 }")), 1),
    "rising": (net_of(SCALED + layer("ReLU", "r", "c", "c", "relu_param { negative_slope: -0.1 }")), 1),
    "no bias": (net_of(NORM + layer("Scale", "s", "c", "c") + RELU), 1),
    "not in place": (net_of(BESIDE, conv("d", "n") + loss("d")), 1),
    "of the gradient alone": (
        net_of(WHOLE, layer("Eltwise", "e", "c b", "e") + loss("e"), BEFORE + conv("b", "data")),
        1,
    ),
    "read twice": (net_of(WHOLE, conv("d", "c") + conv("e", "c") + layer("Concat", "f", "d e", "f") + loss("f")), 1),
    "scale not in place": (net_of(SCALED_ASIDE, conv("d", "n") + loss("d")), 1),
    "a sum": (net_of(BLOCK, conv("c", "x") + loss("c"), ""), 3),  # p anew and in x's own array, b beside
    "sums": (net_of(BLOCKS, conv("c", "x1") + loss("c"), ""), 7),  # b0 and b1 in what is summed
    "a sum alone": (net_of(BLOCK.replace(*NO_RELU), conv("c", "x") + loss("c"), ""), 3),
    "a weighted sum": (net_of(BLOCK.replace(*WEIGHTED), conv("c", "x") + loss("c"), ""), 3),
    "joined": (net_of(BLOCK.replace(*JOINED), conv("c", "x") + loss("c"), ""), 4),
    "of what is read later": (
        net_of(
            conv("a", "data") + layer("ReLU", "ar", "a", "a") + normalised("b", "a") + summed("x", "a b"),
            conv("c", "x") + loss("c"),
            "",
        ),
        1,
    ),
    "summed twice": (
        net_of(BLOCK + normalised("e", "x") + summed("y", "p e"), conv("c", "y") + loss("c"), ""),
        4,  # p has an array of its own, e is made in y's
    ),
    "summed in place": (
        net_of(
            normalised("a", "data", relu=True) + normalised("b", "a", relu=True) + normalised("q", "data"),
            layer("Eltwise", "x", "a b", "x") + layer("Eltwise", "i", "x q", "x") + conv("c", "x") + loss("c"),
            "",
        ),
        4,  # q, which the second step needs, has an array of its own
    ),
    "one after another": (net_of(WHOLE, conv("d", "c") + NEXT + conv("f", "d") + loss("f")), 2),
}
"""What becomes of c (or n, or x), and how many arrays are made anew."""


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch):
    """Of small nets, where making an array anew is much of what a pass does."""
    monkeypatch.setattr(RECOMPUTE, "SHARE", math.inf)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_bits(device, name):
    text, count = CHAINS[name]
    nets = [made(text, device, memory) for memory in ("keep", "train")]
    kept, net = ([*iterate(each), *iterate(each)] for each in nets)
    assert_same(net, kept)
    assert np.isfinite(np.concatenate([np.ravel(each) for each in kept])).all()
    assert len(remade(nets[1])) == count and remade(nets[0]) == []
    top = next(each for each in "nxc" if each in nets[1].blobs)
    assert lives_on(nets[0], top) and not lives_on(nets[1], top)


@pytest.mark.parametrize("name", ["norm, scale, relu", "one after another"])
def test_after_a_reshape_too(device, name):
    traces = []
    for memory in ("keep", "train"):
        text = CHAINS[name][0].replace('"DummyData"', '"Input"').replace("dummy_data_param", "input_param")
        net, trace = made(text.replace('data_filler { type: "gaussian" }', ""), device, memory), []
        for batch in (3, 5, 2):
            rng = np.random.default_rng(batch)
            for blob in (net.blobs["data"], net.blobs["t"]):
                blob.reshape(batch, *blob.shape[1:])
                blob.data[...] = rng.standard_normal(blob.shape)
            trace += iterate(net)
        traces.append(trace)
    assert_same(*traces)


KINDS = {
    "conv": ("Convolution", "convolution_param { num_output: 2 kernel_size: 1 weight_filler { type: 'xavier' } }"),
    "norm": ("BatchNorm", ""), "scale": ("Scale", SCALE), "relu": ("ReLU", ""), "sum": ("Eltwise", ""),
    "leaky": ("ReLU", "relu_param { negative_slope: 0.1 }"), "drop": ("Dropout", ""), "join": ("Concat", ""),
    "pool": ("Pooling", "pooling_param { kernel_size: 3 stride: 1 pad: 1 }"),
}  # fmt: skip
WHOLE_BLOCK = ["conv", "norm in place", "scale in place", "relu in place"]


@st.composite
def nets_at_random(draw):
    """Branches of images of one size, normalised, summed, joined and pooled, in place or not."""
    text, blobs, read = DATA.replace('"gaussian"', '"gaussian" std: 2'), ["data"], {"data"}
    places = [*KINDS, *(f"{kind} in place" for kind in ("norm", "scale", "relu", "leaky", "drop"))]
    for part in range(draw(st.integers(2, 8))):
        bottom = draw(st.sampled_from(blobs))
        kinds = draw(
            st.one_of(st.just(WHOLE_BLOCK), st.just(WHOLE_BLOCK[:3]), st.lists(st.sampled_from(places), max_size=3))
        )
        for index, kind in enumerate(kinds):
            kind, name = kind.removesuffix(" in place"), f"l{part}{index}"
            top = bottom if kinds[index].endswith("in place") and bottom not in read else name
            bottoms = [bottom, draw(st.sampled_from(blobs))] if kind in ("sum", "join") else [bottom]
            text += layer(KINDS[kind][0], name, " ".join(bottoms), top, KINDS[kind][1])
            if kind == "join":  # and back to the channels that all have
                text += conv(f"{name}c", top, outputs=2)
            read |= {*bottoms} - {top}
            bottom = f"{name}c" if kind == "join" else top
            blobs += [bottom] * (bottom not in blobs)
    return text + loss(blobs[-1])


@given(nets_at_random(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_any_net_gives_the_same_bits(text, simulated):
    nets = [made(text, SimulatedDevice() if simulated else HOST, memory) for memory in ("keep", "train")]
    assert_same(*([*iterate(net), *iterate(net)] for net in nets))


# -------------------------------------------------------------------- where somebody could tell


@register_layer
class LooksOnHost(Layer):
    """y = x, by functions, which may look at more than their operands."""

    type = "LooksOnHost"

    def reshape(self, bottom, top):
        top[0].reshape_like(bottom[0])

    def forward(self, bottom, top):
        yield call(lambda x, y: np.copyto(y, x), read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom, top, propagate_down):
        yield call(
            lambda x, dy, dx: np.multiply(dy, np.sign(x), out=dx),
            read(bottom[0]), read_diff(top[0]), overwrite_diff(bottom[0]),
        )  # fmt: skip


GLOBAL = "batch_norm_param { use_global_stats: true }"
OTHER = "reshape_param { shape { dim: 0 dim: 2 dim: -1 dim: 5 } }"
SUM, LAST = layer("Eltwise", "x", "a b", "x"), conv("c", "x") + loss("c")
LEFT = {
    "norm alone": (net_of(NORM), {}),
    "kept": (net_of(WHOLE), {"keep": ["c"]}),
    "an output": (net_of(SCALED, layer("ReLU", "r", "c", "c", "loss_weight: 1")), {}),
    "fixed statistics": (net_of(WHOLE.replace('type: "BatchNorm"', f'type: "BatchNorm" {GLOBAL}')), {}),
    "changed once more": (net_of(WHOLE + layer("Dropout", "drop", "c", "c")), {}),
    "read on the host": (net_of(WHOLE, layer("LooksOnHost", "p", "c", "p") + conv("d", "p") + loss("d")), {}),
    "seen in another shape": (net_of(WHOLE, layer("Reshape", "f", "c", "f", OTHER) + conv("d", "f") + loss("d")), {}),
    "of what is kept": (
        net_of(
            conv("a", "data") + RELU.replace('"c"', '"a"') + conv("b", "a") + RELU.replace('"c"', '"b"') + SUM, LAST, ""
        ),
        {"keep": ["a"]},
    ),
    "scaled by a blob": (
        net_of(
            NORM + layer("Scale", "s", "c g", "c", "scale_param { axis: 0 }"),
            AFTER,
            BEFORE + layer("Power", "g", "t", "g"),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_is_left_as_it_is(device, name):
    text, options = LEFT[name]
    nets = [made(text, device, memory, **more) for memory, more in (("keep", {}), ("train", options))]
    assert_same(*([*iterate(each), *iterate(each)] for each in nets))
    assert remade(nets[1]) == []
    if name in ("kept", "an output"):
        assert_same([nets[1].blobs["c"].cpu_data()], [nets[0].blobs["c"].cpu_data()])


def test_is_left_where_others_have_a_view(device):
    net, kept = (made(CHAINS["norm, scale, relu"][0], device, memory) for memory in ("train", "keep"))
    mine = Blob(3, 4, 6, 5, device=device)
    mine.share_data(net.blobs["c"])
    assert_same(iterate(net), iterate(kept))
    assert remade(net) == []
    assert_same([mine.cpu_data()], [kept.blobs["c"].cpu_data()])


def test_a_layer_that_reads_what_was_there_before_is_warned_of(device, caplog):
    """Where a user has laid the ReLU's top over c, which another layer has read before."""
    early = layer("Power", "early", "c", "e", "power_param { power: 2 }")
    more = early + layer("ReLU", "r", "c", "r") + layer("Eltwise", "sum", "r e", "sum") + loss("sum")
    traces = []
    for memory in ("keep", "train"):
        net = made(net_of(SCALED, more), device, memory)
        net.blobs["r"].share_data(net.blobs["c"])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "blobmem"):
            traces.append(iterate(net))
        assert "the gradient of layer 'early' reads" in caplog.text and "bn/recomputed" not in remade(net)
    assert_same(*traces)


# -------------------------------------------------------------------- passes in parts


def test_layer_by_layer_and_with_callbacks_and_debug_info(device, caplog):
    """What is there has the numbers that it has in a net that keeps all."""
    text, seen, lines, grads = CHAINS["one after another"][0], {}, [], []
    for memory in ("keep", "train"):
        net, numbers = made(text, device, memory), seen.setdefault(memory, {})

        def look(index, net=net, numbers=numbers):
            for name, blob in net.blobs.items():
                try:
                    numbers[len(numbers), index, name] = blob.cpu_data().copy()
                except SharedBlobError:
                    numbers[len(numbers), index, name] = None

        net.after_forward(look)
        net.after_backward(look)
        net.debug_info = True
        caplog.clear()
        with caplog.at_level(logging.INFO, "blobmem"):
            trace = iterate(net)
        lines.append([record.getMessage() for record in caplog.records])
        plain = made(text, device, memory)
        plain.clear_param_diffs()
        for index in range(len(plain.nodes)):
            plain.run_forward(index, index)
        for index in reversed(range(len(plain.nodes))):
            plain.run_backward(index, index)
        grads.append([*trace, *(entry.blob.cpu_diff() for entry in plain.learnable)])
    assert_same(*grads)
    assert lines[0] == lines[1] and len(lines[0]) > 20
    there = {place for place, values in seen["train"].items() if values is not None}
    assert seen["train"].keys() == seen["keep"].keys() and len(there) > len(seen["keep"]) // 3
    for place in there:
        np.testing.assert_array_equal(seen["train"][place], seen["keep"][place], err_msg=str(place))


def position(net, name):
    return net.layer_names.index(name)


def test_an_array_of_the_pass_before_is_not_taken(device):
    """It is there for the rest of its own backward pass, and no longer."""
    net, kept = (made(CHAINS["norm, scale, relu"][0], device, memory) for memory in ("train", "keep"))
    for each in (net, kept):
        each.run_forward()
        each.run_backward(last=position(net, "d"))
    array = net.internals["bn/recomputed"]
    assert_same([array.cpu_data()], [kept.blobs["c"].cpu_data()])
    net.run_forward(last=0)  # which leaves its bytes alone
    assert isinstance(array.data_view.memory.writer, Spent)
    net.run_forward()
    with pytest.raises(SharedBlobError, match=r"'bn/recomputed' of net.* has no bytes now.*keep=\['c'\]"):
        array.cpu_data()
    with pytest.raises(SharedBlobError, match="would read 'c"):
        net.run_backward(first=position(net, "r"))
    iterate(net)
    assert isinstance(array.data_view.memory.writer, Spent)


PARTS = [
    [("data", "r"), ("s", "loss")],
    [("data", "r"), ("r", "loss")],
    [("data", "bn"), ("r", "loss")],
    [("data", "loss"), ("data", "c")],
    [("data", "loss"), ("data", "bn")],
]


@pytest.mark.parametrize("parts", PARTS)
def test_a_top_that_was_made_otherwise_is_not_made_anew(device, parts):
    net, kept = (made(CHAINS["norm, scale, relu"][0], device, memory, keep=["d"]) for memory in ("train", "keep"))
    for ends in parts:
        net.run_forward(*(position(net, name) for name in ends))
    with pytest.raises(SharedBlobError, match=r"would make 'c' anew.*keep=\['c'\]"):
        net.run_backward(first=position(net, "d"))
    net.state.iteration = 0
    for blob in net.params["bn"]:
        blob.data[...] = 0
    assert_same(iterate(net), iterate(kept))


def test_a_sum_of_what_was_made_otherwise_is_not_made_anew(device):
    """A part of forward has scaled twice what is summed."""
    net = made(CHAINS["a sum"][0], device, "train", keep=["c"])
    net.run_forward(last=position(net, "ps"))
    net.run_forward(position(net, "ps"))
    with pytest.raises(SharedBlobError, match="would make 'p' anew"):
        net.run_backward(first=position(net, "c"))


@pytest.mark.parametrize(
    "parts",
    [
        [("data", "bn"), ("s", "s"), ("r", "loss")],
        [("data", "c"), ("bn", "loss")],
        [("data", "r"), ("bn", "loss")],  # of what is there, once more
    ],
)
def test_parts_that_follow_each_other_are_a_pass(device, parts):
    net, kept = (made(CHAINS["norm, scale, relu"][0], device, memory) for memory in ("train", "keep"))
    for each in (net, kept):
        for ends in parts:
            each.run_forward(*(position(each, name) for name in ends))
        each.run_backward()
    assert_same(*([entry.blob.cpu_diff() for entry in each.learnable] for each in (net, kept)))


WAYS = ["forward", "start", "between", "backward", "down from", "down to", "layer by layer"]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_the_same_numbers_or_an_error(device, seed):
    net, kept = (made(CHAINS["one after another"][0], device, memory, keep=["d"]) for memory in ("train", "keep"))
    ask_at_random(seed, net, kept, WAYS)


# -------------------------------------------------------------------- what it saves


def test_one_array_of_each_normalisation_lives_from_forward_to_backward():
    """Blocks of a convolution and its normalisation, all of one size: what is kept, and a few at a time."""
    sizes = []
    for blocks in (6, 12):
        text, bottom = DATA.replace("dim: 6 dim: 5", "dim: 64 dim: 64"), "data"
        for index in range(blocks):
            name = f"c{index}"
            text += conv(name, bottom) + WHOLE.replace('"c"', f'"{name}"').replace('name: "', f'name: "{name}')
            bottom = name
        net = made(text + loss(bottom), SimulatedDevice(compute=False), "train")
        sizes.append(net.planned().nbytes)
    size = 4 * 3 * 4 * 64 * 64
    statistics = 6 * 2 * 512  # mean and inverse deviation of a block, each at a multiple of 512 bytes
    assert sizes[1] - sizes[0] == pytest.approx(6 * size + statistics, abs=2 * 512 * 6)
    assert sizes[0] < (6 + 4) * size


def test_what_saves_most_is_made_anew_up_to_a_share_of_what_the_pass_moves(monkeypatch):
    """Of two sums and three tops of normalisations, which save a byte for two that are moved, not for three."""
    text, counts = CHAINS["sums"][0], []
    forward, backward = calls_of(made(text, SimulatedDevice(), "keep").nodes)
    moved = sum(operand.view.nbytes for each in (*forward, *backward) for operand in each.present())
    for share in (0, 0.02, 0.03, 0.05, 0.1, math.inf):
        monkeypatch.setattr(RECOMPUTE, "SHARE", share)
        net = made(text, SimulatedDevice(), "train")
        net.needs(backward=True)
        anew = net._recompute(net._emit({}), None).backward
        more = sum(operand.view.nbytes for each in anew for operand in each.present())
        more -= sum(operand.view.nbytes for each in backward for operand in each.present())
        counts.append(len(remade(net)))
        assert more <= 2 * share * moved  # some are passed over more than once, one by one
    assert counts[0] == 0 and counts == sorted(counts) and len(set(counts)) > 2


def test_where_there_is_little_room_as_much_more_or_nothing_may_be_spent():
    """What is tried then: the usual share of what the pass moves, nothing of it, and any."""
    net = made(CHAINS["sums"][0], SimulatedDevice(), "train")
    net.needs(backward=True)
    again = again_in(net, net._made(Less(), 1))
    counts = [len(way.made.backward) for way in usual_ways(net, again, {})]
    assert counts[1] < counts[0] <= counts[2]
    assert counts[1] == len(net._made(Less(), 1).backward) and counts[0] == len(net._made(None, 1).backward)


@pytest.mark.parametrize("model, mebibytes, arrays", [("resnet50", 12986, 40), ("inception_v3", 13776, 65)])
def test_what_models_take_in_a_training_step_of_256(monkeypatch, largest_load, model, mebibytes, arrays):
    """As docs/memory.md says, and hardly more than what is alive at the fullest moment."""
    monkeypatch.setattr(RECOMPUTE, "SHARE", SHARE)
    solver = solver_of(with_inputs(model, 256), memory="train", device=SimulatedDevice(compute=False))
    held = {}
    for memory, side, nbytes in solver.net.needs(backward=True) + solver.updater.needs():
        if side is Side.DEVICE:
            held[memory] = max(held.get(memory, 0), nbytes)
    assert round(sum(held.values()) / 2**20) == mebibytes and len(remade(solver.net)) == arrays
    plan = solver.net.planned()
    lives = [
        Lifetime(None, stop - start, each.first, until)
        for each in plan.tenants
        for (start, stop), until in zip(each.ranges, each.untils, strict=True)
    ]
    assert plan.nbytes <= 1.02 * largest_load(lives)
