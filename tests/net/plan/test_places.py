"""Nets whose arrays take turns: the same bits, never another array's numbers, and no byte more than the plan."""

import gc
import logging
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import DEVICES, EXACT_GPU, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from late_streams import ORDERS, LateCuda, LateSimulated, launch_late
from net_calls import WAYS, call_net
from plan_nets import run_layer_by_layer
from small_models import SMALL as SHRUNK
from small_models import write_small

import blobmem.memory
import blobmem.net.plan.places as places
from blobmem import TEST, TRAIN, Blob, Net, SharedBlobError, SimulatedDevice, build_nets
from blobmem.devices import HOST
from blobmem.errors import BlobmemError, NetError, OutOfDeviceMemory
from blobmem.footprint import stated_shapes
from blobmem.memory import Intent, Side
from blobmem.net import schedule, steps
from blobmem.net.builder import specs_of
from blobmem.net.needs import secure
from blobmem.net.plan import Layout, arena, early
from blobmem.net.plan import streams as streams_pass
from blobmem.net.sharing import Halves, Spent
from blobmem.solvers import updater_for

ROOT = Path(__file__).parents[3]
SMALL = sorted((ROOT / "tests" / "data" / "nets").glob("*.prototxt"))
MODELS = ["lenet", "alexnet", "caffenet", "googlenet", "inception_v3", "resnet50", "squeezenet", "vgg16"]


def dense(name, bottom, top=None, outputs=5, param=""):
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top or name}" {param}'
        f' inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}\n'
    )


CHAIN = (
    """
name: "chain"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    shape { dim: 6 dim: 4 } shape { dim: 6 } } }
"""
    + dense("ip1", "data")
    + 'layer { name: "act1" type: "Sigmoid" bottom: "ip1" top: "act1" }\n'
    + dense("ip2", "act1")
    + 'layer { name: "act2" type: "Sigmoid" bottom: "ip2" top: "act2" }\n'
    + dense("ip3", "act2")
    + 'layer { name: "act3" type: "Sigmoid" bottom: "ip3" top: "act3" }\n'
    + dense("ip4", "act3")
    + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip4" bottom: "label" top: "loss" }\n'
)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def chain(device, memory, phase=TRAIN, **options):
    return Net(CHAIN, phase, device=device, seed=3, memory=memory, **options)


def fill_inputs(net, seed=0):
    """Zeros and ones, which are classes and values."""
    rng = np.random.default_rng(seed)
    for name in net.inputs:
        net.blobs[name].data[...] = rng.integers(0, 2, net.blobs[name].shape)


def iterate(net):
    """A training iteration, by hand; its loss and gradients."""
    net.clear_param_diffs()
    trace = [net.run_forward()]
    net.run_backward()
    trace += [entry.blob.cpu_diff().copy() for entry in net.learnable]
    for entry in net.learnable:
        entry.blob.data[...] -= 0.1 * entry.blob.cpu_diff()
    return trace


def at_the_ends(net):
    """What a net at random has at its two ends: the gradient of its input, and its output."""
    return [net.blobs["x"].cpu_diff().copy(), net.blobs["end"].cpu_data().copy()]


def trained(nets, steps=3):
    """Training with a test of each test net before every step; all that it gives."""
    trace = []
    for net in (nets.train, *nets.tests):
        fill_inputs(net)
    for _ in range(steps):
        for test in nets.tests:
            trace.append(test.run_forward())
            trace += [test.blobs[name].cpu_data().copy() for name in test.outputs]
        trace += iterate(nets.train)
    return trace + [entry.blob.cpu_data().copy() for entry in nets.train.learnable]


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("share", [True, False], ids=["one arena", "an arena each"])
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_training_gives_the_same_bits(device, path, share):
    if device.name == "emulated" and not share:
        pytest.skip("one arena says it")
    few = {"train_batch": 2, "test_batches": [1]} if device.family == "cuda" else {}  # kernels take their time there
    traces = []
    for memory in ("keep", "train"):
        traces.append(trained(build_nets(path, share, device=device, seed=3, memory=memory, **few), 2))
    assert_same(*traces)


CROPS = {
    "lenet": 28, "alexnet": 67, "caffenet": 67, "googlenet": 224, "inception_v3": 299, "resnet50": 224, "resnet1001": 32,
    "squeezenet": 67, "vgg16": 32,
}  # fmt: skip


def noise(position, seed, data, labels, cuts):
    rng = np.random.default_rng(position)
    data[...] = rng.standard_normal(data.shape)
    labels[...] = rng.integers(0, 10, labels.shape)


@pytest.mark.parametrize(
    "name, make",
    [
        *(
            pytest.param(name, lambda: HOST, id=f"{name}-host") for name in (*CROPS, *SHRUNK) if name != "resnet1001"
        ),  # 15 s
        *(
            pytest.param(name, *EXACT_GPU.values, id=f"{name}-cuda", marks=EXACT_GPU.marks)
            for name in (*CROPS, *SHRUNK)
        ),
    ],
)
def test_the_models_give_the_same_bits(monkeypatch, tmp_path, name, make):
    on = make()
    options = {"seed": 0}
    if name in SHRUNK:
        monkeypatch.chdir(tmp_path)
        path = write_small(name, tmp_path)
    else:
        monkeypatch.chdir(ROOT)
        path = f"models/{name}/train_val.prototxt"
        options |= {"train_batch": 1, "test_batches": [1]}
    train, tests = specs_of(path)
    for spec in (train, *tests):
        for layer in spec.model.layer:
            if layer.transform_param.crop_size and name in CROPS:
                layer.transform_param.crop_size = CROPS[name]
            narrowed = name in CROPS and on.is_host
            for part in (layer.convolution_param, layer.inner_product_param) if narrowed else ():
                if part.num_output:  # a fourth of the channels takes a tenth of the time
                    part.num_output = max(10, part.num_output // 4)
    options["input_shapes"] = stated_shapes((train, tests))
    traces = []
    for memory in ("keep", "train"):
        nets = build_nets((train, tests), device=on, memory=memory, **options)
        for net in (nets.train, *nets.tests):
            for node in net.nodes:
                if hasattr(node.layer, "load_images") and name in CROPS:
                    node.layer.load_images = noise
        traces.append([*iterate(nets.train), nets.tests[0].run_forward()])
    assert_same(*traces)


KINDS = {
    "dense": ("InnerProduct", 'inner_product_param { num_output: 4 weight_filler { type: "xavier" } }'),
    "shared": ("InnerProduct", 'param { name: "w" } inner_product_param { num_output: 4 bias_term: false }'),
    "relu": ("ReLU", ""), "relu in place": ("ReLU", ""), "power": ("Power", "power_param { scale: 2 }"),
    "dropout in place": ("Dropout", ""), "sum": ("Eltwise", ""), "join": ("Concat", "concat_param { axis: 0 }"),
    "half": ("Slice", "slice_param { axis: 1 }"), "loss": ("EuclideanLoss", ""), "norm": ("BatchNorm", ""),
    "norm in place": ("BatchNorm", ""), "scale in place": ("Scale", "scale_param { bias_term: true }"),
}  # fmt: skip


@st.composite
def nets_at_random(draw):
    """Branches, in-place layers, shared parameters, blobs with several readers, several losses, and arrays by slices."""
    text = 'name: "random" force_backward: true\n'
    text += 'layer { name: "in" type: "Input" top: "x" top: "t" input_param { shape { dim: 3 dim: 4 } } }\n'
    blobs, read = ["x"], {"x"}
    for index in range(draw(st.integers(2, 9))):
        kind, one, other = draw(st.sampled_from([*KINDS])), draw(st.sampled_from(blobs)), draw(st.sampled_from(blobs))
        name = f"l{index}"
        bottoms = {"sum": [one, other], "loss": [one, "t"]}.get(kind, [one])
        tops = [one if kind.endswith("in place") and one not in read else name]
        if kind in ("join", "half"):  # and back to the shape that all have
            bottoms, tops = ([one, other], [f"{name}a"]) if kind == "join" else ([one], [f"{name}a", f"{name}b"])
        ends = "".join(f' bottom: "{each}"' for each in bottoms) + "".join(f' top: "{each}"' for each in tops)
        text += f'layer {{ name: "{name}" type: "{KINDS[kind][0]}"{ends} {KINDS[kind][1]} }}\n'
        if kind == "join":
            text += f'layer {{ name: "{name}s" type: "Slice" bottom: "{name}a" top: "{name}" top: "{name}r" slice_param {{ axis: 0 }} }}\n'
        elif kind == "half":
            text += f'layer {{ name: "{name}c" type: "Concat" bottom: "{name}b" bottom: "{name}a" top: "{name}" }}\n'
        read |= {*bottoms} - {*tops}
        blobs += [name] * (kind != "loss" and tops != [one])
    return text + f'layer {{ name: "end" type: "EuclideanLoss" bottom: "{blobs[-1]}" bottom: "t" top: "end" }}\n'


BATCHES = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@given(nets_at_random(), BATCHES, st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_net_gives_the_same_bits_at_any_batch(text, batches, simulated):
    device = SimulatedDevice() if simulated else HOST
    traces = []
    for memory in ("keep", "train"):
        net, trace = Net(text, TRAIN, device=device, seed=1, memory=memory), []
        for batch in batches:
            for name in net.inputs:
                net.blobs[name].reshape(batch, 4)
            fill_inputs(net, batch)
            trace += [*iterate(net), *at_the_ends(net)]
        traces.append(trace)
    assert_same(*traces)


@given(nets_at_random(), BATCHES, st.booleans(), st.sampled_from([1, 3, 99]))
@settings(max_examples=25, deadline=None)
def test_any_net_is_trained_to_the_same_bits(text, batches, simulated, share):
    """By a solver, in turn with passes by hand."""
    device = SimulatedDevice() if simulated else HOST
    traces = []
    for memory in ("keep", "train"):
        net, trace = Net(text, TRAIN, device=device, seed=1, memory=memory), []
        updater = updater_for('base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01', net)
        for turn, batch in enumerate(batches):
            for name in net.inputs:
                net.blobs[name].reshape(batch, 4)
            fill_inputs(net, batch)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(early, "SHARE", share)
                if updater.place(turn % 3 < 2):
                    trace.append(updater.run_in_backward(turn, net.start_forward()))
                else:
                    net.clear_param_diffs()
                    trace.append(net.run_forward())
                    net.run_backward()
                    updater.run(turn)
            trace += at_the_ends(net) + [entry.blob.cpu_data().copy() for entry in net.learnable]
        traces.append(trace)
    assert_same(*traces)


@given(
    nets_at_random(), st.sampled_from(["keep", "train"]), st.sampled_from(ORDERS), st.integers(1, 2),
    st.sampled_from([0, 2, 12]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_net_is_trained_to_the_same_bits_on_two_streams(text, memory, order, size, lag):
    """Whichever of the two is late, and however soon bytes are given to others."""
    traces = []
    for device, streams in ((LateSimulated(order), 2), (SimulatedDevice(), 1)):
        net = Net(text, TRAIN, device=device, seed=1, memory=memory, backward_streams=streams)
        updater = updater_for(f'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 iter_size: {size}', net)
        trace = []
        for turn in range(3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(steps.Step, "launch", launch_late)
                patch.setattr(streams_pass, "LAG", lag)
                fill_inputs(net, turn)
                if updater.place(turn < 2):
                    trace.append(updater.run_in_backward(turn, net.start_forward()))
                else:
                    net.clear_param_diffs()
                    for _ in range(size):
                        trace.append(net.run_forward())
                        net.run_backward()
                    updater.run(turn)
                trace += at_the_ends(net) + [entry.blob.cpu_data().copy() for entry in net.learnable]
        traces.append(trace)
    assert_same(*traces)


# -------------------------------------------------------------------- honest lifetimes


def poison(memory, start, stop):
    """0xFF, which is NaN, on whichever side the bytes are used."""
    side = Side.HOST if memory.device.is_host else Side.DEVICE
    address = memory.access(side, start, stop - start, Intent.WRITE)
    if side is Side.HOST:
        memory.host_array(start, (stop - start,), np.uint8, lend=False)[...] = 0xFF
    else:
        memory.device.memset(address, 0xFF, stop - start)


def poisoned_iteration(net):
    """A training iteration, step by step; what does not live during a step is poisoned around it.

    What takes over bytes is no one's to poison at that moment: it is made of what they are.
    """
    forward, backward = net.compiled()
    plan, arena = net._plan, net._plan.arena
    secure(net.needs(backward=True))
    net.state.iteration += 1
    time = 0
    inherited = {
        (heir, *place) for each in plan.tenants for heir, place in zip(each.heirs, each.ranges, strict=True) if heir
    }
    for part in (forward, backward):
        for unit in part.units():
            for tenant in plan.tenants:
                if tenant.first == time:
                    for start, stop in tenant.ranges:
                        if (tenant.memory, start, stop) not in inherited:
                            poison(arena, start, stop + 512)  # what follows is a canary
            part.run(unit.start, unit.stop)
            for tenant in plan.tenants:
                for heir, (start, stop) in zip(tenant.heirs, tenant.ranges, strict=True):
                    if tenant.last == time:
                        arena.access(Side.HOST, stop, 512, Intent.READ)
                        assert (arena.host_array(stop, (512,), np.uint8, lend=False) == 0xFF).all()
                        if heir is None:
                            poison(arena, start, stop)
            time += 1


@pytest.fixture
def canaries(monkeypatch):
    """Leave room for 512 bytes behind each array."""
    real = places.layout

    def with_canaries(lives, **how):
        plan = real([life._replace(nbytes=-(-life.nbytes // 512) * 512 + 512) for life in lives], **how)
        return Layout(plan.offsets, plan.nbytes)

    monkeypatch.setattr(places, "layout", with_canaries)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_nothing_is_read_before_or_after_its_life_nor_written_beyond_its_bytes(canaries, device, path):
    batch = 2 if device.family == "cuda" else None
    expected = iterate(Net(path, TRAIN, device=device, seed=3, batch=batch))[1:]
    net = Net(path, TRAIN, device=device, seed=3, batch=batch, memory="train")
    net.clear_param_diffs()
    poisoned_iteration(net)
    assert_same([entry.blob.cpu_diff() for entry in net.learnable], expected)


@pytest.mark.parametrize("share", [1, 1 << 40], ids=["at the end", "one by one"])
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_nor_are_gradients_that_are_dead_once_their_parameters_are_updated(monkeypatch, canaries, device, path, share):
    monkeypatch.setattr(early, "SHARE", share)
    batch, values = 2 if device.family == "cuda" else None, []
    for memory in ("keep", "train"):
        net = Net(path, TRAIN, device=device, seed=3, batch=batch, memory=memory)
        updater = updater_for('base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01', net)
        if updater.place():
            updater._set_attributes(net.compiled()[1], 0.1, 1.0, 0)
            poisoned_iteration(net)
            memories = {entry.blob.diff_view.memory for entry in net.learnable if entry.lr_mult}
            assert memories <= net._plan.memories
        else:
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
            updater.run(0)
        values.append([entry.blob.cpu_data().copy() for entry in net.learnable])
    assert_same(*values)


@needs_compiler
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_nor_is_what_a_second_stream_uses(monkeypatch, canaries, path):
    monkeypatch.setattr(early, "SHARE", 1 << 40)
    values = []
    for memory, streams in (("keep", 1), ("train", 2)):
        net = Net(path, TRAIN, device=LateCuda("side"), seed=3, batch=2, memory=memory, backward_streams=streams)
        updater = updater_for('base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01', net)
        if updater.place():
            updater._set_attributes(net.compiled()[1], 0.1, 1.0, 0)
            poisoned_iteration(net)
        else:
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
            updater.run(0)
        values.append([entry.blob.cpu_data().copy() for entry in net.learnable])
    assert_same(*values)


# -------------------------------------------------------------------- never another array's numbers


def gone(net):
    """Names of blobs whose data, and of those whose gradients, have no bytes now."""
    data = [name for name, blob in net.blobs.items() if isinstance(blob.data_view.memory.writer, Spent)]
    return data, [name for name, blob in net.blobs.items() if isinstance(blob.diff_view.memory.writer, Spent)]


def test_reading_or_writing_what_was_given_away_says_how_to_keep_it(device):
    net = chain(device, "train")
    iterate(net)
    data, diffs = gone(net)
    assert {"act3", "ip4"} <= {*data} and {"ip3", "ip4"} <= {*diffs} and "loss" not in data
    blob, other, mine = net.blobs["ip4"], net.blobs["ip3"], Blob(6, 5, device=device)
    uses = [
        lambda: blob.data, blob.cpu_data, blob.asum_data, lambda: mine.copy_from(blob), lambda: blob.copy_from(mine),
        blob.unshare_data, lambda: blob.scale_data(2), blob.to_proto,
        lambda: other.diff, other.cpu_diff, other.clear_diff, lambda: other.scale_diff(2),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(
            SharedBlobError, match=r"'ip[34]' of net 'chain' \(TRAIN\) has no bytes now.*keep=\['ip[34]'\]"
        ):
            use()
    mine.share_data(blob)
    with pytest.raises(SharedBlobError, match=r"keep=\['ip4'\], or to keep everything with memory='keep'"):
        mine.cpu_data()


def test_a_pass_over_what_was_given_away_says_how_to_go_on(device):
    net, kept = chain(device, "train"), chain(device, "keep")
    with pytest.raises(SharedBlobError, match="would read 'data'"):
        net.forward(start="ip1")
    for each in (net, kept):
        each.state.iteration = 0
        each.run_forward()
        each.forward(start="ip4")
        each.run_backward()
    with pytest.raises(
        SharedBlobError, match=r"would read 'act3'.*forward from its first layer again.*keep=\['act3'\]"
    ):
        net.forward(start="ip4")
    with pytest.raises(SharedBlobError, match="would read"):
        net.run_backward()
    for each in (net, kept):
        each.state.iteration = 1
    assert_same(iterate(net), iterate(kept))


def test_once_read_it_is_looked_at_again_when_it_may_have_gone(device):
    """Blobs hand out the array of before without a look while nothing has happened: this has."""
    net = chain(device, "train")
    for _ in range(3):
        net.forward(end="ip4")
        values = net.blobs["ip4"].cpu_data().copy()
        _ = net.blobs["ip4"].data
        assert_same([net.blobs["ip4"].cpu_data()], [values])
        net.forward(start="loss")
        net.run_backward()
        for use in (net.blobs["ip4"].cpu_data, lambda: net.blobs["ip4"].data):
            with pytest.raises(SharedBlobError):
                use()


def test_before_the_first_pass_there_is_nothing(device):
    net = chain(device, "train")
    net.compiled()
    for use in (lambda: net.blobs["act1"].data, lambda: net.blobs["act1"].diff, net.blobs["act1"].clear_diff):
        with pytest.raises(SharedBlobError, match="has no bytes now"):
            use()


def test_what_would_not_be_there_at_the_end_is_not_promised(device):
    net = chain(device, "inference")
    with pytest.raises(SharedBlobError, match=r"keep=\['act1'\]"):
        net.forward(blobs=["act1"])
    assert net.state.iteration == 0
    kept = chain(device, "keep").forward(blobs=["act1"], end="act1")
    assert_same([net.forward(end="act1")["act1"]], [kept["act1"]])
    with pytest.raises(NetError, match="forward_only"):
        net.run_backward()


def test_what_is_kept_is_readable(device):
    net, kept = chain(device, "train", keep=["act1", "ip3"]), chain(device, "keep")
    for each in (net, kept):
        iterate(each)
    for name in ("act1", "ip3"):
        assert_same([net.blobs[name].data, net.blobs[name].diff], [kept.blobs[name].data, kept.blobs[name].diff])
    assert "ip4" in gone(net)[0] and "ip2" in gone(net)[1], "and the others are not"


def test_unknown_words_and_names_are_refused(device):
    with pytest.raises(ValueError, match="memory is one of keep, train, inference, not 'tight'"):
        chain(device, "tight")
    with pytest.raises(NetError, match="keep: no blob 'conv9' in net 'chain'"):
        chain(device, "train", keep=["conv9"])
    with pytest.raises(NetError, match="keep: no net has a blob 'conv9'"):
        build_nets(CHAIN, device=device, memory="train", keep=["act1", "conv9"])


def test_callbacks_read_right_numbers_or_an_error(device):
    """Layer by layer, after each: every blob that is there has the numbers that it has in a net that keeps all."""
    seen = {}

    def watch(net, numbers, backward):
        def look(index):
            for name, blob in net.blobs.items():
                for diff in (False, True) if backward else (False,):
                    try:
                        values = (blob.cpu_diff() if diff else blob.cpu_data()).copy()
                    except SharedBlobError:
                        continue
                    numbers[len(passes), backward, index, name, diff] = values

        return look

    for memory in ("keep", "train"):
        net, passes = chain(device, memory), []
        numbers = seen[memory] = {}
        net.after_forward(watch(net, numbers, False))
        net.after_backward(watch(net, numbers, True))
        for _ in range(2):
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
            passes.append(1)
    assert len(seen["train"]) > 100
    for place, values in seen["train"].items():
        if not place[-1] or values.any():  # a gradient that nobody has written reads zero where all are kept
            np.testing.assert_array_equal(values, seen["keep"][place], err_msg=str(place))
    for index, name in enumerate(["data", "ip1", "act1", "ip2", "act2"]):
        assert (1, False, index, name, False) in seen["train"], "what a layer has just written is there"


def test_debug_info_and_a_pass_layer_by_layer(device, caplog):
    lines = []
    for memory in ("keep", "train"):
        net = chain(device, memory)
        net.debug_info = True
        caplog.clear()
        with caplog.at_level(logging.INFO, "blobmem"):
            iterate(net)
            iterate(net)
        lines.append([record.getMessage() for record in caplog.records])
    assert lines[0] == lines[1] and len(lines[0]) > 40
    net, kept = chain(device, "train"), chain(device, "keep")
    for each in (net, kept):
        for index in range(len(net.nodes)):
            each.run_forward(index, index)
        for index in reversed(range(len(net.nodes))):
            each.run_backward(index, index)
    assert_same(*([entry.blob.cpu_diff() for entry in each.learnable] for each in (net, kept)))


RESIDUAL = (
    CHAIN[: CHAIN.index('layer { name: "act1"')]
    + """
layer { name: "r1" type: "ReLU" bottom: "ip1" top: "r1" }
"""
    + dense("ip2", "r1")
    + """
layer { name: "sum" type: "Eltwise" bottom: "ip2" bottom: "r1" top: "sum" }
layer { name: "r2" type: "ReLU" bottom: "sum" top: "sum" }
"""
    + dense("ip3", "sum")
    + """
layer { name: "sum3" type: "Eltwise" bottom: "ip3" bottom: "sum" top: "sum3" }
layer { name: "r3" type: "ReLU" bottom: "sum3" top: "sum3" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "sum3" bottom: "label" top: "loss" }
"""
)


def test_sums_in_place_as_a_whole_and_layer_by_layer(device):
    """Where a GPU takes some layers at a time, parts of these have to leave what the rest reads."""
    net, kept = (Net(RESIDUAL, TRAIN, device=device, seed=3, memory=memory) for memory in ("train", "keep"))
    assert_same(iterate(net), iterate(kept))
    names = {(tenant.memory.name, heir.name) for tenant in net._plan.tenants for heir in tenant.heirs if heir}
    # the gradient of a sum is that of its bottoms, and what these add up to lies there at last
    back = ("sum.diff", "r1.diff")
    assert {("ip2", "sum"), ("ip3", "sum3"), back} <= names
    for each in (net, kept):
        run_layer_by_layer(each)
    assert_same(*([entry.blob.cpu_diff() for entry in each.learnable] for each in (net, kept)))
    net.run_forward()
    assert "ip2" in gone(net)[0]
    with pytest.raises(SharedBlobError, match=r"would read 'ip2'.*keep=\['ip2'\]"):
        net.forward(start="sum")


def test_to_and_fro_between_batches_looks_for_a_layout_once(monkeypatch):
    text = CHAIN.replace("DummyData", "Input").replace("dummy_data_param", "input_param")
    text = text.replace('data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }', "")
    net, found, place = Net(text, TRAIN, device=HOST, seed=2, memory="train"), [], arena._place
    arena._remembered.cache_clear()
    monkeypatch.setattr(arena, "_place", lambda *lives: (found.append(lives), place(*lives))[1])
    for batch in (6, 40, 6, 40, 6):
        net.blobs["data"].reshape(batch, 4)
        net.blobs["label"].reshape(batch)
        fill_inputs(net, batch)
        iterate(net)
    assert len(found) == 2


@pytest.mark.parametrize("memory", ["train", "inference"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_the_same_numbers_or_an_error(device, memory, seed):
    rng = random.Random(seed)
    options = {"device": device, "seed": seed, "test_batches": [2, 9]}
    here, apart = (build_nets(CHAIN, share=mode != "keep", memory=mode, **options) for mode in (memory, "keep"))
    here, apart = [here.train, *here.tests], [apart.train, *apart.tests]
    refused = answered = 0
    for _ in range(80):
        which, way, value = rng.choice((0, 0, 1, 2)), rng.choice(WAYS), rng.random()
        names = here[which].layer_names
        low, high = sorted(rng.choices(range(len(names)), k=2))
        blob = rng.choice(list(here[which].blobs))

        chosen = way, names[low], names[high], blob, value
        try:
            results = call_net(here[which], *chosen)
        except (SharedBlobError, NetError):
            refused += 1
            continue
        answered += 1
        for name, values in call_net(apart[which], *chosen).items():
            np.testing.assert_array_equal(results[name], values)
        for one, other in zip(here[which].learnable, apart[which].learnable, strict=True):
            np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())
    assert refused > 10 and answered > 10


# -------------------------------------------------------------------- what it takes


def held(device):
    return device.statistics.bytes_held


def stated(name, monkeypatch, **options):
    """A model at its own batches, on a device that computes nothing."""
    monkeypatch.chdir(ROOT)
    specs = specs_of(f"models/{name}/train_val.prototxt")
    device = SimulatedDevice(compute=False)
    return build_nets(specs, device=device, seed=0, input_shapes=stated_shapes(specs), **options), device


def iterate_all(nets):
    nets.train.clear_param_diffs()
    nets.train.run_forward()
    nets.train.run_backward()
    for test in nets.tests:
        test.run_forward()


@pytest.mark.parametrize("name", MODELS)
def test_what_the_models_hold_is_what_is_pinned_and_the_arena(monkeypatch, name):
    nets, device = stated(name, monkeypatch, memory="train")
    assert held(device) == 0
    predicted = {}
    for net in (nets.train, *nets.tests):
        for memory, side, nbytes in net.needs(backward=net is nets.train):
            if side is Side.DEVICE:
                predicted[memory] = max(predicted.get(memory, 0), nbytes)
    plans = [net._plan for net in (nets.train, *nets.tests)]
    arena = plans[0].arena
    assert predicted[arena] == max(plan.nbytes for plan in plans) and all(plan.arena is arena for plan in plans)
    pinned = sum(nbytes for memory, nbytes in predicted.items() if memory is not arena)
    views = [each for entry in nets.train.learnable for each in (entry.blob.data_view, entry.blob.diff_view)]
    batches = [blob.data_view for net in (nets.train, *nets.tests) for blob in net.nodes[0].top]  # made on the host
    assert pinned < 1.01 * sum(view.nbytes for view in views + batches)
    monkeypatch.setattr(blobmem.memory, "debug", False)  # which has all looked at each time
    resolved, real = [], steps.Step._resolve
    monkeypatch.setattr(steps.Step, "_resolve", lambda step, *rest: (resolved.append(step), real(step, *rest)))
    iterate_all(nets)
    assert held(device) == device.statistics.peak_bytes == pinned + predicted[arena] and len(resolved) > 20
    before = device.statistics.snapshot()
    del resolved[:]
    iterate_all(nets)
    change = device.statistics - before
    assert change.allocator_calls == 0 and change.htod_bytes == sum(view.nbytes for view in batches)
    travels = {view.memory for view in batches}
    travels |= {net.blobs[name].data_view.memory for net in (nets.train, *nets.tests) for name in net.outputs}
    if predicted[arena] > plans[0].nbytes:  # where the test net was the first to see it whole
        del resolved[:]
        iterate_all(nets)
    for step in resolved:  # in the second pass already, only steps with what goes to and fro look again
        assert travels & {operand.view.memory for operand in step.call.present()}, step.call


def test_an_arena_each_holds_both(monkeypatch):
    together, device = stated("squeezenet", monkeypatch, memory="train")
    apart, other = stated("squeezenet", monkeypatch, memory="train", share=False)
    for nets in (together, apart):
        iterate_all(nets)
    sizes = [net._plan.nbytes for net in (apart.train, *apart.tests)]
    assert held(other) - held(device) == sum(sizes) - max(sizes)


def test_nets_that_are_gone_hold_nothing():
    """At once, without the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        device = SimulatedDevice()
        nets = build_nets(CHAIN, device=device, seed=3, memory="train")
        iterate_all(nets)
        values, loss = nets.train.blobs["act1"], nets.tests[0].blobs["loss"]
        del nets
        assert loss.cpu_data() > 0
        with pytest.raises(SharedBlobError, match="has no bytes now"):
            values.cpu_data()
        del values, loss
        assert held(device) == 0
    finally:
        gc.enable()


def test_a_pass_takes_what_the_plan_says_or_nothing():
    """Room for exactly that, and for less than the least that it can do with."""
    net = chain(SimulatedDevice(), "train")
    iterate(net)
    plan = held(net.device)
    exact = chain(SimulatedDevice(capacity=plan), "train")
    iterate(exact)
    assert held(exact.device) == exact.device.statistics.peak_bytes == plan > 0
    with pytest.raises(OutOfDeviceMemory) as caught:
        iterate(chain(SimulatedDevice(capacity=1), "train"))
    short = SimulatedDevice(capacity=caught.value.requested - 1)
    with pytest.raises(OutOfDeviceMemory):
        iterate(chain(short, "train"))
    assert held(short) == 0 and caught.value.requested <= plan


FED = CHAIN.replace("DummyData", "Input").replace("dummy_data_param", "input_param")
FED = FED.replace('data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }', "")


def iterate_at(net, batch):
    net.blobs["data"].reshape(batch, 4)
    net.blobs["label"].reshape(batch)
    fill_inputs(net, batch)
    return iterate(net)


def test_batches_smaller_and_larger_keep_the_arena_and_the_bits():
    device, sizes, traces = SimulatedDevice(), [], []
    for memory in ("keep", "train"):
        net, trace = Net(FED, TRAIN, device=device, seed=2, memory=memory), []
        for batch in (6, 40, 6, 40, 2, 40):
            trace += iterate_at(net, batch)
            sizes += [net._plan.arena.gpu_capacity] if net._plan else []
        traces.append(trace)
    assert_same(*traces)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[-1] and device.statistics.moves <= 30


def test_plans_for_recent_batches_hold_again_until_something_lies_elsewhere(device):
    net, kept = (Net(FED, TRAIN, device=device, seed=2, memory=memory) for memory in ("train", "keep"))

    def plan_at(batch):
        assert_same(iterate_at(net, batch), iterate_at(kept, batch))
        with pytest.raises(SharedBlobError, match="has no bytes now"):
            net.blobs["act1"].cpu_data()
        return net._plan

    first = [plan_at(batch) for batch in (6, 3, 5, 4, 8)]
    assert [plan_at(batch) for batch in (3, 5, 4, 8, 6)] == first[1:] + first[:1]
    assert plan_at(7) not in first and plan_at(3) is not first[1], "that was too long ago"
    six, three = plan_at(6), plan_at(3)
    for each in (net, kept):
        each.blobs["ip3"].share_data(each.blobs["ip2"])
    assert plan_at(6) is not six and plan_at(3) is not three
    assert net.blobs["ip3"].data_view.memory is net.blobs["ip2"].data_view.memory


def test_after_a_reshape_nothing_is_there_and_old_places_are_refused(device):
    net = chain(device, "train")
    net.run_forward()
    stranger = Blob(6, 5, device=device, name="mine")
    stranger.share_data(net.blobs["act1"])
    assert stranger.cpu_data().any()
    net.reshape()
    for blob in (stranger, net.blobs["act1"], net.blobs["ip1"]):
        with pytest.raises(SharedBlobError, match="has no bytes now"):
            blob.cpu_data()
    kept = chain(device, "keep")
    kept.run_forward()
    assert_same(iterate(net), iterate(kept))
    net.blobs["act1"].reshape(50, 5)
    with pytest.raises(BlobmemError, match=r"'act1'"):
        net.blobs["act1"].cpu_data()
    kept.state.iteration = net.state.iteration = 0
    assert_same(iterate(net), iterate(kept))


# -------------------------------------------------------------------- others


def test_the_test_net_takes_the_arena_and_gives_it_back(device):
    nets = build_nets(CHAIN, device=device, seed=3, memory="train")
    train, test = nets.train, nets.tests[0]
    assert nets.reports[0].shared == {} and test.group is train.group and test.forward_only
    train.run_forward()
    train.blobs["act1"].cpu_data()
    test.run_forward()
    assert_same([test.blobs["loss"].cpu_data()], [test.blobs["loss"].cpu_data()])
    with pytest.raises(SharedBlobError, match=r"'act1' of net 'chain' \(TRAIN\) has no bytes now"):
        train.blobs["act1"].cpu_data()
    with pytest.raises(SharedBlobError, match=r"net 'chain' \(TRAIN\) would read"):
        train.run_backward()
    assert train.blobs["loss"].cpu_data() > 0


def test_two_threads_run_two_nets_of_one_arena(device):
    nets = build_nets(CHAIN, device=device, seed=3, memory="train")
    both = (nets.train, nets.tests[0])

    def passes(net, found):
        for _ in range(15):
            with net.group.lock:
                net.clear_param_diffs()
                found.append(net.run_forward())
                if net is nets.train:
                    net.run_backward()
                    found += [entry.blob.cpu_diff().copy() for entry in net.learnable]

    expected, results = ([], []), ([], [])
    for net, found in zip(both, expected, strict=True):
        passes(net, found)
        net.state.iteration = 0
    threads = [threading.Thread(target=passes, args=each) for each in zip(both, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, results, strict=True):
        assert_same(one, other)


def test_what_others_have_views_of_stays_where_it_is(device):
    net, kept = chain(device, "train"), chain(device, "keep")
    mine = Blob(6, 5, device=device)
    mine.share_data(net.blobs["ip4"])
    assert_same(iterate(net), iterate(kept))
    assert_same([mine.cpu_data(), net.blobs["ip4"].cpu_data()], [kept.blobs["ip4"].cpu_data()] * 2)


def test_blobs_that_a_user_lays_over_each_other_are_planned_anew(device):
    """`act1` then lives as long as `act3`, which the plan made before does not know."""
    traces = []
    for memory in ("keep", "train"):
        net = chain(device, memory)
        trace = iterate(net)
        net.blobs["act3"].share_diff(net.blobs["ip2"])
        net.blobs["ip4"].share_data(net.blobs["ip3"])
        trace += iterate(net) + iterate(net)
        traces.append(trace)
    assert_same(*traces)


def test_inputs_that_a_user_exchanges_leave_the_plan_alone(device):
    text = CHAIN.replace("DummyData", "Input").replace("dummy_data_param", "input_param")
    text = text.replace('data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }', "")
    net = Net(text, TRAIN, device=device, seed=2, memory="train")
    fill_inputs(net)
    iterate(net)
    plan, mine = net._plan, Blob(6, 4, device=device)
    mine.data[...] = 2
    net.blobs["data"].share_data(mine)
    first = net.run_forward()
    assert net._plan is plan
    mine.data[...] = 0
    assert net.run_forward() != first


def test_a_net_that_uses_anothers_blob_reads_it_while_it_is_there_and_never_writes_it(device):
    """Its writes would go to whichever array has the bytes."""
    text = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 6 dim: 5 } } }'
    text += 'layer { name: "p" type: "Power" bottom: "x" top: "p" power_param { scale: 2 } }'
    first = chain(device, "train")
    for memory in ("keep", "inference"):
        reader = Net(text, TEST, device=device, memory=memory)
        writer = Net(text, TEST, device=device, memory=memory)
        first.run_forward()
        reader.blobs["x"].share_data(first.blobs["act1"])
        writer.blobs["p"].share_data(first.blobs["act1"])
        assert_same([reader.forward()["p"]], [2 * first.blobs["act1"].cpu_data()])
        with pytest.raises(SharedBlobError, match=r"would write 'act1', which takes turns.*keep=\['act1'\]"):
            writer.forward()
        first.reshape()
        with pytest.raises(SharedBlobError, match=r"would (read|write) 'act1'"):
            reader.forward()
        with pytest.raises(SharedBlobError, match="would write 'act1'"):
            writer.forward()


def test_moved_elsewhere_outputs_are_there_and_the_rest_is_not():
    first, second = SimulatedDevice(), SimulatedDevice()
    nets = build_nets(CHAIN, device=first, seed=3, memory="train")
    expected = trained(build_nets(CHAIN, device=HOST, seed=3), 2)
    trace = trained(nets, 1)
    loss = nets.train.blobs["loss"].cpu_data().copy()
    nets.train.move_to(second)
    assert_same([nets.train.blobs["loss"].cpu_data()], [loss])
    with pytest.raises(SharedBlobError, match="has no bytes now"):
        nets.train.blobs["act1"].cpu_data()
    trace = trace[: -len(nets.train.learnable)] + trained(nets, 1)
    np.testing.assert_allclose(trace[0], expected[0], rtol=1e-6)
    assert len(trace) == len(expected) and all(map(np.array_equal, trace, expected))
    assert held(second) > 0 and nets.train._plan.arena.device is nets.tests[0]._plan.arena.device is second
    assert held(first) == 0


def test_nets_whose_shapes_depend_on_values_keep_all(device, caplog):
    text = """
    layer { name: "in" type: "Input" top: "x" top: "s" input_param { shape { dim: 3 dim: 2 } shape { dim: 3 } } }
    layer { name: "p" type: "Power" bottom: "x" top: "p" }
    layer { name: "f" type: "Filter" bottom: "p" bottom: "s" top: "f" }
    layer { name: "q" type: "Power" bottom: "f" top: "q" }
    """
    with caplog.at_level(logging.WARNING, "blobmem"):
        net = Net(text, TEST, device=device, memory="inference")
    assert [record.getMessage() for record in caplog.records if "keeps all its blobs" in record.getMessage()]
    fill_inputs(net)
    net.blobs["s"].data[...] = (1, 0, 1)
    net.run_forward()
    assert net.blobs["p"].cpu_data().shape == (3, 2) and net.blobs["q"].cpu_data().shape == (2, 2)
    planned = chain(device, "inference")
    report = net.share_blobs_with(planned)
    assert "take turns" in report.unshared["p"] and not report.shared


def test_a_pass_that_fails_leaves_no_numbers(monkeypatch, device):
    net = chain(device, "train")
    real = steps.Step.run
    with monkeypatch.context() as patch:

        def fail(step, *arguments):
            if step.call.layer_name == "act3":
                raise OSError("gone")
            real(step, *arguments)

        patch.setattr(steps.Step, "run", fail)
        with pytest.raises(OSError):
            net.run_forward()
    for name in ("act1", "act2", "ip4"):
        with pytest.raises(SharedBlobError):
            net.blobs[name].cpu_data()
    assert_same(iterate(net), iterate(chain(device, "keep")))


def test_a_backward_pass_after_a_forward_pass_that_did_not_end_is_an_error(monkeypatch):
    net = chain(SimulatedDevice(), "train")
    net.run_forward()
    run = schedule.Schedule.run

    def interrupted(calls, start=0, stop=None):
        run(calls, start, 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(schedule.Schedule, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            net.run_forward()
    with pytest.raises(SharedBlobError, match="did not end"):
        net.run_backward()
    net.run_forward()
    net.run_backward()


@pytest.mark.parametrize("at", ["layout", "move", "lie_in"])
def test_an_interruption_while_a_plan_is_made_leaves_a_net_that_can_be_planned(monkeypatch, at):
    expected = chain(SimulatedDevice(), "train")
    loss = expected.run_forward()
    net = chain(SimulatedDevice(), "train")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "layout":
            patch.setattr(places, "layout", interrupted)
        elif at == "lie_in":
            patch.setattr(schedule.Schedule, "lie_in", interrupted)
        else:
            moves = iter(range(3))
            move = Halves.move

            def some(own, to):
                return move(own, to) if next(moves, None) is not None else interrupted()

            patch.setattr(Halves, "move", some)
        with pytest.raises(KeyboardInterrupt):
            net.run_forward()
    assert net.run_forward() == loss
    assert net.planned().nbytes == expected.planned().nbytes


def test_a_net_that_moves_gives_the_arena_back():
    device = SimulatedDevice()
    net = chain(device, "train")
    net.run_forward()
    assert device.statistics.bytes_held > 0
    net.move_to(HOST)
    gc.collect()
    assert device.statistics.bytes_held == 0
