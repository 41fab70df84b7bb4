"""Steps that run as one captured graph do what they do one by one."""

import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EMULATED, EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda

import blobmem
from blobmem import TEST, TRAIN
from blobmem.memory import Side
from blobmem.net.captured import Captured

NET = """
name: "net"
layer { name: "data" type: "Input" top: "data" top: "label"
  input_param { shape { dim: 4 dim: 2 dim: 6 dim: 6 } shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "norm" type: "LRN" bottom: "conv" top: "norm" }
layer { name: "drop" type: "Dropout" bottom: "norm" top: "drop" dropout_param { dropout_ratio: 0.4 } }
layer { name: "fc" type: "InnerProduct" bottom: "drop" top: "fc"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""

DEVICES = pytest.mark.parametrize("make", [EMULATED, EXACT_GPU])


def solver(device, text=NET, iter_size=1, **options):
    param = blobmem.proto.caffe_pb2.SolverParameter(
        base_lr=0.1, momentum=0.9, weight_decay=1e-3, lr_policy="step", gamma=0.5, random_seed=3
    )
    param.stepsize = 3
    param.iter_size = iter_size
    param.net_param.CopyFrom(blobmem.proto.text.read_net(text))
    return blobmem.get_solver(param, device=device, **options)


def fill(net, seed):
    rng = np.random.default_rng(seed)
    net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = rng.integers(0, 5, net.blobs["label"].shape)


def captured(net):
    """Whether the pieces that run of each direction are graphs by now."""
    return [
        [bool(piece._graphs) for pieces in found for piece in pieces if isinstance(piece, Captured)]
        for found in (schedule._captured.values() for schedule in net.compiled())
    ]


def state(net):
    return [blob.cpu_data().copy() for blobs in net.params.values() for blob in blobs]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def both(make, **options):
    """A solver that captures, and its twin that does not."""
    twin = make()
    twin.graphs = False
    return solver(make(), **options), solver(twin, **options)


@DEVICES
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_training_is_the_same(make, memory):
    one, other = both(make, memory=memory)
    for step in range(9):  # rates change at 3 and 6, dropout's draws in each
        losses = []
        for each in (one, other):
            fill(each.net, step)
            each.step(1)
            losses.append(float(each.net.blobs["loss"].cpu_data()))
        assert losses[0] == losses[1] and same(state(one.net), state(other.net)), step
    forward, backward = captured(one.net)
    assert forward == [True] and all(backward) and len(backward) >= 1 and captured(other.net) == [[], []]


@DEVICES
def test_what_is_written_and_read_between_replays(make):
    one, other = both(make)
    for step in range(12):
        results = []
        for each in (one, other):
            net = each.net
            if step % 2:
                fill(net, step)
            net.clear_param_diffs()
            net.run_forward()
            if step == 6:
                net.blobs["norm"].data[...] *= 2  # which a part of the net goes on from
                net.run_forward(net.layer_names.index("drop"))
            if step == 7:
                net.params["conv"][0].data[...] += 0.5
            if step != 8:  # its gradients are then added to
                net.run_backward()
            if step == 9:
                net.run_backward()
            results.append([*state(net), net.blobs["conv"].cpu_data().copy()])
            results[-1] += [blob.cpu_diff().copy() for blobs in net.params.values() for blob in blobs]
        assert same(*results), step


SHARED = (
    NET.replace(
        """layer { name: "loss\"""",
        """layer { name: "fc2" type: "InnerProduct" bottom: "drop" top: "fc2" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 5 } }
layer { name: "sum" type: "Eltwise" bottom: "fc" bottom: "fc2" top: "sum" }
layer { name: "loss\"""",
    )
    .replace('bottom: "fc" bottom: "label"', 'bottom: "sum" bottom: "label"')
    .replace('top: "fc"\n', 'top: "fc" param { name: "w" } param { name: "b" }\n')
)


@DEVICES
@pytest.mark.parametrize("text", [NET, SHARED], ids=["", "shared"])
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_sums_over_batches_have_two_graphs_that_stay(make, text, memory):
    one, other = both(make, text=text, iter_size=3, memory=memory)
    for step in range(8):
        for each in (one, other):
            fill(each.net, step)
            each.step(1)
        assert same(state(one.net), state(other.net)), step
    (backward,) = (found for found in one.net.compiled()[1]._captured.values())
    assert [len(piece._graphs) for piece in backward if isinstance(piece, Captured)] == [2]
    if make is EmulatedCuda:  # forward, and backward of the first batch and of those after it
        assert len(one.net.device.captured) == 3


@DEVICES
def test_reshaping_captures_anew_and_other_nets_do_not(make):
    one, other = both(make)
    for step, batch in enumerate([4] * 4 + [2] * 4 + [7] * 4 + [5] * 4):
        for each in (one, other):
            net = each.net
            net.blobs["data"].reshape(batch, 2, 6, 6)
            net.blobs["label"].reshape(batch)
            fill(net, step)
            each.step(1)
        assert same(state(one.net), state(other.net)), step
        beside = blobmem.Net(blobmem.proto.text.read_net(NET), TEST, device=one.net.device, seed=step)
        fill(beside, step)
        beside.run_forward()
        assert captured(one.net) == [[step % 4 >= 1]] * 2


@DEVICES
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_graphs_for_recent_shapes_are_kept(make, memory):
    one, other = both(make, memory=memory)
    first = one.net.compiled()
    for step, batch in enumerate([7] * 4 + [4, 2] * 6 + [3, 5, 6, 1] + [7]):
        for each in (one, other):
            net = each.net
            net.blobs["data"].reshape(batch, 2, 6, 6)
            net.blobs["label"].reshape(batch)
            fill(net, step)
            each.step(1)
        assert same(state(one.net), state(other.net)), step
        if 10 <= step < 16:  # of two shapes in turn, which have each been captured
            assert all(map(all, captured(one.net)))
        assert len(one.net._recent) <= 4 and len(one.net._planned) <= 5
    assert not set(one.net.compiled()) & set(first)
    assert not any(map(any, captured(one.net))), "it was too long ago"


@needs_compiler
def test_what_was_kept_for_other_shapes_holds_no_memory():
    one, _ = both(EmulatedCuda)
    net = one.net
    net.blobs["data"].reshape(64, 2, 6, 6)
    net.blobs["label"].reshape(64)
    one.step(3)
    net.blobs["data"].reshape(2, 2, 6, 6)
    net.blobs["label"].reshape(2)
    one.step(1)
    assert len(net._recent) == 1
    memory = net.blobs["norm"].data_view.memory
    assert memory.gpu_capacity == 64 * 3 * 4 * 4 * 4 and memory.trim() and memory.gpu_capacity == 2 * 3 * 4 * 4 * 4
    net.blobs["norm"].unshare_data()
    one.step(1)
    assert net._recent == []


def grow_elsewhere(net):
    """Let a memory have another address on the device; a GPU maps what is more behind what there was."""
    memory = net.blobs["drop"].data_view.memory
    version, nbytes = memory.version, memory.gpu_capacity
    while memory.version == version:
        nbytes *= 4
        memory.reserve(Side.DEVICE, nbytes)


def leave(net):
    net.blobs["drop"].unshare_data()


@pytest.mark.parametrize(
    "make, move",
    [
        pytest.param(*EMULATED.values, move, id=f"emulated-{move.__name__}", marks=EMULATED.marks)
        for move in (leave, grow_elsewhere)
    ]
    + [pytest.param(*EXACT_GPU.values, leave, id="cuda-leave", marks=EXACT_GPU.marks)],
)
def test_what_has_moved_is_captured_anew(monkeypatch, make, move):
    monkeypatch.setattr(EmulatedCuda, "reservation", lambda self, nbytes: max(nbytes, 1 << 16))  # soon outgrown
    one, other = both(make)
    for step in range(12):
        for each in (one, other):
            fill(each.net, step)
            if step == 4 and (move is leave or each is one):
                move(each.net)
            each.step(1)
        assert same(state(one.net), state(other.net)), step
        if step in (3, 4, 11):
            assert captured(one.net) == [[step != 4]] * 2


@needs_compiler
def test_adopted_arrays_that_are_kept_channels_last(monkeypatch):
    monkeypatch.setattr("blobmem.net.captured.LEAST", 1)
    text = NET.replace('"Input"', '"MemoryData"').replace(
        "input_param { shape { dim: 4 dim: 2 dim: 6 dim: 6 } shape { dim: 4 } }",
        "memory_data_param { batch_size: 4 channels: 2 height: 6 width: 6 }",
    )
    device, twin = EmulatedCuda(), EmulatedCuda()
    device.channels_last = twin.channels_last = True
    twin.graphs = False
    rng = np.random.default_rng(1)
    data, labels = rng.normal(size=(24, 2, 6, 6)).astype(np.float32), rng.integers(0, 5, 24).astype(np.float32)
    nets = [blobmem.Net(text, TRAIN, device=each, seed=1) for each in (device, twin)]
    for net in nets:
        net.set_input_arrays(data, labels)
    for _ in range(9):
        one, other = ([net.run_forward(), net.blobs["norm"].cpu_data().tobytes()] for net in nets)
        assert one == other


@DEVICES
def test_a_layer_of_the_host_divides_what_is_captured(make):
    text = NET.replace('bottom: "norm" top: "drop"', 'bottom: "twice" top: "drop"') + (
        'layer { name: "twice" type: "Python" bottom: "norm" top: "twice" '
        'python_param { module: "doubling" layer: "Twice" } }'
    )
    layers = blobmem.proto.text.read_net(text)
    order = [*layers.layer[:4], layers.layer[-1], *layers.layer[4:-1]]
    param = blobmem.proto.caffe_pb2.NetParameter(name="net")
    param.layer.extend(order)
    device, twin = make(), make()
    twin.graphs = False
    nets = [blobmem.Net(param, TRAIN, device=each, seed=5) for each in (device, twin)]
    for step in range(5):
        for net in nets:
            fill(net, step)
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
        one, other = ([blob.cpu_diff().copy() for blobs in net.params.values() for blob in blobs] for net in nets)
        assert same(one, other)
    reasons = nets[0].why_eager()
    assert reasons["twice"] == "a function of the host" and reasons["conv"] == "too few calls in a row for a graph"
    assert {layer for layer, reason in nets[0].why_eager(backward=True).items() if reason} == {"twice"}


@DEVICES
def test_what_cannot_be_captured_runs_without(make, monkeypatch, caplog):
    one, other = both(make)

    def refuse(queue):
        raise RuntimeError("not today")

    monkeypatch.setattr(one.net.device, "capture", refuse, raising=False)
    for step in range(5):
        for each in (one, other):
            fill(each.net, step)
            each.step(1)
        assert same(state(one.net), state(other.net)), step
    assert "layer 'conv' cannot be captured in a CUDA graph" in caplog.text
    assert set(one.net.why_eager().values()) == {"layer 'conv': not today"}


@DEVICES
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_what_is_captured_and_where_it_is_drawn(make, memory, tmp_path):
    one, other = both(make, memory=memory)
    for each in (one, other):
        for step in range(4):
            fill(each.net, step)
            each.step(1)
    names = one.net.write_graphs(tmp_path / "dot")
    stem = str(tmp_path / "dot-net-TRAIN-")
    assert names[0] == f"{stem}forward-0.dot" and f"{stem}backward-0.dot" in names and len(names) <= 3
    assert all("digraph" in Path(name).read_text() for name in names)
    assert other.net.write_graphs(tmp_path / "none") == []
    layers = ["conv", "relu", "norm", "drop", "fc", "loss"]
    assert one.net.why_eager() == dict.fromkeys(layers, "")
    assert set(one.net.why_eager(backward=True).values()) == {""}
    assert other.net.why_eager() == dict.fromkeys(layers, "the device captures nothing")


BESIDE = NET.replace(
    'layer { name: "norm" type: "LRN" bottom: "conv" top: "norm" }',
    'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }\n'
    'layer { name: "scale" type: "Scale" bottom: "bn" top: "bn" scale_param { bias_term: true } }\n'
    'layer { name: "prelu" type: "PReLU" bottom: "bn" top: "q" }\n'
    'layer { name: "pool" type: "Pooling" bottom: "conv" top: "p" pooling_param { pool: MAX kernel_size: 3 stride: 1 pad: 1 } }\n'
    'layer { name: "norm" type: "Concat" bottom: "q" bottom: "p" top: "norm" }',
)  # fmt: skip


@DEVICES
def test_an_array_that_an_eager_step_left_in_the_usual_order_is_turned_over_for_a_replay(monkeypatch, make):
    """Beside gradients of parameters that are cleared, which a step begins anew."""
    results = []
    for graphs in (True, False):
        device = make()
        device.graphs = graphs
        monkeypatch.setattr(type(device), "channels_last", True, raising=False)
        each = solver(device, BESIDE)
        fill(each.net, 1)
        each.step(4)  # nobody looks in between, which would have all arrays looked at
        results.append([blob.cpu_diff().copy() for blobs in each.net.params.values() for blob in blobs])
    assert same(*results)


@DEVICES
def test_what_is_given_back_meanwhile_waits_for_the_end_of_a_capture(make):
    device, other, done = make(), make(), []
    other._captures = device._captures  # as those of one GPU have it

    def queue(graph):
        for each in (device, other):
            each.when_idle(lambda: done.append("given back"))  # as a finalizer does, whenever it runs
        done.append("queued")

    device.capture(queue)
    assert done == ["queued", "given back", "given back"]


@DEVICES
def test_a_capture_waits_for_what_another_thread_is_giving_back(make):
    device, done = make(), []
    begun, goes_on = threading.Event(), threading.Event()

    def give_back():
        begun.set()
        goes_on.wait(10)
        done.append("given back")

    def capture():
        with device.capturing():
            done.append("captured")

    threads = [threading.Thread(target=device.when_idle, args=(give_back,)), threading.Thread(target=capture)]
    threads[0].start()
    begun.wait(10)
    threads[1].start()
    while not device._captures.count:
        threads[1].join(0.01)
    device.when_idle(lambda: done.append("given back later"))  # meanwhile a capture is to begin
    assert not done
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert done == ["given back", "captured", "given back later"]


@DEVICES
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_arrays_are_turned_over_within_a_graph(monkeypatch, make, memory):
    def look(net):  # at the array whose users want it in different orders; it is then on both sides
        return [net.blobs["norm"].cpu_data().copy()]

    def turn(net):
        net.blobs["norm"].data[...] = 7  # the usual order is the newer one
        return []

    def part(net):
        net.forward(end="norm")  # what is left is channels last
        return []

    monkeypatch.setattr(type(make()), "channels_last", True, raising=False)
    one, other = both(make, memory=memory)
    for step, meddle in enumerate([None] * 4 + ([look, look, turn, look, part, look] if memory == "keep" else [None])):
        found = []
        for each in (one, other):
            fill(each.net, step)
            each.step(1)
            found.append(state(each.net) + (meddle(each.net) if meddle else []))
        assert same(*found)
    graphs = captured(one.net)
    assert graphs[0] == [True] and all(graphs[1]) and (memory == "train" or len(graphs[1]) == 1)


@DEVICES
@pytest.mark.parametrize("end", [None, "relu", "drop"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "channels last"])
@pytest.mark.parametrize("back", [False, True], ids=["", "and back"])
def test_a_blob_that_moves_is_noticed_whoever_ran_the_steps_since(monkeypatch, make, end, last, back):
    outputs = []
    for graphs in (True, False):
        device = make()
        device.graphs = graphs
        monkeypatch.setattr(type(device), "channels_last", last, raising=False)
        net = blobmem.Net(blobmem.proto.text.read_net(NET), TEST, device=device, seed=3)
        fill(net, 0)
        for _ in range(4):
            net.forward()
        home, other = (blobmem.Blob(net.blobs["data"].shape, device=device) for _ in range(2))
        home.share_data(net.blobs["data"])
        other.data[...] = np.random.default_rng(9).normal(size=other.shape)
        net.blobs["data"].share_data(other)
        if end:
            net.forward(end=end)
        if back:
            net.blobs["data"].share_data(home)
            fill(net, 1)
        net.forward()
        outputs.append([net.blobs["fc"].cpu_data().copy()])
    assert same(*outputs)
