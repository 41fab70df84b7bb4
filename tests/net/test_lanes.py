"""Steps on two streams: the bits of one, however late either of them is."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import given, settings
from late_streams import ORDERS, LateCuda

import blobmem
from blobmem import TRAIN, Net, SimulatedDevice
from blobmem.net import lanes
from blobmem.net.lanes import waits
from blobmem.net.steps import Step
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

NET = """
name: "net"
layer { name: "data" type: "Input" top: "data" top: "label"
  input_param { shape { dim: 4 dim: 2 dim: 6 dim: 6 } shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { name: "k" }
  convolution_param { num_output: 2 kernel_size: 3 pad: 1 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }
layer { name: "scale" type: "Scale" bottom: "bn" top: "bn" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "bn" top: "bn" }
layer { name: "again" type: "Convolution" bottom: "bn" top: "again" param { name: "k" }
  convolution_param { num_output: 2 kernel_size: 3 pad: 1 bias_term: false } }
layer { name: "sum" type: "Eltwise" bottom: "again" bottom: "conv" top: "sum" }
layer { name: "one" type: "Convolution" bottom: "sum" top: "one"
  convolution_param { num_output: 3 kernel_size: 1 weight_filler { type: "xavier" } } }
layer { name: "up" type: "Deconvolution" bottom: "sum" top: "up"
  convolution_param { axis: 2 num_output: 6 kernel_size: 1 weight_filler { type: "xavier" } } }
layer { name: "join" type: "Concat" bottom: "one" bottom: "up" top: "join" }
layer { name: "drop" type: "Dropout" bottom: "join" top: "drop" dropout_param { dropout_ratio: 0.4 } }
layer { name: "fc" type: "InnerProduct" bottom: "drop" top: "fc" param { lr_mult: 1 } param { lr_mult: 2 }
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""

ENDS = st.integers(0, 12)
PLACES = st.lists(st.builds(lambda a, b, writes: (min(a, b), max(a, b), writes), ENDS, ENDS, st.booleans()), max_size=4)


def conflict(one, other):
    return any(
        a < d and c < b and a < b and c < d and (w or v) for a, b, w in one for c, d, v in other
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 3), PLACES), max_size=14))
@settings(deadline=None)
def test_what_uses_the_same_bytes_is_ordered_and_nobody_waits_for_nothing(steps):
    sides, places = [lane for lane, _ in steps], [used for _, used in steps]
    before = []  # of each step, those that it comes after
    for at, waited in enumerate(waits(sides, places)):
        earlier = max((i for i in range(at) if sides[i] == sides[at]), default=None)
        known = set() if earlier is None else {earlier} | before[earlier]
        wanted = {i for i in range(at) if conflict(places[i], places[at])}
        assert len({sides[i] for i in waited}) == len(waited)
        for after in waited:
            assert after in wanted and after not in known
            known |= {after} | before[after]
        assert wanted <= known
        before.append(known)


@given(st.lists(st.tuples(st.integers(0, 3), PLACES, st.integers(0, 3)), max_size=14))
@settings(deadline=None)
def test_copies_and_others_wait_later_rather_than_more_often(steps):
    """For a step behind the one that they need, which has ended by then by the times that are given."""
    sides, places, ms = [list(each) for each in zip(*steps, strict=True)] or ([], [], [])
    found, plain = waits(sides, places, ms), waits(sides, places)
    assert sum(map(len, found)) <= sum(map(len, plain))
    begin, end, before = [], [], []
    for at, waited in enumerate(found):
        earlier = max((i for i in range(at) if sides[i] == sides[at]), default=None)
        known = set() if earlier is None else {earlier} | before[earlier]
        needed = {i for i in range(at) if conflict(places[i], places[at])}
        begin.append(max((end[i] for i in {*needed} | ({earlier} - {None})), default=0))
        for after in waited:
            assert after not in known and sides[after] != sides[at]
            assert after in needed or (end[after] < begin[at] and max(sides[at], sides[after]) > lanes.SIDE)
            known |= {after} | before[after]
        assert needed <= known
        end.append(begin[at] + ms[at])
        before.append(known)


def test_one_wait_stands_for_those_that_follow():
    """Three arrays leave one after the other, and are overwritten when all of them have left."""
    sides = [lanes.MAIN, lanes.OUT, lanes.OUT, lanes.OUT, lanes.MAIN, lanes.MAIN, lanes.MAIN, lanes.MAIN]
    arrays = [[(0, 3, True)], *([(i, i + 1, False)] for i in range(3)), [], *([(i, i + 1, True)] for i in range(3))]
    ms = [1, 1, 1, 1, 9, 1, 1, 1]
    assert waits(sides, arrays) == [[], [0], [], [], [], [1], [2], [3]]
    assert waits(sides, arrays, ms) == [[], [0], [], [], [], [3], [], []]


def solver(device, memory, iter_size=1, streams=2, **fields):
    param = caffe_pb2.SolverParameter(base_lr=0.1, momentum=0.9, weight_decay=1e-3, lr_policy="step", gamma=0.5,
                                      stepsize=3, random_seed=3, iter_size=iter_size, **fields)  # fmt: skip
    param.net_param.CopyFrom(read_net(NET))
    return blobmem.get_solver(param, device=device, memory=memory, backward_streams=streams)


def fill(net, seed):
    rng = np.random.default_rng(seed)
    net.blobs["data"].data[...] = rng.normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = rng.integers(0, 5, net.blobs["label"].shape)


def trained(one, steps=5):
    """The parameters after each step."""
    trace = []
    for step in range(steps):
        fill(one.net, step)
        one.step(1)
        trace.append([blob.cpu_data().tobytes() for blobs in one.net.params.values() for blob in blobs])
    return trace


@functools.cache
def on_one_stream(memory, iter_size, channels_last):
    """What a device without a second stream trains, which keeps images as they are, or channels last."""
    device = EmulatedCuda()
    device.channels_last = channels_last
    return trained(solver(device, memory, iter_size))


def last(monkeypatch, yes):
    """Have emulated devices keep images channels last, or not."""
    monkeypatch.setattr(EmulatedCuda, "channels_last", yes, raising=False)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("memory, iter_size", [("keep", 1), ("keep", 2), ("train", 1), ("train", 2)])
def test_training_gives_the_bits_of_one_stream_whoever_is_late(monkeypatch, order, graphs, memory, iter_size):
    last(monkeypatch, order == "side")
    device = LateCuda(order)
    device.graphs = graphs
    one = solver(device, memory, iter_size)
    assert trained(one) == on_one_stream(memory, iter_size, order == "side")
    schedule = one.net.compiled()[1]
    beside = {step.call.op for step in schedule._program() if step.lane}
    assert {"conv_backward_weights", "deconv_backward_weights", "inner_product_backward_weights"} <= beside
    assert ("sgd_update" in beside) == (memory == "train" and iter_size == 1), "where they are part of backward"
    assert bool(device.captured) == graphs and (graphs or device.queued[True] > 20)


@pytest.mark.parametrize("make", [EXACT_GPU])
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("memory, iter_size", [("keep", 2), ("train", 1)])
def test_on_a_gpu_too(make, graphs, memory, iter_size):
    traces = []
    for streams in (1, 2):
        device = make()
        device.graphs = graphs
        traces.append(trained(solver(device, memory, iter_size, streams), 8))
    assert traces[0] == traces[1]


@needs_compiler
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("broken", ["nobody waits", "reads do not count", "turning over does not count"])
@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
def test_a_wait_that_is_missing_is_seen(monkeypatch, broken, graphs):
    real = lanes.waits

    def fewer(lanes, places, ms):
        if broken == "nobody waits":
            return [[]] * len(lanes)
        return real(lanes, [[place for place in used if place[2]] for used in places])

    if broken == "turning over does not count":
        last(monkeypatch, True)
        monkeypatch.setattr(lanes, "_places", lambda turns: [])
    else:
        monkeypatch.setattr(lanes, "waits", fewer)
    memory = "keep" if broken == "turning over does not count" else "train"
    right = trained(solver(EmulatedCuda(), memory))
    found = []
    for order in ("side", "main"):
        device = LateCuda(order)
        device.graphs = graphs
        found.append(trained(solver(device, memory)) == right)
    assert not all(found)


@needs_compiler
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_clipping_frozen_layers_and_parts_of_a_pass(memory):
    traces = []
    for device, streams in ((LateCuda("side"), 2), (LateCuda("main"), 2), (EmulatedCuda(), 1)):
        one = solver(device, memory, streams=streams, clip_gradients=0.5)
        trace = trained(one, 3)
        net = one.net
        for entry in net.learnable:
            if entry.layer == "one":
                entry.lr_mult = 0
        trace += trained(one, 3)
        net.clear_param_diffs()
        net.run_forward()
        for index in reversed(range(len(net.nodes))):  # layer by layer
            net.run_backward(index, index)
        trace.append([entry.blob.cpu_diff().tobytes() for entry in net.learnable])
        traces.append(trace)
    assert traces[0] == traces[1] == traces[2]


@needs_compiler
def test_a_layer_of_the_host_comes_after_both():
    text = NET.replace('"drop" type: "Dropout" bottom: "join"', '"drop" type: "Dropout" bottom: "twice"').replace(
        'layer { name: "drop"',
        'layer { name: "twice" type: "Python" bottom: "join" top: "twice" '
        'python_param { module: "doubling" layer: "Twice" } }\nlayer { name: "drop"',
    )

    traces = []
    for device, streams in ((LateCuda("side"), 2), (LateCuda("main"), 2), (EmulatedCuda(), 1)):
        net, trace = Net(read_net(text), TRAIN, device=device, seed=5, backward_streams=streams), []
        for step in range(4):
            fill(net, step)
            net.clear_param_diffs()
            net.run_forward()
            net.run_backward()
            trace += [entry.blob.cpu_diff().tobytes() for entry in net.learnable]
        traces.append(trace)
    assert traces[0] == traces[1] == traces[2]


@needs_compiler
def test_a_step_that_fails_leaves_one_stream_that_comes_after_both(monkeypatch):
    device = LateCuda("side")
    device.graphs = False
    net = Net(read_net(NET), TRAIN, device=device, seed=5, backward_streams=2)
    main = device.compute_stream()
    fill(net, 0)
    net.run_forward()
    real = Step.launch

    def fail(step, arguments=None):
        if step.call.op == "deconv_backward_weights":
            assert device.compute_stream() is device.side_stream()
            raise OSError("gone")
        real(step, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", fail)
        with pytest.raises(OSError):
            net.run_backward()
    assert device.compute_stream() is main and device.side_stream().pending
    main.synchronize()
    assert not device.side_stream().pending


@needs_compiler
def test_what_cannot_be_captured_runs_on_one_stream(monkeypatch, caplog):
    right = trained(solver(EmulatedCuda(), "train"))
    one = solver(LateCuda("side"), "train")
    real = Step.launch

    def refuse(step, arguments=None):
        if step.device.graph is not None and step.call.op == "deconv_backward_weights":
            raise RuntimeError("not today")
        real(step, arguments)

    monkeypatch.setattr(Step, "launch", refuse)
    assert trained(one) == right and "layer 'up' cannot be captured in a CUDA graph" in caplog.text


def test_where_there_is_one_stream_nothing_changes():
    net = Net(read_net(NET), TRAIN, device=SimulatedDevice(), backward_streams=2)
    assert net.compiled()[1].streams == 1 and not any(step.lane for step in net.compiled()[1]._program())
    with pytest.raises(ValueError, match="backward_streams is 1, 2 or 'auto', not 3"):
        Net(read_net(NET), TRAIN, backward_streams=3)


@needs_compiler
def test_why_layers_are_not_captured_is_said_of_both_streams():
    device = LateCuda("side")
    device.graphs = False
    net = Net(read_net(NET), TRAIN, device=device, backward_streams=2)
    assert set(net.why_eager(backward=True).values()) == {"the device captures nothing"}
