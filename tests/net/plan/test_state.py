"""Nets for whose parameters and solver's state their device has no room: the same bits, never a byte more."""

import functools
import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, make_gpu, needs_compiler, needs_gpu
from cuda_emulation import EmulatedCuda
from late_streams import ORDERS, LateCuda, LateSimulated, launch_late
from plan_nets import DATA, ask_at_random, assert_same, conv, layer, loss, made, run_layer_by_layer

from blobmem import TEST, Blob, Net, SimulatedDevice, get_solver
from blobmem.errors import DeviceError, OutOfDeviceMemory, SharedBlobError
from blobmem.footprint import footprint
from blobmem.memory import SyncedMemory
from blobmem.memory.parked import Parked
from blobmem.net import compilation, steps
from blobmem.net.compilation import Compilation
from blobmem.net.fusion import UPDATES
from blobmem.net.plan import levels, products, sooner, state, times, updates
from blobmem.net.plan.divisions import longer
from blobmem.net.plan.fitting import room_of
from blobmem.net.plan.movable import movable
from blobmem.net.plan.slices import Division, Sliced
from blobmem.net.plan.state import content_of, copies_state, is_torn, staying
from blobmem.net.plan.times import COPIES
from blobmem.net.plan.ways import Made
from blobmem.ops.call import call, memories, overwrite, read, read_diff, write
from blobmem.proto.text import read_net, read_solver

pytestmark = pytest.mark.usefixtures("few_plans")

PRODUCTS = "conv_backward_weights", "inner_product_backward_weights"
QUARTERS = 0.25, 0.5, 0.75, 1.0  # of all state, each of which is tried
KINDS = {
    "SGD": "momentum: 0.9",
    "Adam": 'type: "Adam" momentum: 0.9 momentum2: 0.99',
    "two batches": "momentum: 0.9 iter_size: 2",
    "clipped": 'type: "Adam" momentum: 0.9 momentum2: 0.99 clip_gradients: 0.1',
}


def inner(name, bottom, outputs, rate=1, tied=False):
    fillers = 'weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 }'
    names = ['name: "w"', 'name: "b"'] if tied else ["", ""]
    rates = f"param {{ {names[0]} lr_mult: {rate} }} param {{ {names[1]} lr_mult: {2 * rate} decay_mult: 0 }}"
    options = f"{rates} inner_product_param {{ num_output: {outputs} {fillers} }}"
    return layer("InnerProduct", name, bottom, name, options) + layer("ReLU", f"{name}r", name, name)


POOL = "pooling_param { kernel_size: 2 stride: 2 }"
NORM = layer("BatchNorm", "n?", "c?", "b?") + layer("Scale", "s?", "b?", "b?") + layer("ReLU", "r?", "b?", "b?")
TAIL = (
    inner("fc6", "p", 300) + layer("Dropout", "d6", "fc6", "fc6") + inner("fc7", "fc6", 200)
    + layer("Dropout", "d7", "fc7", "fc7") + loss("fc7")
)  # fmt: skip
# as CaffeNet, and as VGG-16: convolutions, of which the last are no small ones, and most parameters behind them
NETS = {
    "caffenet": DATA + conv("c1", "data", outputs=8) + layer("ReLU", "r1", "c1", "c1") + layer("LRN", "n", "c1", "n")
    + layer("Pooling", "p", "n", "p", POOL) + TAIL,
    "vgg": DATA + conv("c1", "data", outputs=12) + layer("ReLU", "r1", "c1", "c1") + conv("c2", "c1", outputs=12)
    + layer("ReLU", "r2", "c2", "c2") + layer("Pooling", "p", "c2", "p", POOL) + TAIL,
}  # fmt: skip
NETS["small"] = DATA + inner("fc6", "data", 100) + inner("fc7", "fc6", 80) + loss("fc7")
# parameters that two layers have, that no update changes, and that forward does
NETS["odd"] = (
    DATA + inner("fc6", "data", 150) + inner("one", "fc6", 150, tied=True) + inner("two", "one", 150, tied=True)
    + inner("still", "two", 1100, rate=0) + layer("BatchNorm", "norm", "still", "still") + loss("still")
)  # fmt: skip
# arrays that may be made anew, whatever room there is
NETS["norms"] = DATA + conv("c1", "data", outputs=8) + NORM.replace("?", "1") + conv("c2", "b1", outputs=8)
NETS["norms"] += NORM.replace("?", "2") + conv("c3", "b2", outputs=8) + TAIL.replace('"p"', '"c3"')
INPUTS = "input_param { shape { dim: 3 dim: 2 dim: 6 dim: 5 } shape { dim: 3 dim: 4 } }"
NETS["inputs"] = (
    'name: "inputs" force_backward: true '
    + layer("Input", "data", "", "data", f'top: "t" {INPUTS}') + NETS["vgg"].removeprefix(DATA)
)  # fmt: skip
# most bytes are of images
NETS["images"] = (
    'name: "images" force_backward: true ' + layer("Input", "data", "", "data", f'top: "t" {INPUTS}')
    + conv("c1", "data", outputs=16) + conv("c2", "c1", outputs=16) + layer("Pooling", "p", "c2", "p", POOL)
    + conv("c3", "p", outputs=16) + layer("Pooling", "q", "c3", "q", POOL) + inner("fc6", "q", 60) + loss("fc6")
)  # fmt: skip

NETS["wide input"] = (
    'name: "wide input" ' + layer("Input", "data", "", "data", 'top: "t" input_param { shape { dim: 3 dim: 64 dim: 16 '
                                  'dim: 16 } shape { dim: 3 dim: 4 } }')
    + conv("c1", "data", outputs=4) + layer("ReLU", "r1", "c1", "c1") + conv("c2", "c1", outputs=16)
    + conv("c3", "c2", outputs=16) + loss("c3")
)  # fmt: skip

# of which slices of the batch and evicted state both save much
NETS["both"] = (
    DATA.replace("dim: 3", "dim: 4").replace("dim: 6 dim: 5", "dim: 16 dim: 16") + conv("c1", "data", outputs=32)
    + conv("c2", "c1", outputs=32) + layer("Pooling", "p", "c2", "p", POOL) + inner("fc6", "p", 10) + loss("fc6")
)  # fmt: skip


# the arrays of an update are of many equal parts, each a multiple of 512 bytes
NETS["pieces"] = (
    DATA + conv("c1", "data", outputs=16) + conv("c2", "c1", outputs=16) + layer("Pooling", "p", "c2", "p", POOL)
    + inner("fc6", "p", 64) + loss("fc6")
)  # fmt: skip


# an inner product whose weights and bias are of many such parts, and one without a bias
def wide(outputs):
    return (
        DATA + conv("c1", "data", outputs=8) + layer("Pooling", "p", "c1", "p", POOL) + inner("fc6", "p", outputs)
        + layer("InnerProduct", "fc7", "fc6", "fc7", f'inner_product_param {{ num_output: {outputs // 2} '
                'bias_term: false weight_filler { type: "xavier" } }') + loss("fc7")
    )  # fmt: skip


NETS["wide"] = wide(1024)
NETS["very wide"] = wide(4096)  # beside which what a GPU takes besides, in chunks of 2 MiB, is little


# a run of slices may end where little is left
NETS["ends"] = (
    DATA + conv("c1", "data", outputs=8) + conv("c2", "c1", outputs=8) + conv("c3", "c2", outputs=8)
    + layer("Pooling", "p", "c3", "p", POOL) + conv("c4", "p", outputs=8) + loss("c4")
)  # fmt: skip


def solver(device, net="vgg", kind="SGD", tested=True, **options):
    """With a test net, that is run every other iteration, or without."""
    param = read_solver(
        'base_lr: 0.01 lr_policy: "step" gamma: 0.5 stepsize: 2 weight_decay: 0.001 random_seed: 1 test_iter: 1 '
        f"test_interval: 2 {KINDS[kind]}"
    )
    param.net_param.CopyFrom(read_net(NETS[net]))
    for field in () if tested else ("test_iter", "test_interval"):
        param.ClearField(field)
    each = get_solver(param, device=device, memory="train", **{"share": True, **options})
    each.net.passes -= {"slices"}  # which change bits
    return each


def trained(each, iterations=4):
    """Losses and all parameters after each iteration, and the history at the end."""
    trace = []
    for _ in range(iterations):
        each.step(1)
        trace += [np.array(each._losses[-1]), *(entry.blob.cpu_data().copy() for entry in each.net.learnable)]
    return [*trace, *(array.copy() for array in each.updater.arrays())]


@functools.cache
def unlimited(net="vgg", kind="SGD", **options):
    """What a solver holds without a limit, and what it then trains."""
    each = solver(SimulatedDevice(), net, kind, **options)
    trace = trained(each)
    assert not each.net._evicted
    return each.net.device.statistics.peak_bytes, trace


@functools.cache
def least(net="vgg", kind="SGD", **options):
    """The least limit that does, as the error says."""
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver(SimulatedDevice(1), net, kind, **options).step(1)
    return caught.value.requested


def evicted(net):
    return [memory.name for memory in net._evicted]


def fed(device, held, iterations):
    """A solver of a net with a large input, and what it then trains, once a script has filled that so often, in the
    array that it holds or one that it asks for."""
    each, rng = solver(device, "wide input", tested=False), np.random.default_rng(1)
    data = each.net.blobs["data"]
    array = data.data if held else None
    for _ in range(iterations):
        (data.data if array is None else array)[...] = rng.standard_normal(data.shape)
        each.step(1)
    return each, trained(each, 1)


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("net, kind", [*(("vgg", kind) for kind in KINDS), ("caffenet", "SGD")])
def test_solvers_train_the_same_in_less_than_their_state(net, kind):
    needed, trace = unlimited(net, kind)
    lowest, found = least(net, kind), []
    for limit in (lowest, (lowest + needed) // 2):
        device = SimulatedDevice(limit)
        each = solver(device, net, kind)
        assert_same(trained(each), trace)
        found.append(evicted(each.net))
        before = device.statistics.snapshot()
        each.step(4)
        assert device.statistics.peak_bytes <= limit and (device.statistics - before).allocator_calls == 0
    assert lowest < 0.8 * needed and "fc6/0/history" in found[1] and len(found[0]) >= len(found[1])
    assert any(name.endswith("/0") for name in found[0])
    assert any(name.endswith(".diff") for name in found[0]) == (kind in ("two batches", "clipped"))


def test_state_is_evicted_before_the_batch_is_taken_in_slices():
    """Which would change bits; the least is that of either."""
    text = DATA.replace("dim: 3", "dim: 4").replace("dim: 6 dim: 5", "dim: 24 dim: 24") + conv("c1", "data", outputs=16)
    text += conv("c2", "c1", outputs=16) + layer("Pooling", "p", "c2", "p", "pooling_param { global_pooling: true }")
    text += loss("p")

    def built(device, **options):
        net = made(text, device, "train", **options)
        net.compiled()
        return net

    limits = []
    for passes in (["slices"], []):
        with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
            built(SimulatedDevice(1), passes=passes)
        limits.append(caught.value.requested)
    assert limits[0] < limits[1]
    nets = [built(SimulatedDevice(limit), passes=["slices"]) for limit in limits]
    assert [net._sliced is not None for net in nets] == [True, False] and evicted(nets[1])


def test_what_was_tried_without_state_leaves_nothing_behind():
    """Arrays of plans that did not fit are not the net's once one that evicts state has been made."""
    lowest, needed = least("norms"), unlimited("norms")[0]
    each = solver(SimulatedDevice(lowest + (needed - lowest) // 4), "norms")
    each.step(1)
    net = each.net
    used = {*memories(each for passed in net.compiled() for each in passed.calls)}
    assert evicted(net) and {blob.data_view.memory for blob in net.pieces} <= used


@pytest.mark.parametrize("kind", ["SGD", "two batches"])
def test_odd_parameters(kind):
    """Parameters that layers share come for each of these; what forward changes goes back behind it."""
    lowest = least("odd", kind)
    each = solver(SimulatedDevice(lowest), "odd", kind)
    assert_same(trained(each), unlimited("odd", kind)[1])
    assert each.net.device.statistics.peak_bytes <= lowest
    assert {"one/0/history", "still/0", "norm/0", "norm/1"} <= {*evicted(each.net)}
    assert any(call.op == "evict" and call.attributes["home"].name == "norm/0" for call in each.net.compiled()[0].calls)


@pytest.mark.parametrize("kind", ["SGD", "clipped"])
def test_footprints_are_exact(kind):
    """By purposes: what comes to the arena counts as what it is."""
    param = read_solver(f'base_lr: 0.01 lr_policy: "fixed" test_iter: 1 test_interval: 2 {KINDS[kind]}')
    param.net_param.CopyFrom(read_net(NETS["vgg"]))
    capacity = least(kind=kind)
    found = footprint(param, schemes=["planned"], make_device=lambda: SimulatedDevice(capacity), measured=True)[
        "planned"
    ]
    assert found.predicted == found.measured and sum(found.predicted) <= capacity
    purposes = found.train.purposes
    assert purposes["data"] < 20_000 and min(purposes["params"], purposes["gradients"]) > 100_000


def test_with_enough_memory_nothing_is_different():
    needed, trace = unlimited()
    each = solver(SimulatedDevice(needed))
    assert_same(trained(each), trace)
    assert not evicted(each.net)
    assert not any(call.op in ("fetch", "evict") for one in each.net.compiled() for call in one.calls)


def test_less_than_the_least_says_how_much_that_is():
    with pytest.raises(OutOfDeviceMemory, match=f"needs at least {least()} bytes"):
        solver(SimulatedDevice(least() - 1)).step(1)
    device = SimulatedDevice(least() - 1)
    each = solver(device)
    with pytest.raises(OutOfDeviceMemory):
        each.step(1)
    device.capacity += 1
    assert_same(trained(each), unlimited()[1])


def test_each_copy_is_made_once():
    """What an update changes goes there and back; a parameter comes for forward, for backward, and where its update is
    not in its layer, for that."""
    each = solver(SimulatedDevice(least()))
    each.step(3)
    each.param.test_interval = 100
    each.step(1)
    calls = [call for one in each.net.compiled() for call in one.calls]
    copies = {op: [call for call in calls if call.op == op] for op in ("fetch", "evict")}
    coming, going = (
        [call.attributes["home"] for call in found if not isinstance(call.attributes["home"], Parked)]
        for found in copies.values()
    )
    counts = {memory.name: coming.count(memory) for memory in coming}
    assert len(going) == len({*going}) and max(counts.values()) <= 3
    assert counts["fc6/0"] == 2 and counts["fc6/0/history"] == 1
    before = each.net.device.statistics.snapshot()
    each.step(1)
    done = each.net.device.statistics - before
    came, went = (sum(call.operand(0).view.nbytes for call in found) for found in copies.values())
    assert (done.htod_bytes, done.dtoh_bytes) == (came, went + 4)  # and the loss
    assert all(memory.gpu_capacity == 0 for memory in coming)


def test_state_is_fetched_as_early_as_its_copies_want(monkeypatch):
    """Where there is room for it: then calls run between that and the first that waits for it."""
    limit, early = (least() + unlimited()[0]) // 2, []
    for link in (1e15, 1e10):
        monkeypatch.setattr(times, "LINK", link)
        each = solver(SimulatedDevice(limit))
        assert_same(trained(each), unlimited()[1])
        assert each.net.device.statistics.peak_bytes <= limit
        early.append(0)
        for calls in (one.calls for one in each.net.compiled()):
            for at, fetched in enumerate(calls):
                if fetched.op == "fetch" and not isinstance(fetched.attributes["home"], Parked):
                    array = fetched.operand(0).memory
                    early[-1] += next(n for n, call in enumerate(calls[at + 1 :]) if array in memories([call]))
    assert early[1] > early[0]


def test_updates_after_backward_have_the_next_one_fetched_meanwhile():
    """Where there is room for both; but not what the one before has still to write."""
    device = SimulatedDevice()
    blobs = [Blob(256, device=device, name=name) for name in "abc"]
    attributes = {"decay": 0.0, "regularization": "L2", "scale": 1.0, "rate": 0.5, "momentum": 0.9}
    history = Blob(256, device=device, name="history")  # of all
    calls = [call("sgd_update", read_diff(blob), write(blob), write(history), **attributes) for blob in blobs]
    one = ["fetch", "sgd_update", "evict"]
    for names, room, wanted in (
        ([blob.data_view.memory for blob in blobs], 0, 3 * one),
        ([blob.data_view.memory for blob in blobs], 2048, ["fetch", "fetch", *one[1:], *one, *one[1:]]),
        ([history.data_view.memory], 2048, ["fetch", *3 * ["sgd_update"], "evict"]),
    ):
        arena = SyncedMemory(0, device)
        found = state.alone(calls, arena, device, {*names}, room)
        assert [each.op for each in found.calls] == wanted
        for blob in blobs:
            blob.data[...], blob.diff[...] = 1, 2
        history.data[...] = 0
        found.run()
        assert arena.gpu_capacity == (2048 if len(names) == 3 and room else 1024)
        assert [float(blob.data[0]) for blob in blobs] == pytest.approx([0, -0.9, -1.71])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind, part", [("SGD", 0.5), ("clipped", 0)])
def test_copies_may_be_late(monkeypatch, order, kind, part):
    """They are made when somebody waits for them, and so is what is computed, or at random."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    needed, trace = unlimited(kind=kind)
    device = LateSimulated(order, capacity=int(least(kind=kind) * (1 - part) + needed * part))
    each = solver(device, kind=kind)
    assert_same(trained(each), trace)
    assert evicted(each.net)


@pytest.mark.parametrize("order", ORDERS)
def test_slices_of_the_batch_with_state_evicted(monkeypatch, order):
    """Where neither does alone: the same numbers to rounding, never a byte more, whoever is late."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)

    def stepped(device):
        each = solver(device, "both", tested=False)  # a test net has no slices
        each.net.passes |= {"slices"}
        return each, trained(each)

    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        stepped(SimulatedDevice(1))
    assert caught.value.requested < least("both", tested=False)
    each, trace = stepped(LateSimulated(order, capacity=caught.value.requested))
    assert each.net._sliced is not None and "fc6/0" in evicted(each.net)
    assert each.net.device.statistics.peak_bytes <= caught.value.requested
    for found, wanted in zip(trace, unlimited("both", tested=False)[1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * max(1e-30, np.abs(wanted).max()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("tested", [True, False])
def test_large_arrays_come_and_go_in_pieces(monkeypatch, order, tested, spread):
    """Each with its part of the update, spread over what is left of backward, or one right after another."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    monkeypatch.setattr(products, "PIECE", 1 << 11)
    monkeypatch.setattr(Compilation, "spread", property(lambda net: 0.9 * (spread and net._updates is not None)))
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver(SimulatedDevice(1), "pieces", tested=tested).step(1)
    each = solver(LateSimulated(order, capacity=caught.value.requested), "pieces", tested=tested)
    assert_same(trained(each), unlimited("pieces", tested=tested)[1])
    assert each.net.device.statistics.peak_bytes <= caught.value.requested
    copies = [call for call in each.net.compiled()[1].calls if call.op == "evict"]
    pieces = [call.attributes["start"] for call in copies if call.attributes["home"].name == "fc6/0/history"]
    assert len(pieces) > 4 and sorted(pieces) == sorted({*pieces})
    homes = [home for home in each.net._evicted if home.name == "fc6/0/history"]
    assert all(home.cpu_capacity == home.views()[0].nbytes for home in homes)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(("room", "larger"), [(None, 1), (64, 1), (128, 2), (1 << 20, 4)])
def test_pieces_are_larger_where_there_is_room_and_they_are_spread(room, spread, larger):
    most = None if room is None else room * products.PIECE
    assert products.piece_within(most, spread) == (larger if spread else 1) * products.PIECE


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("net", ["pieces", "vgg"])
def test_a_step_with_updates_elsewhere_does_the_same(monkeypatch, order, exact, net):
    """With gradients made in pieces, too, where other bits do; never a byte more."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    monkeypatch.setattr(products, "PIECE", 1 << 11)
    moved = []

    def elsewhere(net, made, most_ms):
        starts, stops = sooner._bounds(made)
        room, draws = room_of(net, made), random.Random(0)
        for _ in range(20):
            moves = {}
            for each in movable(made.places.lasting(range(len(stops)))):
                to, steps = draws.randint(each.least, len(stops)), [*each.fetches, each.step, *each.others]
                calls = (call for at in steps for call in range(starts[at], stops[at]))
                moves |= {} if to in steps else dict.fromkeys(calls, starts[to])
            net._have(made)
            found = sooner.with_moves(net, made, (room, room), times.Times(net.device), moves)
            if found is not None:
                moved.append(len(moves))
                return found
        return made

    monkeypatch.setattr(levels, "sooner", elsewhere)
    limit = (least(net, tested=False) + 2 * unlimited(net, tested=False)[0]) // 3
    device = LateSimulated(order, capacity=limit)
    device.deterministic = exact
    each = solver(device, net, tested=False)
    for one, other in zip(trained(each), unlimited(net, tested=False)[1], strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}))
    assert device.statistics.peak_bytes <= limit and max(moved) > 0
    names = {call.layer_name for call in each.net.compiled()[1].calls if call.op in (*UPDATES, *PRODUCTS)}
    assert names == {"c1", "c2", "fc6", "fc7", "ip"} & {*each.net.layer_names}, "as which they are told of"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [True, False])
def test_a_gradient_of_an_inner_product_is_made_in_pieces(monkeypatch, order, spread):
    """Each right before its part of the update, so that the gradient is never there as a whole."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    monkeypatch.setattr(products, "PIECE", 1 << 11)
    monkeypatch.setattr(Compilation, "spread", property(lambda net: 0.9 * (spread and net._updates is not None)))

    def needed(exact):
        device = SimulatedDevice(1)
        device.deterministic = exact
        with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
            solver(device, "pieces").step(1)
        return caught.value.requested

    least = needed(exact=False)
    device = LateSimulated(order, capacity=least)
    device.deterministic = False
    each = solver(device, "pieces")
    expected = unlimited("pieces")[1]
    for one, other in zip(trained(each), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert device.statistics.peak_bytes <= least < needed(exact=True)
    weights = each.net.params["fc6"][0]
    calls = each.net.compiled()[1].calls
    gradients = [call.operand(2) for call in calls if call.op == "inner_product_backward_weights"]
    assert max(gradient.view.nbytes for gradient in gradients) < weights.nbytes
    assert sum(call.layer_name == "fc6" and call.op == "inner_product_backward_weights" for call in calls) > 4
    assert weights.diff_view.memory not in memories(calls)
    with pytest.raises(SharedBlobError, match="as soon as this gradient is complete"):
        weights.cpu_diff()
    with pytest.raises(OutOfDeviceMemory):
        solver(device=SimulatedDevice(least), net="pieces").step(1)


def test_copies_come_between_calls_on_pieces_of_what_is_evicted_alone():
    """Not between those on slices of the batch, which may run as one."""
    blobs = [Blob((256,)) for _ in range(2)]
    calls = [call("use", replace(read(blob), part=(index, 2))) for blob in blobs for index in range(2)]
    assert updates.apart(calls, [0, 4], {blobs[0].data_view.memory}) == [0, 1, 2, 4]
    assert updates.apart(calls, [0, 4], set()) == [0, 4]


@pytest.mark.parametrize("in_turn, joined", [(False, []), (True, [1])])
def test_what_would_be_back_too_late_stays(in_turn, joined):
    """Backward uses three arrays 3 ms behind forward, which take 2 to come back, alone or behind one another."""
    homes = [Blob((4,)).data_view.memory for _ in range(3)]

    def brought():
        arrays = [Blob((4,)) for _ in homes]
        fetches = [call("fetch", overwrite(a), home=home, start=0) for a, home in zip(arrays, homes, strict=True)]
        uses = [call("use", read(array)) for array in arrays]
        return arrays, [each for pair in zip(fetches, uses, strict=True) for each in pair]

    (first, forward), (_, backward) = brought(), brought()
    timed = SimpleNamespace(ms=lambda call: 1.0, copy_ms=lambda nbytes: 2.0)
    found = state.join([*forward, call("other")], backward, timed, in_turn)
    uses = [each.operand(0).blob for each in found if each.op == "use"]
    assert [at for at, array in enumerate(uses) if array is first[at]] == joined
    assert sum(each.op == "fetch" for each in found) == 3 - len(joined)


@pytest.mark.parametrize("order", ORDERS)
def test_products_by_evicted_weights_are_made_in_pieces(monkeypatch, order):
    """The first while others are on their way; so the weights are never there as a whole. Backward each comes once."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    monkeypatch.setattr(products, "PIECE", 1 << 15)

    def needed(exact):
        device = SimulatedDevice(1)
        device.deterministic = exact
        with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
            solver(device, "wide", tested=False).step(1)
        return caught.value.requested

    least = needed(exact=False)
    device = LateSimulated(order, capacity=least)
    device.deterministic = False
    each = solver(device, "wide", tested=False)
    expected = unlimited("wide", tested=False)[1]
    for one, other in zip(trained(each), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert device.statistics.peak_bytes <= least < needed(exact=True) // 2
    forward, backward = (schedule.calls for schedule in each.net.compiled())
    for name in ("fc6", "fc7"):
        weights = each.net.params[name][0].data_view.memory
        made = [at for at, call in enumerate(forward) if call.op == "inner_product_forward" and call.layer_name == name]
        come = [at for at, call in enumerate(forward) if call.op == "fetch" and call.attributes["home"] is weights]
        assert len(made) > 4 and len(come) > 4 and made[0] < come[-1]
        back = [call for call in backward if call.op == "inner_product_backward_data" and call.layer_name == name]
        assert len(back) > 4
        come = [call for call in backward if call.op == "fetch" and call.attributes["home"] is weights]
        assert len(come) == len({call.attributes["start"] for call in come}) > 4  # once for that and the update


def with_some_staying(monkeypatch, nbytes, piece=1 << 15):
    """Have plans in which up to so many bytes of state stay, if they evict any in pieces."""

    def some(net, found, good):
        copies = [call for call in (*found.forward, *found.backward) if call.op in COPIES]
        net.evict_state(dict.fromkeys(found.state, 0) | staying(copies, nbytes))
        result = levels._fits(net, net._made(streams=1), good)
        result.ms = 0.0  # the best
        return result

    monkeypatch.setattr(levels, "GOOD", 0.0)
    monkeypatch.setattr(levels, "LEVELS", (1.0,))
    monkeypatch.setattr(levels, "_staying", some)
    monkeypatch.setattr(levels, "_abreast", lambda *_: [])
    monkeypatch.setattr(products, "PIECE", piece)


def tight_wide(make, more, tested=True):
    """The solver of a net with so many bytes more than the least."""
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver(make(1), "wide", tested=tested).step(1)
    return solver(make(caught.value.requested + more), "wide", tested=tested)


def assert_near(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


def inexact(order, capacity):
    device = LateSimulated(order, capacity=capacity)
    device.deterministic = False
    return device


@pytest.mark.parametrize(("order", "tested"), [*((order, True) for order in ORDERS), (ORDERS[0], False)])
def test_some_of_evicted_state_stays_on_the_device(monkeypatch, order, tested):
    """Whole pieces, which are not copied: what calls use of the memory itself, and what others bring, go together."""
    with_some_staying(monkeypatch, 80 << 10)
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    each = tight_wide(functools.partial(inexact, order), 200 << 10, tested)
    assert_near(trained(each, 2), trained(solver(SimulatedDevice(), "wide", tested=tested), 2))
    device, partly = each.net.device, {memory: memory.staying for memory in each.net._evicted}
    assert device.statistics.peak_bytes <= device.capacity
    calls = [call for schedule in each.net.compiled() for call in schedule.calls]
    for memory, stays in partly.items():
        whole = memory.views()[0].nbytes
        copied = [content_of(call) for call in calls if call.op in COPIES and call.attributes["home"] is memory]
        assert min((start for _, start, _ in copied), default=whole) == stays
        assert max((start + size for _, start, size in copied), default=whole) == whole
        assert memory.gpu_capacity == stays
        used = [one for call in calls for one in call.present() if one.memory is memory]
        assert max((one.offset + one.nbytes for one in used), default=0) == stays
    assert any(0 < stays < memory.views()[0].nbytes for memory, stays in partly.items())
    before = device.statistics.snapshot()
    each.step(1)
    done = device.statistics - before
    copied = [sum(call.operand(0).view.nbytes for call in calls if call.op == op) for op in ("fetch", "evict")]
    if not tested:
        assert [done.htod_bytes, done.dtoh_bytes] == [copied[0], copied[1] + 4]  # and the loss


def test_who_reads_or_writes_state_that_stays_in_part(monkeypatch):
    """Scripts, and nets that have all of the parameters on the device."""
    with_some_staying(monkeypatch, 80 << 10)
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    traces = []
    tight = tight_wide(functools.partial(inexact, ORDERS[0]), 200 << 10)
    for each in (solver(SimulatedDevice(), "wide"), tight):
        traces.append(trained(each, 1))
        weights = each.net.params["fc7"][0]
        weights.data[:10] *= 2
        weights.data[-10:] *= 2
        each.updater.history[2][0].data[...] = 0.5
        traces[-1] += trained(each, 1)
        if each is tight:
            each.net.device.capacity *= 4
        other = Net(read_net(NETS["wide"]), TEST, device=each.net.device, seed=1, memory="keep")
        other.share_with(each.net)
        each.step(1)
        traces[-1] += [other.run_forward(), weights.cpu_data().copy()]
    assert max(memory.staying for memory in tight.net._evicted) > 0
    assert_near(*traces)


def inexact_cuda(limit):
    device = EmulatedCuda(limit)
    device.deterministic = False
    return device


@pytest.mark.parametrize(
    ("make", "limit", "net", "nbytes", "piece"),
    [
        pytest.param(inexact_cuda, None, "wide", 1 << 17, 1 << 15, id="emulated", marks=needs_compiler),
        # the least that a GPU names is more, as it has not tried any convolutions then
        pytest.param(lambda limit: make_gpu(limit=limit), 80 << 20, "very wide", 12 << 20, 1 << 21, id="cuda",
                     marks=needs_gpu),
    ],
)  # fmt: skip
def test_state_stays_in_part_beside_cuda_graphs(monkeypatch, make, limit, net, nbytes, piece):
    with_some_staying(monkeypatch, nbytes, piece)
    stays = []  # in each iteration, as what a convolution takes is known only when it has run

    def stepped(one):
        trace = []
        for iteration in range(3):
            trace += trained(one, 1)
            stays.append(any(memory.staying for memory in one.net._evicted))
            if iteration == 1:
                one.net.params["fc7"][0].data[:10] *= 0.5
        return trace

    each = tight_wide(make, 0) if limit is None else solver(make(limit), net)
    assert_near(stepped(each), stepped(solver(make(None), net)))
    assert any(stays)
    assert "" in each.net.why_eager(backward=True).values()  # some of it is in graphs


def test_what_stays_is_what_is_copied_most_often_in_whole_pieces():
    homes = [SyncedMemory(64, SimulatedDevice(), name) for name in ("twice", "torn", "whole", "once")]

    def copies(op, home, *pieces):
        return [
            call(op, read(Blob((stop - start,), dtype=np.uint8)), home=home, start=start, sums=False)
            for start, stop in pieces
        ]

    twice, torn, whole, once = homes
    quarters = [(start, start + 16) for start in range(0, 64, 16)]
    made = [
        *copies("fetch", twice, *quarters), *copies("evict", twice, *quarters), *copies("fetch", once, *quarters),
        *copies("fetch", torn, *quarters), *copies("evict", torn, (0, 32), (32, 64)), *copies("fetch", whole, (0, 64)),
        *copies("evict", whole, (0, 64)), *copies("fetch", whole, (0, 64)),
    ]  # fmt: skip
    assert staying(made, 20) == {twice: 16, torn: 0, once: 0}
    assert staying(made, 100) == {twice: 64, torn: 32, once: 0}
    assert staying(made, 1000) == {twice: 64, torn: 64, once: 64}
    assert not is_torn(made)
    twice.staying = 16
    assert is_torn(made) and not is_torn(each for each in made if each.attributes["start"])


def test_the_fastest_is_found_with_state_that_comes_sooner(monkeypatch):
    """Not before, when one that waits for its copies seems to take longer; and not where somebody looks between layers,
    who may write what has come."""
    comes = {10.0: 9.0, 11.0: 8.0, 12.0: 11.0}
    found = [Made([], [], [], [], set(), ms=ms) for ms in comes]
    monkeypatch.setattr(levels, "fitting", lambda *_: found)
    monkeypatch.setattr(levels, "sooner", lambda net, each, most_ms: replace(each, ms=comes[each.ms]))
    home = SyncedMemory(64)
    home.staying = 16

    def fitted(evicted, spread, watched):
        return levels._fits(SimpleNamespace(_evicted=evicted, spread=spread, _is_watched=lambda: watched), found[0])

    assert fitted([home], 0.9, False).ms == 8.0
    assert [(each.state, each.spread) for each in found] == [({home: 16}, 0.9)] * 3
    assert fitted([home], 0.9, True) is fitted([], 0.0, True) is found[0]


@pytest.mark.parametrize(("took", "tried"), [((9.0, 8.0, 7.0), 3), ((9.0, 9.5), 2), ((11.0, 12.0), 2)])
def test_more_stays_while_that_makes_a_step_less(monkeypatch, took, tried):
    """Where copies take much of it."""
    home, parts, found = SyncedMemory(64, SimulatedDevice()), [], iter(took)
    copy = call("fetch", read(Blob((64,), dtype=np.uint8)), home=home, start=0, sums=False)

    def made(ms):
        units = [[SimpleNamespace(calls=[copy])], []]
        return Made([], [], [], [], set(), drawn=SimpleNamespace(units=units), ms=ms, state={home: 0})

    monkeypatch.setattr(levels, "STAYING", (0.1, 0.2, 0.3))
    monkeypatch.setattr(levels, "room_of", lambda *_: 800)
    monkeypatch.setattr(levels, "Times", lambda _: SimpleNamespace(ms=lambda _: 7.0))
    monkeypatch.setattr(levels, "staying", lambda copies, room: parts.append(room) or {home: 16})
    monkeypatch.setattr(levels, "_fits", lambda *_: made(next(found)))
    net = SimpleNamespace(
        device=None, updates_in_backward=True, evict_state=lambda *_: None, _made=lambda streams: None
    )
    assert levels._staying(net, made(10.0), 0.0).ms == min(10.0, *took)
    assert parts == [part * 800 for part in levels.STAYING[:tried]]
    parts.clear()
    slow = made(20.0)
    assert levels._staying(net, slow, 0.0) is slow and not parts


def test_fewer_and_longer_slices_are_tried_where_updates_are_spread(monkeypatch):
    monkeypatch.setattr(levels, "_fits", lambda net, made, good, slices, most_ms: slices)
    monkeypatch.setattr(levels, "longer", lambda net, run: [])

    def tried(*runs, spread):
        sliced = Sliced([], [], [], tuple(Division(*run) for run in runs), 0, [], [])
        net = SimpleNamespace(spread=spread, _made=lambda streams: None)
        return [
            [run[:3] for run in runs] for runs in levels._in_less(net, 0.0, Made([], [], [], [], set(), sliced=sliced))
        ]

    assert tried((1, 5, 32), spread=0.0) == [[(1, 5, 32)]]
    assert tried((1, 5, 32), spread=0.9) == [[(1, 5, 32)], [(1, 5, 16)], [(1, 5, 8)], [(1, 5, 4)]]
    assert tried((1, 5, 6), spread=0.9) == [[(1, 5, 6)], [(1, 5, 3)]]
    assert tried((1, 5, 2), spread=0.9) == [[(1, 5, 2)]]
    assert tried((1, 5, 8), (6, 9, 2), spread=0.9) == [[(1, 5, 8), (6, 9, 2)], [(1, 5, 4)]]
    monkeypatch.setattr(levels, "longer", lambda net, run: [9])
    assert tried((1, 5, 4), spread=0.0) == [[(1, 5, 4)]]
    assert tried((1, 5, 4), spread=0.9) == [[(1, 5, 4)], [(1, 5, 2)], [(1, 9, 4)], [(1, 9, 2)]]


def test_runs_are_split_while_that_takes_less_time(monkeypatch):
    """The best of each turn; but never so that what stays of state is torn, nor in fewer slices than take longer."""
    took = {1: 10.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: 8.5, 6: 9.5, 7: 1.0}
    following = {1: [[2, 6, 7], [3, 4]], 3: [[5]]}
    asked = []

    def made(number):
        sliced = Sliced([], [], [], (Division(1, number, 2),), 0, [], [])
        return Made([number], [], [], [], set(), sliced=sliced, ms=took[number], state={"w": 3}, spread=0.9)

    runs_of = {at: made(at).sliced.runs for at in took}
    monkeypatch.setattr(
        levels, "splits", lambda _, runs: [[runs_of[at] for at in several] for several in following[runs[0].last]]
    )
    monkeypatch.setattr(levels, "_fits", lambda net, calls, good, slices, most_ms: made(slices[0][0].last))
    monkeypatch.setattr(levels, "is_torn", lambda calls: calls == [4])
    net = SimpleNamespace(evict_state=lambda *given: asked.append(given), _made=lambda streams: None)
    assert levels._split(net, made(1), 0.0).ms == 8.0
    assert asked == [({"w": 3}, 0.9)] * 2
    assert levels._split(net, made(1), 10.0).ms == 10.0 and len(asked) == 2, "it is good enough"


@pytest.mark.parametrize("little", [True, False])
def test_little_state_is_tried_once_and_much_in_steps(monkeypatch, little):
    """Behind all of it, which fits if anything does; much of it with updates spread over backward."""
    monkeypatch.setattr(levels, "LITTLE", 0 if little else 1 << 30)
    monkeypatch.setattr(levels, "LEVELS", QUARTERS)
    monkeypatch.setattr(levels, "GOOD", 0.0)  # whatever is found is slow
    tried, in_less = [], levels._in_less

    def noted(net, good, best, most_ms):
        found = in_less(net, good, best, most_ms)
        tried.append(
            (sum(memory.views()[0].nbytes for memory in net._evicted), net._spread > 0, isinstance(found, Made))
        )
        return found

    monkeypatch.setattr(levels, "_in_less", noted)
    needed, wanted = unlimited("images", tested=False)
    limit = (3 * needed + least("images", tested=False)) // 4
    tried.clear()
    each = solver(SimulatedDevice(limit), "images", tested=False)
    assert_same(trained(each), wanted)
    found = [(nbytes, late) for nbytes, late, fits in tried if fits]
    state = sum(array.nbytes for array in (*each.updater.arrays(), *(e.blob.cpu_data() for e in each.net.learnable)))
    if little:
        assert [late for _, late in found] == [False, False] and 0.5 * state < found[1][0] < found[0][0]
    else:
        sizes = [nbytes for nbytes, late in found if late]
        assert len(sizes) > 2 and sizes == sorted({*sizes}) and sizes[-1] > 0.7 * state


def in_levels(monkeypatch, count, took, calls=1, exact=False, passes=frozenset()):
    """A net of so many calls, with so many arrays of state, and what makes its plans of the ms that they take. `took` says
    how many, given how many arrays are evicted, the part of the room that spread updates leave, and the best before if
    slices are tried."""
    evicted, spread = [], [0.0]

    def made(ms):
        draft = SimpleNamespace(layout=SimpleNamespace(nbytes=1 << 20))
        state = dict.fromkeys(evicted, 0)
        return Made([None] * calls, [], [], [], set(), drawn=draft, ms=ms, state=state, spread=spread[0])

    def in_less(net, good, best, most_ms=math.inf):
        return made(took(len(evicted), spread[0], best))

    def evict_state(state, part=0.0):
        evicted[:], spread[0] = state, part

    for name, stub in {
        "LEVELS": QUARTERS, "fits": lambda *_: False, "room_of": lambda *_: 0, "Times": lambda _: None,
        "reckon": lambda *_: SimpleNamespace(ms=1.0), "_fits": lambda *_: made(10.0), "_abreast": lambda *_: [],
        "_staying": lambda net, found, good: found, "_in_less": in_less,
        "_candidates": lambda *_: [levels._Candidate(at, 1 << 18, 1.0) for at in range(count)],
    }.items():  # fmt: skip
        monkeypatch.setattr(levels, name, stub)
    device = SimpleNamespace(deterministic=exact, most_bytes=1 << 20)
    net = SimpleNamespace(
        device=device, passes=passes, _dynamic=False, take_sources=lambda: False, evict_state=evict_state, inputs=[]
    )
    return net, made


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("best, between", [(10, [15]), (30, [25, 33]), (36, [33, 38]), (40, [38])])
def test_state_half_way_to_what_was_tried_beside_the_best(monkeypatch, best, between, exact):
    """Not where a plan is to give the same bits: each takes a while."""
    tried = []

    def took(count, part, _):
        tried.append((count, part))
        return 9.0 + abs(count - best) + (part == 0)

    net, made = in_levels(monkeypatch, 40, took, exact=exact)
    found = levels._Search(net, made(1000.0), made(1000.0)).run()
    usual = [10, 20, 30, *([] if exact else [36]), 40]
    assert [count for count, part in tried if part] == usual + ([] if exact else between)
    assert len(found.state) == (min(usual, key=lambda count: abs(count - best)) if exact else best)


@pytest.mark.parametrize("late, last", [(True, 7), (False, 1)])
def test_updates_are_spread_over_what_is_left(late, last):
    """Two of twelve calls, where each takes 1 ms: the last one comes after two thirds."""
    weights = [Blob((4,), name=f"w{at}") for at in range(2)]
    x = Blob((4,), name="x")
    update = [call("sgd_update", read(x), overwrite(weight)) for weight in weights]
    other = [call("relu_forward", read(x), overwrite(x)) for _ in range(10)]
    clock = SimpleNamespace(ms=lambda each: 1.0)
    evicted, calls = {weight.data_view.memory for weight in weights}, [*update, *other]
    found = updates.spread(calls, range(len(calls) + 1), evicted, clock, late, 1 << 20).calls
    assert max(at for at, each in enumerate(found) if each.op == "sgd_update") == last
    assert len(found) == len(calls)


@pytest.mark.parametrize("calls", [1, levels.MANY])
def test_of_many_calls_no_more_state_is_tried_once_that_is_no_help(monkeypatch, calls):
    """Nor slices, where the whole batch fits: each plan takes a minute."""
    found, tried = itertools.chain((8.0, 8.5, 9.0, 7.0, 6.0), itertools.repeat(20.0)), []

    def took(count, _, best):
        tried.append((count, best is not None))
        return next(found)

    net, made = in_levels(monkeypatch, 4, took, calls, passes={"slices"})
    best = levels._fitted(net, made(0.0))
    if calls == levels.MANY:  # the first level, also with updates where they are, and the second
        assert tried == [(1, False), (1, False), (2, False)] and best.ms == 8.0
    else:
        assert {many for many, _ in tried} == {0, 1, 2, 3, 4} and any(sliced for _, sliced in tried) and best.ms < 8.0


@pytest.mark.parametrize("calls", [1, levels.MANY])
def test_of_many_calls_less_and_less_state_is_tried_while_that_helps(monkeypatch, calls):
    """Where nothing fits without: with little of it most is made anew, which takes longest to plan."""
    ms, tried = {1: 5.0, 2: 9.0, 3: 8.0, 4: 30.0}, []

    def took(count, *_):
        tried.append(count)
        return ms[count]

    net, made = in_levels(monkeypatch, 4, took, calls)
    best = levels._Search(net, made(0.0), OutOfDeviceMemory("", 1 << 20, 0, 0, [])).run()
    in_turn = [count for count, _ in itertools.groupby(tried)]
    if calls == levels.MANY:
        assert in_turn == [4, 3, 2] and best.ms == 8.0
    else:
        assert in_turn[:4] == [4, 1, 2, 3] and best.ms == 5.0


def test_a_longer_run_ends_where_half_as_much_crosses_its_end():
    """Behind the pooling layer, which leaves a quarter, and behind the scores."""
    net = solver(SimulatedDevice(), "ends", tested=False).net
    found = {name: longer(net, Division(1, at, 2)) for at, name in enumerate(net.layer_names)}
    pool, scores = net.layer_names.index("p"), net.layer_names.index("ip")
    assert found["c1"] == found["c2"] == found["c3"] == [pool]
    assert found["p"] == found["c4"] == [scores]


def test_a_large_gradient_is_alone_with_what_it_is_made_of():
    """Its parameter has been used before, and is updated in pieces at once: so the least is little more than it."""
    each = solver(SimulatedDevice(1), "small", tested=False)
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        each.step(1)
    each = solver(SimulatedDevice(caught.value.requested), "small", tested=False)
    each.net.passes -= {"slices"}
    assert_same(trained(each), unlimited("small", tested=False)[1])
    ops = [each.op for each in each.net.compiled()[1].calls if each.layer_name == "fc7" and each.op != "fetch"]
    assert ops[:2] == ["inner_product_backward_data", "inner_product_backward_weights"]
    usual = solver(SimulatedDevice(), "small", tested=False).net.compiled()[1].calls
    ops = [each.op for each in usual if each.layer_name == "fc7"]
    assert ops[0] == "inner_product_backward_weights"


@pytest.fixture(params=[pytest.param(EmulatedCuda, marks=needs_compiler, id="emulated"), EXACT_GPU])
def make(request):
    return request.param


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # for which float16's steps are left out
@pytest.mark.parametrize(
    "kind, dtype", [("SGD", "float32"), ("two batches", "float32"), ("SGD", "float16"), ("SGD", "bfloat16")]
)
def test_beside_cuda_graphs(make, kind, dtype):
    """In halves what is kept of masters is evicted, too."""

    def stepped(limit):
        each = solver(make(limit) if make is EmulatedCuda else make(limit=limit), "small", kind, dtype=dtype)
        trace = trained(each, 4)
        each.net.params["fc6"][0].data[::2] = 0.01  # as somebody may at any time
        trace += trained(each, 4)
        return each, [*(array.astype(np.float32) for array in trace), *each.updater.unrounded().values()]

    unlimited, trace = stepped(None)
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        stepped(1)
    limit = caught.value.requested
    tight, found = stepped(limit)
    assert_same(found, trace)
    assert tight.net.device.statistics.peak_bytes <= limit < unlimited.net.device.statistics.peak_bytes
    assert "fc6/0/history" in evicted(tight.net) and "" in tight.net.why_eager().values()  # some of it is in graphs
    assert ("fc6/0/master" in evicted(tight.net)) == (dtype == "float16")
    assert ("fc6/0/lower" in evicted(tight.net)) == (dtype == "bfloat16")


@needs_compiler
def test_gradients_are_made_in_pieces_beside_cuda_graphs(monkeypatch):
    monkeypatch.setattr(products, "PIECE", 1 << 11)

    def stepped(limit):
        device = EmulatedCuda(limit)
        device.deterministic = False
        each = solver(device, "pieces", tested=False)
        return each, trained(each)

    _, expected = stepped(None)
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        stepped(1)
    each, found = stepped(caught.value.requested)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert each.net.device.statistics.peak_bytes <= caught.value.requested
    calls = each.net.compiled()[1].calls
    assert sum(call.op == "inner_product_backward_weights" for call in calls) > 4
    assert "" in each.net.why_eager(backward=True).values()  # some of it is in graphs


@pytest.mark.parametrize("held", [True, False])
def test_an_input_is_evicted_beside_cuda_graphs(make, held):
    """Whose copies read what a script has written for that step."""

    def stepped(limit):
        return fed(make(limit) if make is EmulatedCuda else make(limit=limit), held, 8)

    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        stepped(1)
    tight, found = stepped(caught.value.requested)
    assert_same(found, stepped(None)[1])
    assert "" in tight.net.why_eager().values()
    if make is EmulatedCuda:  # once a GPU has timed calls, less workspace may do
        assert "data" in evicted(tight.net)


@functools.cache
def least_of_late():
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver(LateCuda(capacity=1), "small", tested=False).step(1)
    return caught.value.requested


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_copies_are_parts_of_graphs(order):
    """One of each pass, whoever looks in between; and what is read or written there counts."""
    each = solver(LateCuda(order, capacity=least_of_late()), "small", tested=False)
    wanted = solver(LateCuda(order), "small", tested=False)
    assert_same(trained(each), trained(wanted))
    net, device = each.net, each.net.device
    assert {*net.why_eager().values(), *net.why_eager(backward=True).values()} == {""}
    assert [len(one.pieces(0, None)) for one in net.compiled()] == [1, 1]
    graphs = len(device.captured)
    for one in (each, wanted):
        one.step(2)  # with nobody looking
        one.net.params["fc6"][0].data[:10] *= 2
        one.updater.history[0][0].data[...] = 0.5
        one.step(2)
    assert_same(trained(each, 2), trained(wanted, 2))
    assert len(device.captured) == graphs
    copies = [call for one in net.compiled() for call in one.calls if call.op in ("fetch", "evict")]
    before = device.statistics.snapshot()
    each.step(1)
    done = device.statistics - before
    nbytes = {op: sum(copy.operand(0).view.nbytes for copy in copies if copy.op == op) for op in ("fetch", "evict")}
    assert (done.htod_bytes, done.dtoh_bytes) == (nbytes["fetch"], nbytes["evict"] + 4)  # and the loss


@needs_compiler
@pytest.mark.parametrize("fewest", [0, 99])
def test_the_loss_is_waited_for_before_anything_is_copied_in_backward(monkeypatch, fewest):
    """Or at once where the calls before that are too few for a graph."""
    monkeypatch.setattr(compilation, "LEAST", fewest)
    each = solver(LateCuda(capacity=least_of_late()), "small", tested=False)
    each.step(1)
    _, first, rest = each.net.whole_runs()
    copied = [call.op in COPIES for call in rest.schedule.calls]
    assert first.stop == rest.start == (0 if fewest else copied.index(True))


# -------------------------------------------------------------------- whoever looks


def pair(kind="SGD", **options):
    """A solver without a limit, and one with the least."""
    return solver(SimulatedDevice(), kind=kind, **options), solver(
        SimulatedDevice(least(kind=kind)), kind=kind, **options
    )


@pytest.mark.parametrize("part", [0.1, 0.3])
@pytest.mark.parametrize("net", ["vgg", "caffenet", "wide"])
def test_what_a_callback_of_forward_writes_counts(monkeypatch, net, part):
    """Though backward had parameters that forward had brought, and history that came before it began."""
    monkeypatch.setattr(times, "LINK", 1e10)
    traces = []
    for limit in (None, int(least(net) + part * (unlimited(net)[0] - least(net)))):
        each = solver(SimulatedDevice(limit), net)
        each.step(1)
        if limit is not None:
            forward, backward = ([*map(content_of, filter(copies_state, one.calls))] for one in each.net.compiled())
            assert {*forward} & {*backward}, "which is changed in backward, and has come before"

        def write(index, each=each):
            if index == len(each.net.layers) - 1:
                for entry, kept in each.updater._entries:
                    for blob in (entry.blob, *kept):
                        blob.data[...] += 0.01

        each.net.after_forward(write)
        traces.append(trained(each, 2))
    assert_same(traces[1], traces[0])


def test_what_a_script_writes_between_steps_counts():
    traces = []
    for each in pair():
        traces.append(trained(each, 2))
        each.net.params["fc6"][0].data[:10] *= 2
        held = each.net.params["fc7"][0].data
        each.updater.history[2][0].data[...] = 0.5
        held[0] = 3
        traces[-1] += trained(each, 2)
        each.net.params["fc6"][0].data[...] = 0
        each.net.run_forward()
        traces[-1].append(each.net.blobs["loss"].cpu_data().copy())
    assert_same(*traces)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("held", [True, False])
def test_an_input_is_evicted_while_nobody_reads_it(monkeypatch, order, held):
    """As other state is: what a script has written is at the host, in an array that it holds too, and is read there
    before it writes the next batch."""
    monkeypatch.setattr(steps.Step, "launch", launch_late)
    needed, traces = least("wide input", tested=False), []
    for device in (SimulatedDevice(), LateSimulated(order, capacity=needed)):
        each, trace = fed(device, held, 4)
        traces.append(trace)
    assert_same(*traces)
    data = each.net.blobs["data"]
    assert "data" in evicted(each.net) and device.statistics.peak_bytes <= needed
    assert needed < unlimited("wide input", tested=False)[0] - data.nbytes / 2
    before = device.statistics.snapshot()
    each.step(2)
    moved = device.statistics - before
    assert moved.htod_bytes >= moved.dtoh_bytes + 4 * data.nbytes  # it only comes


def test_an_input_that_is_filled_on_the_device_stays_there():
    """As there may be no room to fill it again."""
    free, needed = solver(SimulatedDevice(), "wide input", tested=False), least("wide input", tested=False)
    data = free.net.blobs["data"]
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        each = solver(SimulatedDevice(needed), "wide input", tested=False)
        each.net.blobs["data"].mutable_gpu_data()
        each.step(1)
    assert caught.value.requested > needed + data.nbytes / 2
    tight, traces = solver(SimulatedDevice(caught.value.requested), "wide input", tested=False), []
    for each in (free, tight):
        rng, blob = np.random.default_rng(1), each.net.blobs["data"]
        for _ in range(3):
            array = each.net.device.as_array(blob.mutable_gpu_data(), blob.shape, np.float32)
            array[...] = rng.standard_normal(blob.shape)
            each.step(1)
        traces.append(trained(each, 1))
    assert_same(*traces)
    assert "data" not in evicted(tight.net) and tight.net.device.statistics.peak_bytes <= caught.value.requested


def test_what_slices_of_the_batch_read_comes_once_for_a_run_of_them():
    """What they change comes, and goes, for each of its uses."""

    def found(intent, *layers):
        blob = Blob([4, 8], name="input")
        uses = [call("copy", replace(intent(blob), part=(at % 2, 2))) for at in range(len(layers))]
        for each, number in zip(uses, layers, strict=True):
            each.layer = number
        whiles = state.whiles_of(uses, range(len(uses) + 1), {blob.data_view.memory}, together=[(1, 2)])
        return [each.uses for each in whiles[blob.data_view.memory]]

    assert found(read, 1, 1, 2, 2) == [[0, 2], [1, 3]]
    assert found(read, 0, 0, 3, 3) == found(read, 1, 1, 3, 3) == [[0], [1], [2], [3]]
    assert found(write, 1, 1, 2, 2) == [[0], [1], [2], [3]]


def test_who_wants_it_on_the_device_has_it_there():
    """By memory of the device, which there has to be."""
    free, tight = pair()
    for each in (free, tight):
        each.step(2)
    memory = tight.net.params["fc6"][0].data_view.memory
    assert memory.evicted and memory.gpu_capacity == 0
    with pytest.raises(OutOfDeviceMemory):
        tight.net.params["fc6"][0].gpu_data()
    tight.net.device.capacity *= 2
    traces = []
    for each in (free, tight):
        blob = each.net.params["fc6"][0]
        array = each.net.device.as_array(blob.mutable_gpu_data(), blob.shape, np.float32)
        array *= 2
        traces.append(trained(each, 2))
    assert_same(*traces)


def test_other_nets_share_the_parameters():
    """One that keeps all its blobs takes them on the device; one with an arena brings them, and so a test net does."""
    traces = []
    for each in pair():
        each.net.device.capacity *= 3
        others = [
            Net(read_net(NETS["vgg"]), TEST, device=each.net.device, seed=1, memory=memory)
            for memory in ("keep", "inference")
        ]
        for other in others:
            other.share_with(each.net)
        traces.append([])
        for _ in range(3):
            each.step(1)
            traces[-1] += [other.run_forward() for other in (*others, *each.test_nets)]
        kept, brings = (any(call.op == "fetch" for call in other.compiled()[0].calls) for other in others)
        assert not kept and brings == bool(evicted(each.net))
    assert_same(*traces)


@pytest.mark.parametrize("kind", ["Adam", "two batches"])
def test_snapshots_are_the_same(tmp_path, monkeypatch, kind):
    files = []
    for name, each in zip("ab", pair(kind), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        each.param.snapshot_prefix = "s"
        each.step(3)
        each.snapshot()
        each.step(2)
        files.append([(path.name, path.read_bytes()) for path in sorted(folder.iterdir())])
        trace = trained(each, 1)
        each.restore("s_iter_3.solverstate")
        each.step(2)
        assert_same(trained(each, 1), trace)
        each.net.copy_trained_layers_from("s_iter_3.caffemodel")
        files[-1].append(trained(each, 1)[1].tobytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("call, nth", [("memcpy_htod", 2), ("memcpy_htod", 9), ("memcpy_dtoh", 1), ("memcpy_dtoh", 4)])
def test_a_copy_that_fails_loses_nothing(caplog, call, nth):
    """Parameters are what they were, but for those whose updates have ended; then the warning says so."""
    each, (_, trace) = solver(SimulatedDevice(least())), unlimited()
    each.step(1)
    count = itertools.count(1)
    each.net.device.fail_at = lambda name, _: name == call and next(count) == nth
    with pytest.raises(DeviceError, match="as fail_at asked"):
        each.step(1)
    each.net.device.fail_at = None
    now, size = [entry.blob.cpu_data().copy() for entry in each.net.learnable], len(each.net.learnable)
    states = zip(now, trace[1 : size + 1], trace[size + 2 :], strict=False)
    kinds = {(np.array_equal(at, before), np.array_equal(at, after)) for at, before, after in states}
    amid = "amid its updates" in caplog.text
    assert kinds <= ({(True, False), (False, True)} if amid else {(True, False)})
    each.step(1)


@pytest.mark.parametrize("kind", ["two batches", "clipped"])
def test_a_copy_that_fails_amid_updates_after_backward_is_told(caplog, kind):
    each = solver(SimulatedDevice(least(kind=kind)), kind=kind)
    each.step(1)
    count, copies = itertools.count(), each.net.device.statistics.dtoh_copies
    each.step(1)
    last = each.net.device.statistics.dtoh_copies - copies
    each.net.device.fail_at = lambda name, _: name == "memcpy_dtoh" and next(count) == last - 4
    with pytest.raises(DeviceError, match="as fail_at asked"):
        each.step(1)
    each.net.device.fail_at = None
    assert each.iter == 2 and "amid its updates" in caplog.text
    each.step(1)


def test_a_net_without_a_solver():
    """Its gradients are evicted, too, and parts of passes find what they need."""
    text, runs = NETS["vgg"], []
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        made(text, SimulatedDevice(1), "train", passes=()).compiled()
    for device in (SimulatedDevice(), SimulatedDevice(caught.value.requested)):
        net = made(text, device, "train", passes=())
        net.clear_param_diffs()
        trace = [net.run_forward()]
        net.run_backward()
        net.run_forward()
        net.run_backward()  # adds
        trace += [entry.blob.cpu_diff().copy() for entry in net.learnable]
        run_layer_by_layer(net)
        trace += [entry.blob.cpu_diff().copy() for entry in net.learnable]
        runs.append(trace)
    assert {"fc6/0", "fc6/0.diff"} & {*evicted(net)}
    assert_same(*runs)


def test_parts_of_passes_give_the_right_numbers_or_none(monkeypatch):
    """What is brought before its layer is not there for that layer by itself, which says so."""
    monkeypatch.setattr(times, "LINK", 1e9)
    text = NETS["vgg"]
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        made(text, SimulatedDevice(1), "train", passes=()).compiled()
    kept = made(text, SimulatedDevice(), "keep")
    net = made(text, SimulatedDevice(caught.value.requested + 400_000), "train", passes=(), keep=["p"])
    for each in (kept, net):
        each.clear_param_diffs()
        each.run_forward()
        each.run_backward()
    with pytest.raises(SharedBlobError, match="'fc6/0'.*brought there by whole passes"):
        net.run_forward(net.layer_names.index("fc6"))
    ask_at_random(1, net, kept, ["forward", "start", "between", "backward", "down from", "down to", "layer by layer"])


@pytest.mark.parametrize("kind", ["SGD", "two batches"])
def test_smaller_and_larger_batches_take_turns(kind):
    """A plan that evicts more has a larger arena than there is room for where less is evicted."""
    traces, counts = [], []
    limit = 1_050_000 if kind == "SGD" else 1_000_000
    for device in (SimulatedDevice(), SimulatedDevice(limit)):
        each = solver(device, "inputs", kind)
        traces.append([])
        for items in (3, 24, 3, 24):
            for net in (*each.test_nets, each.net):
                for name in ("data", "t"):
                    blob = net.blobs[name]
                    blob.reshape(items, *blob.shape[1:])
                    blob.data[...] = np.random.default_rng(items).normal(size=blob.shape)
            each.net.reshape()
            traces[-1] += trained(each, 2)
            counts.append(len(evicted(each.net)))
    assert_same(*traces)
    assert device.statistics.peak_bytes <= limit and counts[-1] > 0
    assert kind != "SGD" or (counts[-2] < counts[-1] and device.statistics.shrinks > 0)


@pytest.mark.parametrize("limit", [150_000, 180_000, 190_000])
def test_a_test_net_s_larger_batch_before_takes_no_room(limit):
    """Its plan of a shape that it no longer has does not keep the bytes of an arena that is to be smaller."""
    traces = []
    for device in (SimulatedDevice(), SimulatedDevice(limit)):
        each = solver(device, "images", "Adam")
        traces.append([])
        for items in (24, 3):
            for net in (*each.test_nets, each.net):
                for name in ("data", "t"):
                    blob = net.blobs[name]
                    blob.reshape(items, *blob.shape[1:])
                    blob.data[...] = np.random.default_rng(items).normal(size=blob.shape)
            traces[-1] += trained(each, 3)
    assert_same(*traces)
    assert device.statistics.peak_bytes <= limit


def test_a_net_that_has_room_again_evicts_nothing():
    """It is planned anew for another shape; nothing that was evicted is lost."""
    free, tight = pair()
    traces = []
    for each in (free, tight):
        trace = trained(each, 2)
        each.net.device.capacity = 1 << 30
        each.net.reshape()
        traces.append(trace + trained(each, 2))
    assert not evicted(tight.net) and not tight.net.params["fc6"][0].data_view.memory.evicted
    assert_same(*traces)
