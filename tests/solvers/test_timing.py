"""Calls of a net that has not the memory it needs: timed in one of a solver's first iterations, which trains as ever."""

import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda, own_registry
from plan_nets import DATA, conv, layer, loss

import blobmem
from blobmem.errors import OutOfDeviceMemory
from blobmem.net import clock
from blobmem.net.plan.times import Times
from blobmem.ops.cuda import algorithms, times
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import timing

MODEL = "NVIDIA H200"
pytestmark = [needs_compiler, pytest.mark.usefixtures("few_plans")]


def net_text():
    text, bottom = DATA, "data"
    for name in "abcd":
        text += conv(name, bottom) + layer("ReLU", f"{name}r", name, name) + layer("Dropout", f"{name}d", name, name)
        bottom = name
    return text + loss(bottom)


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch):
    """The file of the GPU that tests stand for; nothing is known of it at first."""
    return own_registry(tmp_path, monkeypatch, times, MODEL, Marked)


class Marked(EmulatedCuda):
    """With marks between which a kernel takes 10 ms, and everything else nothing but what a mark does."""

    model = MODEL

    def __init__(self, capacity=None):
        super().__init__(capacity)
        self.marked = 0

    def marks(self):
        return Marks(self)


class Marks:
    def __init__(self, device):
        self.device, self.at = device, []

    def put(self):
        self.device.do(lambda: self.at.append(len(self.device.launches)))

    def gaps(self):
        self.device.marked += 1
        return [10.0 * (after - before) + clock.MARK for before, after in zip(self.at, self.at[1:], strict=False)]


def solver(device, memory="train"):
    param = caffe_pb2.SolverParameter(base_lr=1e-3, momentum=0.9, lr_policy="fixed", random_seed=3)
    param.net_param.CopyFrom(read_net(net_text()))
    return blobmem.get_solver(param, device=device, memory=memory, backward_streams=1)


def trained(one, steps):
    """The loss and the parameters after each step."""
    trace = []
    for _ in range(steps):
        one.step(1)
        blobs = (blob for own in one.net.params.values() for blob in own)
        trace.append([one.smoothed_loss, *(blob.cpu_data().tobytes() for blob in blobs)])
    return trace


def limit_of(make):
    with pytest.raises(OutOfDeviceMemory, match="needs at least") as caught:
        solver(make(1)).step(1)
    return caught.value.requested


def timed_calls(net):
    return [
        unit.calls[-1]
        for one in net.compiled()
        for unit in one.units()
        if not unit.calls[-1].on_host and unit.calls[-1].op not in ("evict", "fetch") and not unit.calls[-1].once
    ]


def test_timing_changes_nothing_but_what_is_known(registry):
    limit = limit_of(EmulatedCuda)
    one = solver(device := Marked(limit))
    assert trained(one, 5) == trained(solver(EmulatedCuda()), 5)
    assert device.marked > 1 and not one.net.untimed and device.statistics.peak_bytes <= limit
    known = Times(device)
    calls = timed_calls(one.net)
    assert {call.op for call in calls} >= {
        "conv_relu_forward",
        "conv_backward_weights",
        "dropout_backward",
        "sgd_update",
    }
    assert all(known.is_known(call) for call in calls)
    took = {call.op: known.ms(call) for call in calls}
    assert took["dropout_backward"] == 10 and all(ms % 10 == 0 or ms == clock.LEAST for ms in took.values())
    entries = algorithms.read(registry.path)
    assert entries and all(text.startswith("time ") and each.plan == "time" for text, each in entries.items())


def test_what_is_known_is_not_timed_again():
    limit = limit_of(EmulatedCuda)
    first = solver(before := Marked(limit))
    first.step(timing.WARM + 4)
    second = solver(device := Marked(limit))
    second.step(timing.WARM + 4)
    assert before.marked > 1 and device.marked == 0 and not second.net.untimed
    for each in (before, device):
        each.launches.clear()
    first.step(1), second.step(1)
    assert before.launches == device.launches, "not a call more in any later step"


@pytest.mark.parametrize("memory", ["train", "keep"])
def test_with_enough_memory_nothing_is_timed(memory, registry):
    one = solver(device := Marked(), memory)
    one.step(5)
    assert device.marked == 0 and not registry.path.exists()


@pytest.mark.parametrize("make", [EXACT_GPU])
def test_on_a_gpu_too(make):
    usual = trained(solver(make()), 6)  # which looks for plans of convolutions, in more memory than the least
    limit = limit_of(lambda capacity: make(limit=capacity))
    one = solver(make(limit=limit))
    assert trained(one, 6) == usual
    known = Times(one.net.device)
    assert not one.net.untimed and all(0 < known.ms(call) < 5 for call in timed_calls(one.net))
