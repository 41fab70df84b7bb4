"""Nets that need more than their device may hold: the same bits, never a byte more, and not a step more with enough."""

import ctypes
import functools
import importlib
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from late_streams import ORDERS, LateCuda, LateGraph, LateSimulated, launch_late
from plan_nets import DATA, POOL, SCALE, ask_at_random, assert_same, conv, iterate, layer, loss, made, nets_at_random
from small_models import SMALL

from benchmarks.inputs import fill, solver_of
from blobmem import SimulatedDevice, build_nets
from blobmem.devices.queues import SimulatedStream
from blobmem.errors import DeviceError, OutOfDeviceMemory
from blobmem.net import lanes, steps
from blobmem.net.captured import Captured
from blobmem.net.plan import arena, fitting, moments, times, ways
from blobmem.proto.text import read_net
from blobmem.solvers import updater_for
from blobmem.solvers.update import Updater

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("few_plans")


def block(name, bottom):
    """Two convolutions, normalised, whose sum with the bottom goes on."""
    norm = layer("BatchNorm", f"{name}bn", f"{name}a", f"{name}a") + layer(
        "Scale", f"{name}s", f"{name}a", f"{name}a", SCALE
    )
    text = conv(f"{name}a", bottom) + norm + layer("ReLU", f"{name}r", f"{name}a", f"{name}a")
    return text + conv(f"{name}b", f"{name}a") + layer("Eltwise", name, f"{bottom} {name}b", name)


DEEP = (
    DATA + conv("c", "data") + block("x", "c") + layer("Pooling", "p", "x", "p", POOL) + block("y", "p")
    + layer("Dropout", "d", "y", "d") + layer("ReLU", "dr", "d", "d") + block("z", "d") + loss("z")
)  # fmt: skip


def least(make, build):
    """The least limit that does, as the error says."""
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        build(make(1))
    return caught.value.requested


def need(make, build, run):
    """What a net holds without a limit, and what it then gives."""
    device = make(None)
    net = build(device)
    trace = run(net)
    assert net._fetched == []
    return device.statistics.peak_bytes, trace


def simulated(capacity):
    return SimulatedDevice(capacity)


def channels_last(capacity):
    device = EmulatedCuda(capacity)
    device.channels_last = True
    return device


LAST = pytest.param(channels_last, id="channels last", marks=needs_compiler)
SIMULATED_OR_LAST = pytest.mark.parametrize("make", [simulated, LAST])


def deep(device, text=DEEP, **options):
    net = made(text, device, "train", passes=(), **options)
    net.compiled()
    return net


def twice(net):
    return [*iterate(net), *iterate(net)]


@functools.cache
def least_of_deep(make=simulated):
    return least(make, deep)


# -------------------------------------------------------------------- the same bits


SIDES = {
    "lenet": 28, "alexnet": 131, "caffenet": 131, "googlenet": 128, "inception_v3": 139, "resnet50": 96,
    "resnet50_v2": 96, "resnet1001": 32, "squeezenet": 131, "vgg16": 64,
}  # fmt: skip
STAGES = (2, 2, 64), (3, 2, 128), (4, 1, 256), (5, 1, 512)
FEWER = {
    "resnet1001": {"DEPTH": 29}, "resnet50": {"STAGES": STAGES}, "resnet50_v2": {"STAGES": STAGES},
    "inception_v3": {"POOL_PROJECTIONS": (32,), "SEVENS": (128,)},
}  # fmt: skip
"""Of their 111 blocks in each stage three, of three to six blocks of a kind one or two, which say as much."""
SHAPES = {
    "densenet264": ((8, 3, 32, 32), (8,)), "vnet": ((2, 1, 16, 16, 16), (2, 16, 16, 16)), "lstm_lm": ((12, 8),) * 3,
}  # fmt: skip


def small(name, times):
    """A net of models/ that is large in any case, made small, on constant data, of so many times the batch."""
    param = read_net(SMALL[name]().text())
    sources = [each for each in param.layer if each.type in ("Data", "HDF5Data")]
    rest = [each for each in param.layer if each not in sources]
    del param.layer[:]
    source = param.layer.add(name="data", type="Input", top=sources[0].top)
    for items, *rest_of_shape in SHAPES[name]:
        source.input_param.shape.add(dim=(times * items, *rest_of_shape))
    param.layer.extend(rest)
    return param


def model(name, monkeypatch, times=1):
    """A net of models/ with an eighth of its channels, on so many times two small images, of which the last pooling
    takes the rest."""
    monkeypatch.chdir(ROOT)
    if name in SHAPES:
        return small(name, times)
    if name in FEWER:
        generator = importlib.import_module(f"models.generate.{name}")
        for constant, value in FEWER[name].items():
            monkeypatch.setattr(generator, constant, value)
        param = read_net(getattr(generator, name)(deploy=False).text())
    else:
        param = read_net(f"models/{name}/train_val.prototxt")
    # nor with the auxiliary classifier of Inception, which takes large images alone
    rest = [each for each in param.layer if each.type != "Data" and not each.name.startswith("aux")]
    del param.layer[:]
    source = param.layer.add(name="data", type="Input", top=["data", "label"])
    source.input_param.shape.add(dim=(2 * times, 1 if name == "lenet" else 3, SIDES[name], SIDES[name]))
    source.input_param.shape.add(dim=[2 * times])
    last = next((each for each in reversed(rest) if each.type == "Pooling"), None)
    if last is not None and last.pooling_param.pool == last.pooling_param.AVE:
        last.pooling_param.CopyFrom(type(last.pooling_param)(pool=last.pooling_param.AVE, global_pooling=True))
    param.layer.extend(rest)
    for each in param.layer:
        for options in (each.convolution_param, each.inner_product_param):
            options.num_output = max(8, options.num_output // 8) if options.num_output else 0
    return param


def trained(param, device, iterations=2):
    """So many steps of a solver, and all parameters after them; and how many arrays its plan brings back."""
    solver = solver_of(param, device=device, memory="train")
    solver.net.passes = frozenset()  # which change bits
    fill(solver.net, 5)
    solver.step(iterations - 1)
    before = device.statistics.snapshot()
    solver.step(1)
    assert (device.statistics - before).allocator_calls == 0
    parameters = [blob.cpu_data().copy() for blobs in solver.net.params.values() for blob in blobs]
    if device.graphs:
        assert {*solver.net.why_eager().values(), *solver.net.why_eager(backward=True).values()} == {""}
    return parameters, len(solver.net._fetched)


def check_bits(param, make, **options):
    """The same bits, in no more memory than that, at four limits, or the least that does where that is more."""
    device = make(None)
    unlimited, fetched = trained(param, device, **options)
    needed = device.statistics.peak_bytes
    assert fetched == 0
    lowest = least(make, lambda device: trained(param, device))
    for limit in sorted({max(lowest, int(needed / part)) for part in (1.5, 2, 4, 8)}, reverse=True):
        device = make(limit)
        parameters, fetched = trained(param, device, **options)
        assert device.statistics.peak_bytes <= limit < needed
        assert fetched > 0 or device.graphs  # for which less workspace may do, at first
        assert_same(parameters, unlimited)
    assert fetched > 0


@pytest.fixture
def quick_layouts(monkeypatch):
    """Plans that are made sooner, and are a little larger."""
    monkeypatch.setattr(arena, "WORK", arena.WORK // 10)
    monkeypatch.setattr(arena, "LEAST", arena.LEAST // 100)
    monkeypatch.setattr(fitting, "TRIES", 2)


@pytest.mark.parametrize("name", [*SIDES, *SHAPES])
def test_the_models_give_the_same_bits_in_less_memory(monkeypatch, quick_layouts, name):
    check_bits(model(name, monkeypatch), simulated)


@pytest.mark.parametrize("make", [EXACT_GPU])
@pytest.mark.parametrize("name", ["googlenet", "resnet50", "densenet264", "vnet", "lstm_lm"])
def test_models_give_the_same_bits_in_less_memory_of_a_gpu(monkeypatch, quick_layouts, name, make):
    """In graphs, and by the times of calls, which the first steps measure; of nets that need more than workspaces."""
    check_bits(model(name, monkeypatch, times=64), lambda limit: make(limit=limit), iterations=8)


MAKES = [
    pytest.param(simulated, id="simulated"),
    LAST,
    pytest.param(lambda limit: EXACT_GPU.values[0](limit=limit), id="cuda", marks=EXACT_GPU.marks),
    pytest.param(lambda limit: EXACT_GPU.values[0](limit=limit, math="tf32"), id="tf32", marks=EXACT_GPU.marks),
]


@pytest.fixture(params=MAKES)
def make(request):
    return request.param


def test_a_deep_net_gives_the_same_bits_at_any_limit(make):
    trace = iterated(made(DEEP, make(None), "keep"))
    needed, found = need(make, deep, iterated)
    assert_same(found, trace)
    lowest = least(make, deep)
    assert lowest < (0.7 if make is simulated else 1) * needed  # convolutions of the others have workspaces
    for limit in np.linspace(lowest, needed - 1, 3 if make is simulated else 1, dtype=int):
        net = deep(make(int(limit)))
        assert net._fetched and net.takes_turns
        assert_same(iterated(net), trace)
        assert net.device.statistics.peak_bytes <= limit


def iterated(net):
    """Passes enough for CUDA graphs, where there are any."""
    trace = []
    for _ in range(4):
        net.clear_param_diffs()
        trace.append(net.run_forward())
        net.run_backward()
        trace += [entry.blob.cpu_diff().copy() for entry in net.learnable]
    return trace


@given(nets_at_random(), st.sampled_from([0.0, 0.3, 0.7]), st.sampled_from(ORDERS), st.integers(1, 2))
@settings(max_examples=12, deadline=None)
def test_any_net_gives_the_same_bits_whoever_is_late(text, part, order, streams):
    """Copies are made when somebody waits for them, and so is what is computed, or at random."""

    def build(device):
        net = made(text, device, "train", backward_streams=streams, passes=())
        net.compiled()
        return net

    needed, trace = need(simulated, build, twice)
    lowest = min(least(simulated, build), needed)
    device = LateSimulated(order, capacity=int(lowest + part * (needed - lowest)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Step, "launch", launch_late)
        assert_same(twice(build(device)), trace)
    assert device.statistics.peak_bytes <= device.capacity


class Eager(LateSimulated):
    """A device that computes as late as it may, and makes copies as early as what they wait for allows."""

    def create_copy_stream(self):
        stream = SimulatedStream(self._lock, self._busy)
        put = stream.queue
        stream.queue = lambda work: (put(work), stream.finish())
        return stream


def test_copies_may_be_early(monkeypatch):
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    limit = least_of_deep()
    assert_same(twice(deep(Eager(capacity=limit))), need(simulated, deep, twice)[1])


# -------------------------------------------------------------------- in graphs


def late(capacity, order=1, last=False):
    """A device that queues and captures, and does what it may as late, or early, as `order` says (`late_streams`)."""
    device = LateCuda(order, capacity=capacity)
    device.channels_last = last
    return device


LATE = pytest.mark.parametrize("last", [False, True], ids=["", "channels last"])


@functools.cache
def least_of_late(last):
    return least(functools.partial(late, last=last), deep)


@functools.cache
def trace_of_late(last):
    return iterated(deep(late(None, last=last)))


def copies(net):
    """How many arrays leave in a pass, and come back."""
    return [sum(call.op == op for one in net.compiled() for call in one.calls) for op in ("evict", "fetch")]


@needs_compiler
def test_calls_wait_once_for_several_copies(monkeypatch, nothing_anew):
    """As they are done a while before: a GPU idles at each wait."""
    text = DATA + "".join(conv(f"c{at}", f"c{at - 1}" if at else "data") for at in range(40)) + loss("c39")
    waits = []

    def build(device):
        net = made(text, device, "train")
        net.compiled()
        return net

    needed, expected = need(late, build, iterated)
    for slack in (0.0, moments.SLACK):
        monkeypatch.setattr(moments, "SLACK", slack)
        net = build(late((least(late, build) + needed) // 2))
        assert_same(iterated(net), expected)
        assert min(copies(net)) > 10
        pieces = itertools.chain(*(run for schedule in net.compiled() for run in schedule._captured.values()))
        found = [(piece._taken, piece._lanes._waits) for piece in pieces if isinstance(piece, Captured)]
        waits.append(
            sum(len(after) for ran, own in found for step, after in zip(ran, own, strict=True) if not step.copies)
        )
    assert waits[1] < waits[0] / 2, waits


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@LATE
def test_copies_are_parts_of_graphs(monkeypatch, order, last):
    monkeypatch.setattr(moments, "SLACK", 0.0)  # all that this net computes takes no longer
    net = deep(late(least_of_late(last), order, last))
    assert_same(iterated(net), trace_of_late(last))
    assert {*net.why_eager().values(), *net.why_eager(backward=True).values()} == {""}
    forward, backward = net.device.captured[-2:]
    leaving, coming = copies(net)
    assert forward.copied.keys() == {"dtoh_copies", "dtoh_bytes"} and forward.copied["dtoh_copies"] == leaving > 5
    assert backward.copied.keys() == {"htod_copies", "htod_bytes"} and backward.copied["htod_copies"] == coming > 5
    beside, back = ([at for at, side in enumerate(graph.sides) if side] for graph in (forward, backward))
    assert (len(beside), len(back)) == (leaving, coming)
    assert any(at not in forward._before([at + 1]) for at in beside), "what is queued next need not wait for it"
    assert any(at - 1 not in backward._before([at]) for at in back), "nor it for what was queued last"


@needs_compiler
@LATE
def test_a_graph_counts_its_copies_and_nothing_else_moves(last):
    net = deep(late(least_of_late(last), last=last))
    iterated(net)
    before, graphs = net.device.statistics.snapshot(), len(net.device.captured)
    net.run_forward()
    forward = net.device.statistics - before
    net.run_backward()
    both = net.device.statistics - before
    homes = {call.attributes["home"] for call in net.compiled()[0].calls if call.op == "evict"}
    leaving, coming = copies(net)
    assert (forward.dtoh_copies, forward.dtoh_bytes) == (leaving + 1, sum(home.size for home in homes) + 4), "the loss"
    assert (forward.htod_copies, both.htod_copies, both.dtoh_copies) == (0, coming, leaving + 1)
    assert both.allocator_calls == 0 and len(net.device.captured) == graphs


@needs_compiler
@pytest.mark.parametrize("way", [lanes.OUT, lanes.IN])
def test_a_wait_that_is_missing_is_seen(monkeypatch, way):
    real = lanes.waits

    def fewer(numbers, places, ms):
        return [
            [] if number == way else [at for at in after if numbers[at] != way]
            for number, after in zip(numbers, real(numbers, places, ms), strict=True)
        ]

    monkeypatch.setattr(lanes, "waits", fewer)
    trace = trace_of_late(False)
    same = []
    for order in ("side", "main"):
        found = iterated(deep(late(least_of_late(False), order)))
        same.append(all(np.array_equal(one, other) for one, other in zip(found, trace, strict=True)))
    assert not all(same)


@needs_compiler
@LATE
def test_whoever_looks_between_graphs_finds_what_is_there(last, nothing_anew):
    """What was evicted is read and written on either side, between passes that are queued as graphs."""
    rng = random.Random(0)
    kept = made(DEEP, late(None, last=last), "keep")
    net = deep(late(least_of_late(last), last=last))
    net.device.capacity = 1 << 40  # for who asks for an address of what is on the host
    for each in (kept, net):
        iterate(each)
    names = [name for name in away(net) if name not in ("xa", "ya", "za")]
    asked = {
        "nothing": lambda blob: None,
        "reads": lambda blob: blob.cpu_data().copy(),
        "writes": lambda blob: blob.data.__imul__(1.5).copy(),
        "reads on the device": lambda blob: bool(blob.gpu_data()),
        "writes on the device": lambda blob: double_on(blob.device, blob),
    }
    for turn in range(15):
        between, after = (rng.choice([*asked]) if turn % 3 else "nothing" for _ in range(2))
        which, traces = rng.sample([*names, "p", "p"], 2), []
        for each in (kept, net):
            each.clear_param_diffs()
            loss = each.start_forward()  # nobody waits for it
            name = which[0] if "read" in between else "p"  # which the next convolution's gradient reads
            trace = [asked[between](each.blobs[name]), loss()]
            each.run_backward()
            trace.append(asked[after](each.blobs[which[1]]))
            trace += [entry.blob.cpu_diff().copy() for entry in each.learnable]
            traces.append(trace)
        assert_same(*traces)
    assert len(net.device.captured) >= 2 and net.blobs["p"].data_view.memory.away


def double_on(device, blob):
    array = device.as_array(blob.mutable_gpu_data(), (blob.nbytes,), np.uint8)
    values = np.ctypeslib.as_array((ctypes.c_float * blob.count).from_address(array.address))
    values *= 2


@needs_compiler
def test_a_graph_that_cannot_be_queued_leaves_nothing_behind(monkeypatch):
    net, twin = deep(late(least_of_late(False))), deep(late(None))
    for each in (net, twin):
        iterated(each)

    def refused(graph):
        raise DeviceError("refused")

    homes = [call.attributes["home"] for call in net.compiled()[0].calls if call.op == "evict"]
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="refused"):
        patch.setattr(LateGraph, "launch", refused)
        net.run_forward()
    assert not any(home.holds for home in homes)
    twin.run_forward()  # statistics that run on have not run on in what was taken back
    for each in (net, twin):
        each.clear_param_diffs()
    net.run_forward()
    net.run_backward()
    twin.run_backward()
    for one, other in zip(net.learnable, twin.learnable, strict=True):
        np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())


@needs_compiler
def test_what_cannot_be_page_locked_is_copied_beside_graphs(monkeypatch, caplog):
    monkeypatch.setattr(LateCuda, "pin", lambda *_: False)
    net = deep(late(least_of_late(False)))
    assert_same(iterated(net), trace_of_late(False))
    assert "does not page-lock" in caplog.text and any("does not page-lock" in why for why in net.why_eager().values())


# -------------------------------------------------------------------- no more than that, and only then


def test_with_enough_memory_nothing_is_different():
    needed, _ = need(simulated, deep, twice)
    nets = [deep(SimulatedDevice(capacity)) for capacity in (None, needed)]
    counts = []
    for net in nets:
        twice(net)
        counts.append((net.device.statistics, [[each.op for each in one.calls] for one in net.compiled()]))
    assert counts[0] == counts[1]
    assert not any(call.op in ("evict", "fetch") for one in nets[1].compiled() for call in one.calls)
    assert deep(SimulatedDevice(needed - 1))._fetched


def test_too_little_names_the_least_and_what_sets_it():
    limit = least_of_deep()
    assert iterate(deep(SimulatedDevice(limit)))
    with pytest.raises(
        OutOfDeviceMemory, match=rf"needs at least {limit} bytes .* hold {limit - 1}, .* layer '\w+' .* array is '"
    ):
        deep(SimulatedDevice(limit - 1))
    device = SimulatedDevice(limit - 1)
    net = made(DEEP, device, "train", passes=())
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            net.run_forward()
    assert device.statistics.bytes_held == 0
    device.capacity = limit  # room is made, and the same call succeeds
    assert net.run_forward() > 0


def projected(name, bottom, width, stride):
    """Three convolutions and beside them one, all normalised, whose sum goes on."""
    sizes = [("p", 4 * width, 1, stride), ("a", width, 1, 1), ("b", width, 3, stride), ("c", 4 * width, 1, 1)]
    side, weights = bottom, 'weight_filler { type: "xavier" }'
    text = ""
    for part, outputs, kernel, step in sizes:
        top, options = f"{name}{part}", f"num_output: {outputs} kernel_size: {kernel} pad: {kernel // 2} stride: {step}"
        text += layer("Convolution", top, side, top, f"convolution_param {{ {options} {weights} }}")
        text += layer("BatchNorm", f"{top}n", top, top) + layer("Scale", f"{top}s", top, top, SCALE)
        text += layer("ReLU", f"{top}r", top, top) if part in "ab" else ""
        side = bottom if part == "p" else top
    return text + layer("Eltwise", name, f"{name}p {name}c", name) + layer("ReLU", f"{name}r", name, name)


def test_what_is_made_anew_where_most_is_in_use_is_evicted(monkeypatch):
    small, large = "dim: 3 dim: 2 dim: 6 dim: 5 } shape { dim: 3", "dim: 4 dim: 3 dim: 16 dim: 16 } shape { dim: 4"
    data = DATA.replace(small, large)
    text = data + conv("c", "data", outputs=8) + projected("x", "c", 8, 1) + projected("y", "x", 16, 2) + loss("y")

    build = functools.partial(deep, text=text)
    lowest, (_, expected) = least(simulated, build), need(simulated, build, twice)
    net = build(simulated(lowest))
    assert_same(twice(net), expected)
    assert net.device.statistics.peak_bytes <= lowest
    monkeypatch.setattr(ways, "_evicting", lambda net, again, choice, way, *_: way)
    assert least(simulated, build) > lowest


def test_each_array_travels_once_and_nothing_is_allocated():
    net = deep(SimulatedDevice(least_of_deep()))
    twice(net)
    net.run_forward()
    net.run_backward()  # with parameters that have not changed on the host
    before = net.device.statistics.snapshot()
    net.run_forward()
    forward = net.device.statistics - before
    net.run_backward()
    both = net.device.statistics - before
    homes = {call.attributes["home"] for call in net.compiled()[0].calls if call.op == "evict"}
    leaving = [call for call in net.compiled()[0].calls if call.op == "evict"]
    coming = [call for call in net.compiled()[1].calls if call.op == "fetch"]
    assert len(leaving) == len(homes) and {call.attributes["home"] for call in coming} == homes
    assert forward.dtoh_bytes == sum(home.size for home in homes) + 4  # and the loss
    assert (
        both.htod_bytes - forward.htod_bytes == sum(call.attributes["home"].size for call in coming)
        and both.allocator_calls == 0
    )
    assert all(home.gpu_capacity == 0 and home.cpu_capacity == home.size for home in homes)


def test_what_is_cheaper_is_done(monkeypatch):
    """To copy, or to make anew, what there is no room for."""
    needed, _ = need(simulated, deep, iterate)
    copied, anew = [], []
    for link, memory in ((1e15, 1.0), (1.0, 1e15)):
        monkeypatch.setattr(times, "LINK", link)
        monkeypatch.setattr(times, "MEMORY", memory)
        net = deep(SimulatedDevice((needed + least_of_deep()) // 2))
        copied.append(sum(blob.data_view.nbytes for blob in net._fetched))
        anew.append(len(net._anew))
    assert copied[0] > copied[1] and anew[0] < anew[1]


# -------------------------------------------------------------------- whoever looks


@pytest.fixture
def nothing_anew(monkeypatch):
    """But what always is: a script's changes do not count in what is made anew, nor in what that is made of."""
    monkeypatch.setattr(ways, "PRICES", ())
    for kind in ("_chosen_ways", "_walked_ways"):
        monkeypatch.setattr(ways, kind, lambda *_: ())
    limits = least_of_deep, least_of_late
    for limit in limits:
        limit.cache_clear()
    yield
    for limit in limits:
        limit.cache_clear()


def away(net):
    """Names of blobs that were evicted."""
    return [name for name, blob in net.blobs.items() if blob.data_view.memory.away]


@SIMULATED_OR_LAST
def test_what_was_evicted_is_read_and_written_as_ever(make, nothing_anew):
    nets = [made(DEEP, make(None), "keep"), deep(make(least_of_deep(make)))]
    for net in nets:
        iterate(net)
        net.run_forward()
    kept, net = nets
    names = [name for name in away(net) if name not in ("xa", "ya", "za")]  # of which a later array has the kept bytes
    assert len(names) > 3
    for name in names:
        blob = net.blobs[name]
        np.testing.assert_array_equal(blob.cpu_data(), kept.blobs[name].cpu_data())
        assert blob.cpu_data() is blob.cpu_data() and blob.data is blob.data
    forms = [call.operand(0).form for call in net.compiled()[0].calls if call.op == "evict"]
    assert (sum(map(bool, forms)) > 3) == (make is channels_last)
    traces = []
    for each in nets:
        each.blobs["p"].data[...] *= 1.5  # which the next convolution's gradient reads
        each.clear_param_diffs()
        each.run_backward()
        traces.append([entry.blob.cpu_diff().copy() for entry in each.learnable])
    assert_same(*traces)
    assert net.blobs["p"].data_view.memory.away
    np.testing.assert_array_equal(net.blobs["p"].cpu_data(), kept.blobs["p"].cpu_data())
    before = net.blobs["p"].cpu_data().copy()
    net.run_forward()
    assert (net.blobs["p"].cpu_data() != before).any()


@pytest.mark.parametrize("seed", range(2))
def test_parts_of_passes_give_the_right_numbers_or_none(seed):
    nets = [made(DEEP, SimulatedDevice(), "keep"), deep(SimulatedDevice(least_of_deep()))]
    for net in nets:
        iterate(net)
    names = ["forward", "start", "between", "backward", "down from", "down to", "layer by layer"]
    ask_at_random(seed, nets[1], nets[0], names)


@SIMULATED_OR_LAST
def test_callbacks_find_what_is_there(make, nothing_anew):
    """Whoever looks at a blob right after its layer finds it, evicted or not; what is written there is what counts."""
    found = []
    for net in (made(DEEP, make(None), "keep"), deep(make(least_of_deep(make)))):
        seen = []

        def look(index, net=net, seen=seen):
            seen += [blob.cpu_data().copy() for blob in net.nodes[index].top]
            for blob in net.nodes[index].top:
                if any(blob is net.blobs[name] for name in "cxpy"):
                    blob.data[...] *= 1.5

        net.after_forward(look)
        seen += [*iterate(net), *iterate(net)]
        found.append(seen)
    assert_same(*found)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_copy_that_fails_loses_nothing(nth):
    nets = [made(DEEP, SimulatedDevice(), "keep"), deep(SimulatedDevice(least_of_deep()))]
    traces = [iterate(net) for net in nets]
    device = nets[1].device
    fail(device, "memcpy_dtoh", nth)
    with pytest.raises(DeviceError, match="as fail_at asked"):
        nets[1].run_forward()
    device.fail_at = None
    for trace, net in zip(traces, nets, strict=True):  # forward has been taken back
        net.clear_param_diffs()
        trace.append(net.run_forward())
    fail(device, "memcpy_htod", nth)
    with pytest.raises(DeviceError, match="as fail_at asked"):
        nets[1].run_backward()
    device.fail_at = None
    for trace, net in zip(traces, nets, strict=True):
        net.clear_param_diffs()
        trace.append(net.run_forward())
        net.run_backward()
        # statistics that run on have run on in what was taken back
        trace += [entry.blob.cpu_diff().copy() for entry in net.learnable if "bn" not in entry.layer]
    assert_same(*traces)


def fail(device, name, nth):
    """Let the call of that name that is the nth from now on fail."""
    calls = itertools.count(1)
    device.fail_at = lambda call, _: call == name and next(calls) == nth


# -------------------------------------------------------------------- solvers


@pytest.mark.parametrize("options", ["", "iter_size: 2", "clip_gradients: 0.1"])
def test_solvers_train_the_same(options):
    """With a test net beside, and history that passes do not use."""
    traces, limits = [], [None]
    for capacity in (None, 1, 0):
        device = SimulatedDevice(limits[-1] if capacity == 0 else capacity)
        nets = build_nets(DEEP, device=device, seed=1, memory="train")
        updater = updater_for(f'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 {options}', nets.train)
        if capacity == 1:
            updater.place()
            with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
                nets.train.compiled()
            limits.append(caught.value.requested)
            continue
        trace = []
        for turn in range(3):
            trace.append(nets.tests[0].run_forward())
            if updater.place():
                trace.append(updater.run_in_backward(turn, nets.train.start_forward()))
            else:
                trace += iterate_alone(nets.train)
                updater.run(turn)
            trace += [entry.blob.cpu_data().copy() for entry in nets.train.learnable]
        traces.append(trace)
        limits[0] = limits[0] or device.statistics.peak_bytes
        assert device.statistics.peak_bytes <= limits[-1]
        assert bool(nets.train._fetched) == (capacity == 0)
    assert limits[1] < 0.8 * limits[0]
    assert_same(*traces)


WIDE_TEST = DATA.replace('type: "DummyData"', 'type: "DummyData" include { phase: TRAIN }') + DATA.split("\n", 2)[2].replace(
    'type: "DummyData"', 'type: "DummyData" include { phase: TEST }'
).replace("shape { dim: 3", "shape { dim: 20")  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
def test_what_fits_at_planning_never_fails_in_a_test(share):
    """A test net's inputs and arrays are counted, in the arena of the train net or in one of its own."""

    def solver(device):
        return solver_of(
            read_net(WIDE_TEST + DEEP.removeprefix(DATA)), device=device, memory="train", share=share, tests=True
        )

    limit = least(simulated, lambda device: solver(device).step(1))
    device = SimulatedDevice(limit)
    each = solver(device)
    each.step(1)
    before = device.statistics.snapshot()
    each.test_all()
    each.step(1)
    each.test_all()
    assert device.statistics.peak_bytes <= limit and (device.statistics - before).allocator_calls > 0
    with pytest.raises(OutOfDeviceMemory, match=rf"needs at least {limit} bytes"):
        solver(SimulatedDevice(limit - 1)).step(1)


@pytest.mark.parametrize("test_first", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_a_test_net_takes_its_batch_in_parts_where_there_is_no_room(share, test_first):
    """Down to what the train net needs, part of whose state is on the device only while it is used."""
    data = WIDE_TEST.replace("dim: 20", "dim: 48").replace("dim: 6 dim: 5", "dim: 24 dim: 24")
    pool = layer("Pooling", "p", "b", "p", "pooling_param { kernel_size: 4 stride: 4 }")
    text = data + conv("a", "data", outputs=8) + conv("b", "a", outputs=8) + pool + loss("p")

    def run(device, tests=True):
        each, result = solver_of(read_net(text), device=device, memory="train", share=share, tests=tests), []
        for turn in range(4):
            if turn % 2 == test_first:
                each.step(1)
                result += [entry.blob.cpu_data().copy() for entry in each.net.learnable]
            elif tests:
                result += [values.copy() for values in each.test_all()[0].outputs.values.values()]
        return each, result

    devices = SimulatedDevice(), SimulatedDevice()
    run(devices[0], tests=False)
    _, expected = run(devices[1])
    limits = [sum(device.statistics.peak_bytes for device in devices) // 2]
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver_of(read_net(text), device=SimulatedDevice(1), memory="train", share=share, tests=True).step(1)
    limits.append(caught.value.requested)
    assert limits[1] < limits[0]
    for limit in limits:
        device = SimulatedDevice(limit)
        each, found = run(device)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
        assert each.test_nets[0]._parts is not None and device.statistics.peak_bytes <= limit
    assert each.net.brings


def iterate_alone(net):
    net.clear_param_diffs()
    result = [net.run_forward()]
    net.run_backward()
    return result


@pytest.mark.parametrize("make", [*MAKES, pytest.param(late, id="late", marks=needs_compiler)], indirect=True)
def test_many_steps(monkeypatch, make):
    """Those that follow one another without anything between them are queued as the last one was, if all are graphs."""
    repeated, repeat = [], Updater.repeat
    monkeypatch.setattr(Updater, "repeat", lambda self, *rest: (repeated.append(self), repeat(self, *rest))[1])

    def solver(device):
        return solver_of(read_net(DEEP), device=device, memory="train")

    def stepped(each):
        each.step(6)
        return [blob.cpu_data().copy() for blobs in each.net.params.values() for blob in blobs]

    unlimited = solver(make(None))
    trace, needed = stepped(unlimited), unlimited.net.device.statistics.peak_bytes
    limit = least(make, lambda device: solver(device).step(1))
    tight = solver(make(limit))
    assert_same(stepped(tight), trace)
    assert tight.net._fetched and tight.net.device.statistics.peak_bytes <= limit < needed
    assert (tight.updater in repeated) == (tight.net.device.compute_stream() is not None)
