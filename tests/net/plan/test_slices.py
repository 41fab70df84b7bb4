"""Nets with calls that a device has no room for: slices of the batch, which give the same numbers to rounding."""

import functools
from itertools import chain

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from late_streams import ORDERS, LateSimulated, launch_late
from plan_nets import assert_same, conv, iterate, layer, loss, made, nets_at_random

import blobmem
from blobmem import Blob, SimulatedDevice
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.errors import OutOfDeviceMemory, SharedBlobError
from blobmem.net import steps
from blobmem.net.captured import Captured
from blobmem.net.plan import at_once as at_once_slices
from blobmem.net.plan import divisions, levels, slices, times
from blobmem.net.plan.again import Less
from blobmem.net.plan.slices import Division
from blobmem.net.plan.times import Times
from blobmem.ops.call import call, memories, overwrite, read

pytestmark = pytest.mark.usefixtures("few_plans")

DATA = """
name: "large" force_backward: true
layer { name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "gaussian" }
  shape { dim: 4 dim: 4 dim: 8 dim: 8 } shape { dim: 4 dim: 4 } } }
"""
HALF = "pooling_param { pool: MAX kernel_size: 2 stride: 2 }"


def relu(name):
    return layer("ReLU", f"{name}r", name, name)


def block(name, bottom, outputs):
    """Two convolutions, and a pool of what they make."""
    first, second = f"{name}a", f"{name}b"
    text = conv(first, bottom, outputs=outputs) + relu(first) + conv(second, first, outputs=outputs) + relu(second)
    return text + layer("Pooling", name, second, name, HALF)


def images(outputs):
    return DATA + block("x", "data", outputs) + block("y", "x", 8) + loss("y")


IMAGES = images(16)


@pytest.fixture(scope="module", autouse=True)
def state_stays():
    """Parameters and solver state would be evicted first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "FROM", 1 << 40)
        yield


def simulated(capacity):
    return SimulatedDevice(capacity)


def emulated(capacity, last=False):
    device = EmulatedCuda(capacity)
    device.channels_last = last
    return device


def channels_last(capacity):
    return emulated(capacity, True)


SIMULATED = pytest.param(simulated, id="simulated")
EMULATED = pytest.param(emulated, id="emulated", marks=needs_compiler)
CUDA = pytest.param(lambda limit: EXACT_GPU.values[0](limit=limit), id="cuda", marks=EXACT_GPU.marks)


@pytest.fixture(params=[SIMULATED, pytest.param(channels_last, id="channels last", marks=needs_compiler)])
def make(request):
    return request.param


def built(text, device, **options):
    net = made(text, device, "train", **options)
    net.compiled()
    return net


def only_run(net):
    """How the layers of a net go that are in slices."""
    (run,) = net._sliced.runs
    return run


@functools.cache
def least(text, make=simulated, **options):
    """The least limit that does, as the error says."""
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        built(text, make(1), **options)
    return caught.value.requested


def assert_close(one, other):
    """Numbers of one pass, within a hundred thousandth of the largest of an array, or what rounding leaves where terms
    cancel, as in the gradient of a bias before a batch norm."""
    assert len(one) == len(other) > 0
    rounding = 1e-7 * max(np.abs(each).max() for each in other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=max(1e-5 * np.abs(b).max(), rounding))


WORDS = """
name: "words" force_backward: true
layer {{ name: "in" type: "Input" top: "x" top: "label" input_param {{
  shape {{ dim: {rows} dim: 4 dim: {width} }} shape {{ dim: {rows} dim: 4 }} }} }}
"""
CLASSES = 512


def scores(name, bottom, outputs):
    options = f'num_output: {outputs} axis: 2 weight_filler {{ type: "xavier" }}'
    return layer("InnerProduct", name, bottom, name, f"inner_product_param {{ {options} }}")


def words(options="", rows=16, width=32):
    """A score for each of many classes at each of 64 places, and their loss."""
    text = WORDS.format(rows=rows, width=width) + scores("h", "x", width) + scores("fc", "h", CLASSES)
    return text + layer("SoftmaxWithLoss", "loss", "fc label", "loss", f"softmax_param {{ axis: 2 }} {options}")


def fed(net):
    rng = np.random.default_rng(0)
    if "label" in net.blobs:
        net.blobs["x"].data[...] = rng.standard_normal(net.blobs["x"].shape)
        net.blobs["label"].data[...] = rng.integers(0, CLASSES, net.blobs["label"].shape)
        net.blobs["label"].data[5:] = 3
    return net


# -------------------------------------------------------------------- the same numbers, in fewer bytes


@pytest.mark.parametrize("kind", ["images", "words"])
def test_numbers_are_those_of_the_whole_batch(make, kind):
    text = words() if kind == "words" else images(16 if make is simulated else 8)
    unlimited = fed(made(text, make(None), "train"))
    trace = [iterate(unlimited), iterate(unlimited)]
    needed, whole, lowest = unlimited.device.statistics.peak_bytes, least(text, make, passes=()), least(text, make)
    assert lowest < whole <= needed
    for limit in (lowest, (lowest + whole) // 2, whole - 1) if make is simulated else (lowest,):
        nets = [fed(built(text, make(limit))) for _ in range(2 if limit == lowest else 1)]
        found = [[iterate(net), iterate(net)] for net in nets]
        for one, other, expected in zip(found[0], found[-1], trace, strict=True):
            assert_close(one, expected)
            assert_same(one, other)  # slices give the same bits each time
        assert all(net._sliced is not None and net.device.statistics.peak_bytes <= limit for net in nets)
    net = built(text, make(whole))
    assert net._sliced is None, "where there is room without, there are none"


@pytest.fixture
def divided(monkeypatch):
    """Lets nets have those runs of layers in slices, whatever room there is."""

    def take(*runs):
        def fit(net, usual):
            found = [Division(*map(net.layer_names.index, run[:2]), *run[2:]) for run in runs]
            way = divisions.way_divided(net, net._made(Less(), 1, bring=False), tuple(found), ())
            assert [*way.made.sliced.runs] == found
            return way.made

        monkeypatch.setattr(levels, "fit", fit)

    return take


@pytest.mark.parametrize("kept", [0, 1])
def test_each_of_several_runs_has_slices_of_its_own(make, divided, kept):
    """What one run makes for the other is whole, and so are its gradients."""
    text = images(8)
    whole = made(text, make(None), "train")
    trace = [iterate(whole), iterate(whole)]
    divided(("xa", "x", 4, kept), ("ya", "ybr", 2))
    net = made(text, make(None), "train")
    for expected in trace:
        assert_close(iterate(net), expected)
    ops = [[(each.layer_name, each.op) for each in schedule.calls] for schedule in net.compiled()]
    for name, number, again in (("xa", 4, 4 - kept), ("ya", 2, 2)):
        ran = [sum(call[0] == name and "forward" in call[1] for call in calls) for calls in ops]
        assert ran == [number, again]
    assert [name for name, op in ops[0] if op == "max_pool_forward"] == ["x"] * 4 + ["y"]
    absent = {each.name for each in net._sliced.absent}
    assert {"xb", "ya"} <= absent and not {"x", "yb", "x.diff"} & absent
    for ask in (lambda: net.run_forward(net.layer_names.index("yb")), lambda: net.run_forward(0, 1)):
        with pytest.raises(
            SharedBlobError, match="layers 'xa' to 'x' in 4 slices and layers 'ya' to 'ybr' in 2 slices of"
        ):
            ask()
    net.run_forward(0, net.layer_names.index("x"))  # one of the runs


@pytest.mark.parametrize("device", [SimulatedDevice, pytest.param(channels_last, marks=needs_compiler)])
def test_no_slices_are_kept_whose_gradients_lie_channels_last_in_one_array(device):
    """Which would be written from the last part on."""
    net = made(images(8), device(None), "train")
    slicer = divisions._slicer(net, net._made(Less(), 1))
    first, last = map(net.layer_names.index, ("ya", "ybr"))
    found = [slicer.sliced([Division(first, last, 2, kept)]) for kept in (0, 1)]
    assert [each is None for each in found] == [False, device is not SimulatedDevice]
    assert slicer.sliced([Division(1, first - 1, 4, 1)]) is not None


def test_a_run_is_split_where_little_crosses_and_what_follows_has_fewer_slices():
    """Behind the first pool, which leaves a quarter of what is before it."""
    net = made(images(8), SimulatedDevice(), "train")
    first, pool, last = map(net.layer_names.index, ("xa", "x", "y"))
    begin, rest = Division(first, pool, 4), Division(pool + 1, last, 2)
    assert [*divisions.splits(net, (Division(first, last, 4),))] == [[(begin, rest), (begin,)]]
    assert [*divisions.splits(net, (begin, rest))] == []


FOR_MORE = 300_000
"""What many layers need before such scores in four slices."""


def skipping(depth):
    """A chain of convolutions that all have to be kept for backward, and a sum of its ends."""
    text, bottom = DATA, "data"
    for at in range(depth):
        text += conv(f"c{at}", bottom, outputs=16) + layer("TanH", f"t{at}", f"c{at}", f"t{at}")
        bottom = f"t{at}"
    return text + layer("Eltwise", "sum", f"t0 {bottom}", "sum") + loss("sum")


def test_what_a_slice_makes_anew_is_evicted_where_it_has_no_room(make):
    """A net whose layers all take the batch in slices, where one slice is too much."""
    text = skipping(8)
    limit = least(text, make)
    nets = [built(text, make(limit)) for _ in range(2)]
    whole = made(text, make(None), "train")
    found = [[iterate(net), iterate(net)] for net in (*nets, whole)]
    for one, other, expected in zip(*found, strict=True):
        assert_close(one, expected)
        assert_same(one, other)
    late = [each for each in nets[0].compiled()[1].calls if each.op == "evict"]
    assert late and all("(slice" in each.operand(0).memory.name for each in late)
    assert nets[0].device.statistics.peak_bytes <= limit


@needs_compiler
def test_all_slices_are_in_one_graph():
    """Though each has bytes of its own of what is kept for it, and the whole of it is read elsewhere: graphs of fewer
    calls would wait for each other's copies."""
    text = images(8)
    lowest, whole = least(text, channels_last), least(text, channels_last, passes=())
    for limit in (lowest, (lowest + whole) // 2):
        found = []
        for graphs in (True, False):
            device = channels_last(limit)
            device.graphs = graphs
            net = built(text, device)
            assert net._sliced is not None
            found.append([iterate(net) for _ in range(4)])
            ran = chain.from_iterable(schedule._captured.values() for schedule in net.compiled())
            pieces = [piece for piece in chain.from_iterable(ran) if isinstance(piece, Captured)]
            assert [len(piece.graphs) for piece in pieces] == [1, 1][: 2 * graphs]
        for one, other in zip(*found, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("options", [
    "loss_weight: 3", "loss_param { normalization: FULL }", "loss_param { normalization: NONE }",
    "loss_param { ignore_label: 3 }", "loss_param { ignore_label: 3 normalization: BATCH_SIZE }",
])  # fmt: skip
@pytest.mark.parametrize("make", [SIMULATED, EMULATED, CUDA])
def test_losses_are_over_the_whole_batch(make, options):
    if make is emulated and "ignore_label: 3 }" not in options:
        pytest.skip("on the CPU the one that counts on the device shows it")
    text = words(options)
    limit = least(text, make)
    net = fed(built(text, make(limit)))
    assert net._sliced is not None
    assert_close(iterate(net), iterate(fed(made(text, make(None), "train"))))


def test_two_slices_give_the_bits_of_a_loss(make):
    """Where what they are divided by is twice as much: but for a sum of two numbers."""
    net, whole = (fed(built(words(), make(limit))) for limit in (least(words(), make, passes=()) - 1, None))
    assert only_run(net).number == 2
    losses = [each.run_forward() for each in (net, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for each in (net, whole):
        each.run_backward()
    np.testing.assert_array_equal(net.blobs["h"].cpu_diff(), whole.blobs["h"].cpu_diff())


MANY, FOR_FOUR = {"rows": 64, "width": 8}, 250_000
"""Words whose scores take far more than their weights, and what they need in four slices."""

SCRATCH = 8 << 20
"""What products take of a GPU beside."""


def at_once(net):
    """A net that makes the scores of each slice once, as their gradients come with the loss."""
    net.compiled()
    scored = [call for schedule in net.compiled() for call in schedule.calls if call.op == "inner_product_forward"]
    assert sum(call.layer_name == "fc" for call in scored) == only_run(net).number == 4
    return net


@pytest.mark.parametrize("options", [
    "", "loss_weight: 3", "loss_param { normalization: NONE }", "loss_param { ignore_label: 3 }",
])  # fmt: skip
@pytest.mark.parametrize("make", [SIMULATED, EMULATED, CUDA])
def test_gradients_are_made_with_the_loss_where_that_is_the_last(make, options):
    text = words(options, **MANY)
    limit = FOR_MORE + (0 if make is simulated else SCRATCH)
    net, whole = at_once(fed(built(text, make(limit)))), fed(made(text, make(None), "train"))
    for _ in range(2):
        assert_close(iterate(net), iterate(whole))
    assert net.device.statistics.peak_bytes <= limit


def test_they_are_of_the_gradient_that_the_loss_has_in_backward():
    """Whatever it was in forward."""
    gradients = []
    for limit in (FOR_FOUR, None):
        net = fed(built(words(**MANY), simulated(limit)))
        for value in (1, -2.5):
            net.clear_param_diffs()
            net.run_forward()
            net.blobs["loss"].diff[...] = value
            net.run_backward()
            gradients.append(
                [net.blobs["h"].cpu_diff().copy(), *(each.blob.cpu_diff().copy() for each in net.learnable)]
            )
    for one, other in (gradients[:2], gradients[2:]):
        assert_close(other, [-2.5 * each for each in one])
    assert_close(gradients[1], gradients[3])


@pytest.mark.parametrize("options", ["", "iter_size: 2", "clip_gradients: 0.1"])
def test_solvers_train_the_same_where_gradients_are_made_with_the_loss(options):
    found = []
    for limit in (FOR_FOUR + 40_000, None):  # and what the solver keeps
        net = f"net_param {{ {words(**MANY)} }}"
        solver = blobmem.get_solver(
            f'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 {options} {net}', device=simulated(limit), memory="train",
            seed=3,
        )  # fmt: skip
        fed(solver.net)
        solver.step(3)
        found.append([entry.blob.cpu_data().copy() for entry in solver.net.learnable])
        if limit:
            at_once(solver.net)
    assert_close(*found)


UP = "convolution_param { num_output: 8 kernel_size: 2 stride: 2 bias_term: false weight_filler { type: 'xavier' } }"
LABELS = (
    'layer { name: "label" type: "DummyData" top: "label" dummy_data_param { shape { dim: 4 dim: 16 dim: 16 } } }\n'
)


def levels_joined():
    """Two levels, down and up, as a V-Net has them: what has most bytes is made of what has few, and of what was there
    long before."""
    text = DATA.replace("dim: 8 dim: 8", "dim: 16 dim: 16") + LABELS
    text += conv("left", "data", outputs=8) + layer("TanH", "lefta", "left", "lefta")
    bottom = "down"
    text += layer("Pooling", "down", "lefta", "down", HALF)
    for at in range(6):
        text += conv(f"deep{at}", bottom, outputs=8) + layer("TanH", f"deep{at}a", f"deep{at}", f"deep{at}a")
        bottom = f"deep{at}a"
    text += layer("Deconvolution", "up", bottom, "up", UP) + layer("TanH", "upa", "up", "upa")
    text += layer("Concat", "both", "lefta upa", "both") + conv("right", "both", outputs=16)
    text += layer("TanH", "righta", "right", "righta") + conv("scores", "righta", outputs=2)
    return text + layer("SoftmaxWithLoss", "loss", "scores label", "loss")


def between(text, make=simulated, more=0):
    """A limit half way from the least to what does without slices."""
    return (least(text, make) + least(text, make, passes=())) // 2 + more


def test_they_begin_where_less_crosses(make):
    """And what was there long before adds its slices' gradients to those it has from elsewhere: they are never whole."""
    text = levels_joined()
    net = built(text, make(between(text, make)))
    assert net.layer_names[only_run(net).first] == "up" and only_run(net).at_once
    added = [each for each in net.compiled()[1].calls if each.op == "multiply" and each.attributes.get("accumulate")]
    assert len(added) == only_run(net).number and len({each.operand(2).memory for each in added}) == 1
    assert net.blobs["lefta_lefta_0_split_1"].diff_view.memory in net._sliced.absent
    whole = made(text, make(None), "train")
    for _ in range(2):
        assert_close(iterate(net), iterate(whole))


def test_what_is_added_slice_by_slice():
    """Not what is added twice, nor what the sum lies in, nor an array by itself."""
    x, y, z = (Blob(4) for _ in range(3))

    def adds(blob, *operands):
        return at_once_slices._adds(call("sum_arrays", *map(read, operands), overwrite(z)), blob.data_view.memory)

    assert adds(x, x, y) and adds(y, x, y)
    assert not adds(x, x, x) and not adds(z, x, y) and not adds(z, z, y) and not adds(x, x)


@pytest.mark.parametrize("keep", [[], ["lefta_lefta_0_split_1"]])
def test_who_keeps_a_gradient_that_slices_add_to_another_finds_it_whole(keep):
    net = built(levels_joined(), SimulatedDevice(), keep=keep)
    slicer = divisions._slicer(net, net._made(Less(), 1))
    found = slicer.sliced([Division(net.layer_names.index("up"), len(net.layer_names) - 1, 4, 0, True)])
    memory = net.blobs["lefta_lefta_0_split_1"].diff_view.memory
    assert (memory in found.absent) == (not keep)
    assert any(memory in each.written_memories() for each in found.backward) == bool(keep)


def test_what_backward_wants_first_comes_back_in_forward(monkeypatch):
    """Where a solver runs both, and forward has room for it in the end; by hand, too."""
    monkeypatch.setattr(times, "LINK", 5e9)
    text, found = levels_joined(), []
    for limit in (between(text, more=40_000), None):  # and what the solver keeps
        solver = blobmem.get_solver(
            f'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 net_param {{ {text} }}', device=simulated(limit),
            memory="train", seed=3,
        )  # fmt: skip
        net = solver.net
        solver.step(3)
        forward, backward = net.compiled()
        net.forward()
        net.clear_param_diffs()
        solver.step(2)
        found.append([entry.blob.cpu_data().copy() for entry in net.learnable])
        if limit:
            used = {*memories(backward.calls)}
            assert any(each.op == "fetch" and each.operand(0).memory in used for each in forward.calls)
            net.device.capacity += 1 << 20  # for gradients
            net.clear_param_diffs()
            net.forward()
            net.forward(end="down")
            with pytest.raises(SharedBlobError, match="run by themselves"):
                net.backward()
    assert_close(*found)


def test_the_least_is_what_slices_and_their_ends_take():
    """Of scores: what they are made of, whole, and its gradient; and of a slice scores, in whose place their gradient is
    made, and the sums of their exponentials."""
    ends, scores = 16 * 4 * 32 * 4, 16 * 4 * CLASSES * 4
    net = fed(built(words(), SimulatedDevice(least(words()))))
    assert only_run(net).number == 16
    assert net.planned().nbytes == 2 * ends + scores // 16 + 2 * 4 * 4
    whole = built(words(), SimulatedDevice(least(words(), passes=())), passes=())
    assert whole.planned().nbytes == scores + ends


@pytest.mark.parametrize("copies", [True, False])
def test_small_arrays_are_kept_whole_if_that_saves_more_than_their_copies_take(monkeypatch, copies):
    """The mask of the first pool never is: what comes behind the pool wants its top, with which the mask is made."""
    monkeypatch.setattr(Times, "copy_ms", lambda *_: 0.0 if copies else 1e9)
    net = made(IMAGES.replace("dim: 8 dim: 8", "dim: 32 dim: 32"), SimulatedDevice(), "train")
    net.compiled()
    slicer = divisions._slicer(net, net._made(Less(), 1))
    run = Division(1, net.layer_names.index("y"), 4)
    found = slicer.sliced([run])
    absent = {each.name for each in found.absent}
    assert {"xa", "xb", "x"} <= absent
    assert ("y/mask" in absent) == (not copies)
    again = [each for each in found.backward if each.op == "max_pool_forward"]
    assert [each.layer_name for each in again] == ["x"] * 4 if copies else ["x", "y"] * 4
    monkeypatch.setattr(Times, "copy_ms", lambda *_: 1e-9)
    assert "x/mask" in {each.name for each in slicer.sliced([run]).absent}
    usual = slices.Run._again

    def but_that_mask(run, wanted, absent):
        return None if "y/mask" in {each.name for each in wanted} else usual(run, wanted, absent)

    monkeypatch.setattr(slices.Run, "_again", but_that_mask)
    assert "y/mask" not in {each.name for each in slicer.sliced([run]).absent}


def test_the_fewest_slices_that_do():
    ends, scores = 16 * 4 * 32 * 4, 16 * 4 * CLASSES * 4
    limit = least(words())
    beside = limit - built(words(), SimulatedDevice(limit)).planned().nbytes
    for number in (2, 4, 8):  # labels, sums, and a loss and its gradient, have 512 bytes each, or 4
        limit = beside + 2 * ends + scores // number + 3 * 512 + 4
        assert only_run(built(words(), SimulatedDevice(limit))).number == number
        less = limit - 1 - ends // number  # of which what a slice of the first layer makes anew can be evicted
        assert only_run(built(words(), SimulatedDevice(less))).number == 2 * number


def test_slices_are_kept_for_backward_where_there_is_room(make):
    """The last ones; they come first there, and only the others are made anew."""
    lowest, whole = least(words(), make), least(words(), make, passes=())
    trace = iterate(fed(made(words(), make(None), "train")))
    for part in (0.0, 0.3, 0.6, 0.9):
        net = fed(built(words(), make(int(lowest * (1 - part) + whole * part))))
        assert_close(iterate(net), trace)
        calls = [each.op for each in net.compiled()[1].calls if each.layer_name == "fc"]
        run = only_run(net)
        assert calls.count("inner_product_forward") == run.number - run.kept
    assert run.kept >= run.number // 2


def test_it_is_reckoned_after_a_pass_as_before(make):
    net = fed(built(words(), make(least(words(), make))))
    before = net.reckoned()
    iterate(net)
    np.testing.assert_array_equal(net.reckoned().end, before.end)
    assert net._sliced is not None and before.ms > 0


def test_passes_over_other_batches(make):
    """Which may be taken in other slices; and back."""
    limit = least(words(), make)
    nets = [fed(built(words(), make(each))) for each in (limit, None)]
    numbers = []
    for batch in (16, 8, 12, 16):
        for net in nets:
            net.blobs["x"].reshape(batch, 4, 32)
            net.blobs["label"].reshape(batch, 4)
            fed(net)
        assert_close(*map(iterate, nets))
        numbers.append(only_run(nets[0]).number)
    assert numbers[0] == numbers[-1] == 16 and numbers[2] in (2, 3, 4, 6, 12)
    assert nets[0].device.statistics.peak_bytes <= limit


def test_convolutions_are_told_how_much_workspace_there_is():
    """What is left beside arrays, but of few sizes, the same in all slices, forward and where they run again."""

    def predicted(capacity):
        device = PredictedCuda()
        device.capacity = capacity
        return device

    more = 100 << 20  # than with the least room for each, 32 MiB, which is all that is known of these
    limit = least(IMAGES, predicted) + more
    net = built(IMAGES, predicted(limit))
    calls = [call for one in net.compiled() for call in one.calls if "stride" in call.attributes and "conv" in call.op]
    rooms = {(call.layer, call.op): call.attributes["room"] for call in calls}
    assert net._sliced is not None and len(calls) > len(rooms)
    assert all(call.attributes["room"] == rooms[call.layer, call.op] for call in calls)
    assert {room >> 20 for room in rooms.values()} == {128}
    assert net.planned().nbytes < (128 << 20) + (1 << 20) and limit < least(IMAGES, predicted, passes=())


def test_nothing_is_allocated_from_the_second_pass_on(make):
    text = IMAGES if make is simulated else words()
    net = fed(built(text, make(least(text, make))))
    iterate(net)
    iterate(net)
    before = net.device.statistics.snapshot()
    iterate(net)
    assert (net.device.statistics - before).allocator_calls == 0


KINDS = {
    "conv": ("Convolution", "convolution_param { num_output: 4 kernel_size: 1 weight_filler { type: 'xavier' } }"),
    "scale": ("Scale", "scale_param { bias_term: true }"), "relu": ("ReLU", ""), "sum": ("Eltwise", ""),
    "join": ("Concat", ""), "prelu": ("PReLU", ""),
    "pool": ("Pooling", "pooling_param { kernel_size: 3 stride: 1 pad: 1 }"),
    "average": ("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 1 pad: 1 }"),
    "lrn": ("LRN", "lrn_param { local_size: 3 }"), "flat": ("Flatten", ""), "norm": ("BatchNorm", ""),
    "max": ("Eltwise", "eltwise_param { operation: MAX }"), "prod": ("Eltwise", "eltwise_param { operation: PROD }"),
    "sigmoid": ("Sigmoid", ""), "drop": ("Dropout", ""),
}  # fmt: skip


NETS = nets_at_random(DATA, KINDS, (3, 12), 1, "dim: 4 dim: 8 dim: 8")


@given(NETS, st.sampled_from([0.0, 0.5]), st.sampled_from(ORDERS))
@settings(max_examples=5, deadline=None)
def test_any_net_gives_the_same_numbers_whoever_is_late(text, part, order):
    """Copies are made when somebody waits for them, and so is what is computed, or at random."""
    trace = iterate(made(text, SimulatedDevice(), "train"))
    lowest, whole = least(text), least(text, passes=())
    assert lowest <= whole
    device = LateSimulated(order, capacity=int(lowest + part * (whole - 1 - lowest)) if lowest < whole else whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Step, "launch", launch_late)
        net = built(text, device)
        assert (net._sliced is not None) == (lowest < whole)
        assert_close(iterate(net), trace)
    assert device.statistics.peak_bytes <= device.capacity


# -------------------------------------------------------------------- solvers


@pytest.mark.parametrize("shared, options", [
    (False, ""), (False, "clip_gradients: 0.1"), (True, "iter_size: 2"),
])  # fmt: skip
def test_solvers_train_the_same(shared, options):
    """Updates come after the last slice, and gradients of parameters that layers share are added up, too."""
    text = IMAGES
    if shared:
        text = text.replace('name: "xb" type: "Convolution"', 'name: "xb" type: "Convolution" param { name: "w" }')
        middle = conv("z", "xb", outputs=16).replace('type: "Convolution"', 'type: "Convolution" param { name: "w" }')
        text = text.replace(layer("Pooling", "x", "xb", "x", HALF), middle + layer("Pooling", "x", "z", "x", HALF))

    def trained(limit, passes):
        solver = blobmem.get_solver(
            f'base_lr: 0.02 lr_policy: "fixed" momentum: 0.9 {options} net_param {{ {text} }}',
            device=SimulatedDevice(limit), memory="train", seed=3,
        )  # fmt: skip
        solver.net.passes = passes
        solver.step(3)
        assert solver.net.device.statistics.peak_bytes <= (limit or np.inf)
        return solver.net, [entry.blob.cpu_data().copy() for entry in solver.net.learnable]

    _, trace = trained(None, frozenset())
    least = []
    for passes in (frozenset(), frozenset({"slices"})):
        with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
            trained(1, passes)
        least.append(caught.value.requested)
    assert least[1] < least[0]
    for limit in (least[1], least[0] - 1):
        net, found = trained(limit, frozenset({"slices"}))
        assert net._sliced is not None
        assert_close(found, trace)


# -------------------------------------------------------------------- what cannot be


def sliced_images(**options):
    return built(IMAGES, SimulatedDevice(least(IMAGES)), **options)


def test_what_is_never_whole_is_not_read():
    net = sliced_images()
    iterate(net)
    with pytest.raises(SharedBlobError, match="'xa' .* never there as a whole: the device has room for a slice"):
        net.blobs["xa"].cpu_data()
    with pytest.raises(OutOfDeviceMemory):
        built(IMAGES, SimulatedDevice(least(IMAGES)), keep=["xa"])


def test_layers_in_slices_run_together():
    kept = {"keep": ("data",)}  # parts read it anew
    net, other = built(IMAGES, SimulatedDevice(least(IMAGES, **kept)), **kept), built(IMAGES, SimulatedDevice())
    traces = [iterate(each) for each in (net, other)]
    assert_close(*traces)
    first, last, *_ = only_run(net)
    for ask in (
        lambda: net.run_forward(last), lambda: net.run_forward(0, first), lambda: net.run_backward(last - 1),
    ):  # fmt: skip
        with pytest.raises(
            SharedBlobError, match="takes layers 'xa' to .* in 4 slices of the batch, .* run all of them"
        ):
            ask()
    for each in (net, other):
        each.run_forward()
        each.run_forward(last + 1)  # parts that do not part the run
        each.run_forward(first)
        each.clear_param_diffs()
        each.run_backward()
    assert_close(*([entry.blob.cpu_diff() for entry in each.learnable] for each in (net, other)))
    net.after_forward(print)
    with pytest.raises(SharedBlobError, match="without callbacks about layers"):
        net.run_forward()


def test_what_is_made_anew_wants_what_forward_had():
    net = fed(built(words(), SimulatedDevice(least(words()) + 2048)))
    assert net.layer_names[only_run(net).first] == "fc"
    net.run_forward()
    net.run_forward(0, only_run(net).first - 1)
    with pytest.raises(
        SharedBlobError, match="would make 'fc' anew, but parts of what makes it have run by themselves"
    ):
        net.run_backward()


def test_the_error_says_what_takes_no_slices():
    drop = layer("Dropout", "n", "xa", "xa")
    for text in (IMAGES.replace(relu("xa"), drop), IMAGES.replace(relu("xa"), drop + relu("xa"))):
        assert least(text) == least(text, passes=())
        with pytest.raises(OutOfDeviceMemory, match="Layer 'n' takes no slices of the batch, for 'dropout_forward'"):
            built(text, SimulatedDevice(1))
    with pytest.raises(OutOfDeviceMemory, match="and layers 'xa' to '.*' in 4 slices of the batch: beside"):
        built(IMAGES, SimulatedDevice(1))


def test_only_nets_that_train_have_them():
    with pytest.raises(ValueError, match="'slices' is for a net that trains"):
        made(IMAGES, SimulatedDevice(), "keep", passes=["slices"])
    assert made(IMAGES, SimulatedDevice(), "train").passes == {"slices"}
    assert not made(IMAGES, SimulatedDevice(), "train", passes=()).passes


def passing(layers=24):
    """Words whose scores are made of what comes of many layers, and of what these were given."""
    text = WORDS.format(**MANY) + scores("h", "x", 8)
    for at in range(layers):
        text += layer("Sigmoid", f"s{at}", f"s{at - 1}" if at else "h", f"s{at}")
    text += layer("Concat", "both", f"h s{layers - 1}", "both", "concat_param { axis: 2 }") + scores(
        "fc", "both", CLASSES
    )
    return text + layer("SoftmaxWithLoss", "loss", "fc label", "loss", "softmax_param { axis: 2 }")


def with_gradients(text, device, monkeypatch, first, number):
    """A net with the layers from one on in slices that have their gradients with the loss."""
    net, ways = made(text, device, "train"), divisions.Divisions.ways
    run = Division(net.layer_names.index(first), len(net.layer_names) - 1, number, 0, True)
    with monkeypatch.context() as patch:
        patch.setattr(divisions.Divisions, "ways", lambda found, _: ways(found, [(run,)]))
        net.compiled()
    assert net._sliced.runs == (run,)
    return fed(net)


@pytest.mark.parametrize("make", [SIMULATED, EMULATED, CUDA])
def test_what_such_slices_are_given_is_away_meanwhile_and_so_are_their_gradients(make, monkeypatch):
    text = passing()
    limit = FOR_MORE + (0 if make is simulated else SCRATCH)
    net, whole = with_gradients(text, make(limit), monkeypatch, "both", 4), fed(made(text, make(None), "train"))
    for _ in range(3):
        assert_close(iterate(net), iterate(whole))
    forward, backward = (schedule.calls for schedule in net.compiled())
    left = [
        each.operand(0) for each in forward if each.op == "evict" and each.attributes["home"].name.startswith("h (")
    ]
    assert [operand.part for operand in left] == [(index, 4) for index in range(4)]
    came = [each.operand(0).memory.name for each in forward if each.op == "fetch"]
    assert came == [f"h (slice {index} of 4)" for index in range(1, 5)]
    made_of = [each.operand(0).memory.name for each in backward if each.op == "multiply" and each.operand(2).part]
    assert len(made_of) == 8 and all("diff (slices) (slice" in name for name in made_of)
    assert net.device.statistics.peak_bytes <= limit


@pytest.mark.parametrize("positions", [(16, 16), (4, 8, 8)], ids=["planes", "volumes"])
@pytest.mark.parametrize("make", [SIMULATED, pytest.param(channels_last, id="channels last", marks=needs_compiler)])
def test_images_that_such_slices_are_given_are_away_meanwhile_too(make, monkeypatch, positions):
    shape = " ".join(f"dim: {size}" for size in (4, 8, *positions))
    text = f"""
    name: "images" force_backward: true
    layer {{ name: "data" type: "DummyData" top: "data" top: "t" dummy_data_param {{
      data_filler {{ type: "gaussian" }} data_filler {{ type: "gaussian" }}
      shape {{ {shape} }} shape {{ {shape.replace(" 8 ", " 32 ", 1)} }} }} }}
    """ + conv("h", "data", outputs=8)
    for at in range(24):
        text += layer("Sigmoid", f"s{at}", f"s{at - 1}" if at else "h", f"s{at}")
    text += layer("Concat", "both", "h s23", "both") + conv("fc", "both", outputs=32)
    text += layer("EuclideanLoss", "loss", "fc t", "loss")
    limit = 350_000 if make is simulated else 480_000
    net, whole = with_gradients(text, make(limit), monkeypatch, "both", 4), made(text, make(None), "train")
    for _ in range(3):
        assert_close(iterate(net), iterate(whole))
    forward, backward = (schedule.calls for schedule in net.compiled())
    came = {each.operand(0).memory.name for each in forward if each.op == "fetch"}
    assert came == {f"{name} (slice {index} of 4)" for name in "ht" for index in range(1, 5)}
    assert sum(each.op == "multiply" and each.operand(2).part is not None for each in backward) == 8
    assert net.device.statistics.peak_bytes <= limit


@pytest.mark.parametrize("make", [SIMULATED, EMULATED, CUDA])
@pytest.mark.parametrize("idle", [0, 1e9])
def test_such_slices_make_anew_what_they_do_not_use_for_long(make, monkeypatch, idle):
    monkeypatch.setattr(at_once_slices, "IDLE", idle)
    limit = FOR_MORE + (0 if make is simulated else SCRATCH)
    net, whole = (
        with_gradients(passing(), make(limit), monkeypatch, "both", 4),
        fed(made(passing(), make(None), "train")),
    )
    for _ in range(2):
        assert_close(iterate(net), iterate(whole))
    joined = [each.operand(2).memory.name for each in net.compiled()[0].calls if each.op == "concat_forward"]
    names = ["both", "both (again)"] if idle == 0 else ["both"]
    assert joined == [f"{name} (slice {index} of 4)" for index in range(1, 5) for name in names]


def test_nobody_runs_forward_on_what_such_slices_were_given_before(monkeypatch):
    net = with_gradients(passing(), simulated(FOR_MORE), monkeypatch, "both", 4)
    net.run_forward()
    first = net.layer_names.index("both")
    for start in (first, net.layer_names.index("s3")):
        with pytest.raises(SharedBlobError, match="layers 'both' to 'loss' in 4 slices of the batch.* run all of them"):
            net.run_forward(start)
    net.run_forward(0, first - 1)
    net.run_forward(net.layer_names.index("h"))
    net.run_backward()


def test_what_slices_are_given_just_before_stays(monkeypatch):
    net = with_gradients(passing(1), simulated(FOR_MORE), monkeypatch, "both", 4)
    assert not net._sliced.given
    assert_close(iterate(net), iterate(fed(made(passing(1), simulated(None), "train"))))
