"""Reading losses behind what computes them."""

import functools

import numpy as np
import pytest
from cuda_devices import EMULATED, GPU

from blobmem import TRAIN, Net, SimulatedDevice, get_solver
from blobmem.devices import HOST
from blobmem.memory import Intent, Side
from blobmem.memory.blob import Blob
from blobmem.net.losses import LossReader


class Streaming(SimulatedDevice):
    """Its copies on the compute stream are made when somebody waits for them."""

    @functools.cached_property
    def _stream(self):
        return self.create_stream()

    def compute_stream(self):
        return self._stream


def losses_on(device, *values):
    losses = []
    for value, weight in values:
        blob = Blob(np.shape(value), device=device)
        blob.data[...] = value
        blob.data_view.memory.access(Side.DEVICE, 0, blob.nbytes, Intent.WRITE)
        losses.append((blob, weight))
    return losses


def test_losses_are_read_when_they_are_asked_for():
    device = Streaming()
    losses = losses_on(device, (0.1, 1.0), ([[1.5, 2.5], [0.25, 1]], 0.5))
    before = device.statistics.snapshot()
    reader = LossReader()
    for _ in range(3):
        read = reader.read(device, losses)
        assert device.compute_stream().pending == 2
        assert read() == float(np.float32(0.1)) + 0.5 * 5.25
        assert device.compute_stream().pending == 0
    change = device.statistics - before
    assert (change.dtoh_copies, change.dtoh_bytes, change.allocator_calls) == (6, 60, 0)
    assert reader.read(device, [])() == 0


def test_where_ops_have_finished_or_a_loss_is_on_the_host_it_is_read_at_once():
    for device in (HOST, SimulatedDevice()):
        blob = Blob(2, device=device)
        blob.data[...] = 3
        read = LossReader().read(device, [(blob, 2.0)])
        blob.data[...] = 0
        assert read() == 12
    device = Streaming()
    blob = Blob(2, device=device)
    blob.data[...] = 3
    assert LossReader().read(device, [(blob, 1.0)])() == 6 and device.statistics.htod_copies == 0
    counting = SimulatedDevice(compute=False)
    assert LossReader().read(counting, [(Blob(2, device=counting), 1.0)])() == 0


NET = """
layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 8 dim: 5 }
  data_filler { type: "gaussian" } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 8 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 4
  weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize("make", [pytest.param(lambda: HOST, id="host"), EMULATED, GPU])
def test_a_wrong_label_stops_a_step_before_the_update(make):
    solver = get_solver(f'net_param {{ {NET} }} base_lr: 0.1 lr_policy: "fixed" type: "SGD"', device=make(), seed=2)
    solver.net.blobs["label"].data[...] = 1
    solver.step(2)
    weights, state = solver.net.params["ip"][0].cpu_data().copy(), solver.net.state.iteration
    losses = list(solver._losses)
    solver.net.blobs["label"].data[3] = 7
    for _ in range(2):
        with pytest.raises(ValueError, match="7"):
            solver.step(1)
        assert np.array_equal(solver.net.params["ip"][0].cpu_data(), weights)
        assert (solver.iter, solver.net.state.iteration, list(solver._losses)) == (2, state, losses)
    solver.net.blobs["label"].data[3] = 2
    solver.step(2)
    assert solver.iter == 4 and len(solver._losses) == 1


def test_a_pass_can_be_started_and_its_loss_read_later():
    net = Net(f"force_backward: true {NET}", TRAIN, device=HOST, seed=1)
    other = Net(f"force_backward: true {NET}", TRAIN, device=HOST, seed=1)
    loss = net.start_forward()
    net.run_backward()
    assert loss() == other.run_forward() > 0
