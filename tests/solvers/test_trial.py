"""The number of streams for backward, found out while a solver trains."""

from itertools import zip_longest

import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from cuda_emulation import EmulatedCuda, own_registry
from late_streams import LateCuda
from plan_nets import DATA, conv, layer, loss

import blobmem
from blobmem import TRAIN, Net
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.errors import OutOfDeviceMemory
from blobmem.ops.cuda import algorithms, streams
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net
from blobmem.solvers import trial

NET = (
    DATA
    + conv("one", "data")
    + layer("ReLU", "relu", "one", "one")
    + layer("Dropout", "drop", "one", "one")
    + (conv("two", "one") + loss("two"))
)
MODEL = "NVIDIA H200"
WARM, TIMED = 3, 2
STEPS = 2 * (WARM + TIMED)
TRIED = [1] * TIMED + [2] * TIMED
pytestmark = [needs_compiler, pytest.mark.usefixtures("few_plans")]


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch):
    """The file of the GPU that tests stand for; nothing is known of it at first."""
    monkeypatch.setattr(trial, "WARM", WARM)
    monkeypatch.setattr(trial, "TIMED", TIMED)
    return own_registry(tmp_path, monkeypatch, streams, MODEL, Timed)


class Timed(LateCuda):
    """With a clock that says what it is told for a pass of one stream and of two, all of them captured."""

    def __init__(self, one=9.0, two=8.0, **options):
        super().__init__("side", **options)
        self.ms, self.asked = {1: one, 2: two}, []

    def timed(self, run):
        launched = [graph.launched for graph in self.captured]
        run()
        graphs = [
            graph for graph, before in zip_longest(self.captured, launched, fillvalue=0) if graph.launched > before
        ]
        assert graphs, "it was not captured"
        self.asked.append(1 + any(any(graph.sides) for graph in graphs))
        return self.ms[self.asked[-1]] + len(self.asked) / 1000


def solver(device, number, memory="train", iter_size=1, net=NET):
    param = caffe_pb2.SolverParameter(base_lr=1e-3, momentum=0.9, lr_policy="fixed", random_seed=3, iter_size=iter_size)
    param.net_param.CopyFrom(read_net(net))
    return blobmem.get_solver(param, device=device, memory=memory, backward_streams=number)


def trained(one, steps=STEPS + 3):
    """The loss and the parameters after each step."""
    trace = []
    for _ in range(steps):
        one.step(1)
        blobs = (blob for own in one.net.params.values() for blob in own)
        trace.append([one.smoothed_loss, *(blob.cpu_data().tobytes() for blob in blobs)])
    return trace


@pytest.mark.parametrize("memory, iter_size, two, chosen", [
    ("keep", 1, 8.0, 2), ("keep", 2, 8.9, 1), ("train", 1, 8.0, 2), ("train", 1, 8.9, 1), ("train", 3, 8.9, 1),
])  # fmt: skip
def test_trying_changes_nothing_but_time(memory, iter_size, two, chosen):
    steps = -(-STEPS // iter_size) + 3
    given = solver(EmulatedCuda(), 1, memory, iter_size)
    one = solver(device := Timed(two=two), "auto", memory, iter_size)
    assert trained(one, steps) == trained(given, steps)
    assert device.asked == TRIED and one.net.streams == chosen and one.net.open_streams is None
    sure = solver(LateCuda("side"), chosen, memory, iter_size)
    sure.step(2)
    assert device.statistics.bytes_held == sure.net.device.statistics.bytes_held, "what was tried is given back"


@pytest.mark.parametrize("make", [EXACT_GPU])
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_on_a_gpu_too(make, memory):
    one = solver(make(), "auto", memory)
    assert trained(one) == trained(solver(make(), 1, memory))
    again = solver(make(), "auto", memory)
    again.step(1)
    assert one.net.open_streams is again.net.open_streams is None and one.net.streams == again.net.streams


def test_what_was_chosen_is_for_all_nets_from_then_on(registry):
    first = solver(Timed(), "auto")
    first.step(STEPS)
    second = solver(device := Timed(two=99), "auto")
    second.step(STEPS)
    assert second.net.streams == 2 and not device.asked
    predicted = PredictedCuda(MODEL, deterministic=True)
    for memory, number in (("train", 2), ("keep", 1)):
        net = Net(read_net(NET), TRAIN, device=predicted, memory=memory, backward_streams="auto")
        net.compiled()
        assert net.streams == number, "where there is no GPU"
    (text,) = algorithms.read(registry.path)
    assert text.startswith("backward x=3,2,6,5 calls=") and text.endswith(" memory=train deterministic")


def test_who_chooses_first_chooses_for_all(registry):
    device = Timed(two=8)
    one = solver(device, "auto")
    one.step(STEPS - 1)
    assert one.net.streams == 2
    streams.register(one.net.open_streams, device, {1: 1.0, 2: 1.0})
    one.step(2)
    assert one.net.streams == 1 and len(algorithms.read(registry.path)) == 1


def test_where_there_is_no_room_for_two_there_is_one(registry):
    given = solver(EmulatedCuda(), 1, "keep")
    right = trained(given)
    one = solver(Timed(capacity=given.net.device.statistics.bytes_held), "auto", "keep")
    assert trained(one) == right
    assert one.net.streams == one.net.backward_streams == 1 and not algorithms.read(registry.path)


def test_where_arrays_are_evicted_nothing_is_tried(registry):
    right = trained(solver(EmulatedCuda(), 1, "train"))
    with pytest.raises(OutOfDeviceMemory) as caught:
        solver(Timed(capacity=1), "auto", "train").step(1)
    one = solver(device := Timed(capacity=caught.value.requested), "auto", "train")
    assert trained(one) == right and one.net._fetched
    assert one.net.streams == 1 and not device.asked


def test_each_shape_is_measured_by_itself_and_only_while_nobody_watches(registry):
    text = (
        NET.replace("DummyData", "Input")
        .replace("dummy_data_param", "input_param")
        .replace('data_filler { type: "gaussian" } data_filler { type: "gaussian" }', "")
    )
    one = solver(device := Timed(), "auto", net=text)
    one.step(WARM + 1)
    one.net.blobs["data"].reshape(2, 2, 6, 5)
    one.net.blobs["t"].reshape(2, 4)
    one.step(WARM + TIMED + 1)
    assert device.asked == [1] * (1 + TIMED) and one.net.streams == 2, "tried, and not measured yet"
    one.net.before_backward(lambda index: None)
    one.step(STEPS)
    assert len(device.asked) == 1 + TIMED and one.net.streams == 1


@pytest.mark.parametrize("make, net", [
    (blobmem.SimulatedDevice, NET), (lambda: Timed(), DATA + loss("data")), (lambda: Timed(), None),
], ids=["one stream", "no convolution", "no graphs"])  # fmt: skip
def test_elsewhere_there_is_one(make, net):
    device = make()
    if net is None:
        device.graphs = False
    one = solver(device, "auto", net=net or NET)
    one.step(STEPS)
    assert one.net.streams == 1 and not getattr(device, "asked", [])
