"""Tops of normalisations that are made anew for backward: the same bits, only where nobody can tell, and what it saves."""

import logging
import random

import numpy as np
import pytest
from cuda_devices import DEVICES

from benchmarks.inputs import solver_of, with_inputs
from blobmem import TRAIN, Blob, Layer, Net, SharedBlobError, SimulatedDevice, register_layer
from blobmem.memory import Side
from blobmem.net.plan import Lifetime
from blobmem.net.sharing import Spent
from blobmem.ops.call import call, overwrite, overwrite_diff, read, read_diff

DATA = """
name: "normalised" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "gaussian" }
  shape { dim: 3 dim: 2 dim: 6 dim: 5 } shape { dim: 3 dim: 4 } } }
"""
SCALE = """scale_param { bias_term: true filler { type: "gaussian" mean: 1 std: 0.3 }
  bias_filler { type: "gaussian" std: 0.3 } }"""


def layer(kind, name, bottom, top, options=""):
    ends = "".join(f' bottom: "{each}"' for each in bottom.split()) + f' top: "{top}"'
    return f'layer {{ name: "{name}" type: "{kind}"{ends} {options} }}\n'


def conv(name, bottom, top=None, outputs=4):
    filler = 'weight_filler { type: "xavier" }'
    return layer("Convolution", name, bottom, top or name,
                 f"convolution_param {{ num_output: {outputs} kernel_size: 3 pad: 1 {filler} }}")  # fmt: skip


def loss(bottom):
    options = 'inner_product_param { num_output: 4 weight_filler { type: "xavier" } }'
    return layer("InnerProduct", "ip", bottom, "ip", options) + layer("EuclideanLoss", "loss", "ip t", "loss")


NORM = layer("BatchNorm", "bn", "c", "c")
SCALED = NORM + layer("Scale", "s", "c", "c", SCALE)
WHOLE = SCALED + layer("ReLU", "r", "c", "c")


BEFORE, AFTER = conv("c", "data"), conv("d", "c") + loss("d")


def net_of(middle, more=AFTER, before=BEFORE):
    return DATA + before + middle + more


RELU = layer("ReLU", "r", "c", "c")
NEXT = WHOLE.replace('"c"', '"d"').replace('name: "', 'name: "2')
BESIDE = NORM.replace('top: "c"', 'top: "n"') + WHOLE[len(NORM) :].replace('"c"', '"n"')
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
    "one after another": (net_of(WHOLE, conv("d", "c") + NEXT + conv("f", "d") + loss("f")), 2),
}
"""What becomes of c (or beside it, of n), and how many arrays are made anew."""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def made(text, device, memory, **options):
    return Net(text, TRAIN, device=device, seed=3, memory=memory, **options)


def iterate(net):
    """A training iteration by hand; its loss, and all gradients and parameters."""
    net.clear_param_diffs()
    trace = [net.run_forward()]
    net.run_backward()
    for entry in net.learnable:
        trace += [entry.blob.cpu_diff().copy(), entry.blob.cpu_data().copy()]
        entry.blob.data[...] -= 0.1 * entry.blob.cpu_diff()
    return trace


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def remade(net):
    """Names of the arrays that backward makes anew."""
    net.compiled()
    return [name for name in net.internals if name.endswith("/recomputed")]


def lives_on(net, name):
    """Whether a blob's data are read by any call of backward."""
    memory = net.blobs[name].data_view.memory
    return any(view.memory is memory for call in net.compiled()[1].calls for view in call.reads)


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_bits(device, name):
    text, count = CHAINS[name]
    nets = [made(text, device, memory) for memory in ("keep", "train")]
    kept, net = ([*iterate(each), *iterate(each)] for each in nets)
    assert_same(net, kept)
    assert np.isfinite(np.concatenate([np.ravel(each) for each in kept])).all()
    assert len(remade(nets[1])) == count and remade(nets[0]) == []
    top = "n" if name == "not in place" else "c"
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
LEFT = {
    "norm alone": (net_of(NORM), {}),
    "scale not in place": (net_of(NORM + layer("Scale", "s", "c", "n", SCALE), conv("d", "n") + loss("d")), {}),
    "kept": (net_of(WHOLE), {"keep": ["c"]}),
    "an output": (net_of(SCALED, layer("ReLU", "r", "c", "c", "loss_weight: 1")), {}),
    "fixed statistics": (net_of(WHOLE.replace('type: "BatchNorm"', f'type: "BatchNorm" {GLOBAL}')), {}),
    "changed once more": (net_of(WHOLE + layer("Dropout", "drop", "c", "c")), {}),
    "read on the host": (net_of(WHOLE, layer("LooksOnHost", "p", "c", "p") + conv("d", "p") + loss("d")), {}),
    "seen in another shape": (net_of(WHOLE, layer("Reshape", "f", "c", "f", OTHER) + conv("d", "f") + loss("d")), {}),
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
        assert "the gradient of layer 'early' reads" in caplog.text and remade(net) == []
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


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_gives_the_same_numbers_or_an_error(device, seed):
    rng = random.Random(seed)
    net, kept = (made(CHAINS["one after another"][0], device, memory, keep=["d"]) for memory in ("train", "keep"))
    names, refused, answered = net.layer_names, 0, 0
    for _ in range(60):
        way = rng.choice(WAYS)
        low, high = sorted(rng.choices(range(len(names)), k=2))
        ways = {
            "forward": lambda net: net.run_forward(),
            "start": lambda net, low=low: net.run_forward(low),
            "between": lambda net, low=low, high=high: net.run_forward(low, high),
            "backward": lambda net: net.run_backward(),
            "down from": lambda net, high=high: net.run_backward(high),
            "down to": lambda net, low=low, high=high: net.run_backward(high, low),
            "layer by layer": lambda net: [net.run_forward(at, at) for at in range(len(names))],
        }
        try:
            result = ways[way](net)
        except SharedBlobError:
            refused += 1
            continue
        answered += 1
        assert result == ways[way](kept)
        for one, other in zip(net.learnable, kept.learnable, strict=True):
            np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())
    assert refused > 5 and answered > 5


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


@pytest.mark.parametrize("model, mebibytes, arrays", [("resnet50", 16661, 33), ("inception_v3", 15107, 96)])
def test_what_models_take_in_a_training_step_of_256(largest_load, model, mebibytes, arrays):
    """As docs/memory.md says, and hardly more than what is alive at the fullest moment."""
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
