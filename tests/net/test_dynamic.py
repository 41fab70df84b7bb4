"""Layers whose tops' shapes depend on values: what follows is given its shapes in mid-pass."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, OutOfDeviceMemory, SimulatedDevice
from blobmem.layers.base import Layer, register_layer
from blobmem.ops.call import call, overwrite, overwrite_diff, read, read_diff


@register_layer
class Positive(Layer):
    """The rows of (N, D) whose first value is positive, first rows first."""

    type = "TestPositive"
    dynamic = True

    def reshape(self, bottom, top):
        top[0].reshape(bottom[0].shape)

    def resize(self, bottom, top):
        self.rows = np.flatnonzero(bottom[0].cpu_data()[:, 0] > 0)
        top[0].reshape(len(self.rows), bottom[0].shape[1])

    def forward(self, bottom, top):
        yield call(lambda x, y: np.take(x, self.rows, axis=0, out=y), read(bottom[0]), overwrite(top[0]))

    def backward(self, bottom, top, propagate_down):
        def run(dy, dx):
            dx[...] = 0
            dx[self.rows] = dy

        yield call(run, read_diff(top[0]), overwrite_diff(bottom[0]))


NET = """
force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "p" type: "TestPositive" bottom: "x" top: "p" }
layer { name: "square" type: "Power" bottom: "p" top: "y" power_param { power: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "y" top: "z"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def rows(*signs):
    return np.array([[sign, 2 * sign + i, i] for i, sign in enumerate(signs)], np.float32)


def test_later_layers_follow_in_the_same_pass(device):
    net = Net(NET, TRAIN, device=device)
    assert net.blobs["z"].shape == (4, 2), "the largest shape there can be"
    for signs in [(1, -1, 1, -1), (1, 1, 1, 1), (-1, -1, -1, 1), (1, -1, 1, -1)]:
        x = rows(*signs)
        kept = x[x[:, 0] > 0]
        z = net.forward(x=x)["z"]
        assert z.shape == (len(kept), 2)
        np.testing.assert_allclose(net.blobs["y"].cpu_data(), kept**2, rtol=1e-6)
        dz = np.ones_like(z)
        dx = net.backward(z=dz)["x"]
        expected = np.zeros_like(x)
        expected[x[:, 0] > 0] = 2 * kept * (dz @ net.params["ip"][0].cpu_data())
        np.testing.assert_allclose(dx, expected, rtol=1e-5)


def test_no_row_at_all(device):
    net = Net(NET, TRAIN, device=device)
    assert net.forward(x=rows(-1, -1, -1, -1))["z"].shape == (0, 2)
    assert net.forward(x=rows(1, -1, -1, 1))["z"].shape == (2, 2)


def test_a_part_of_the_net_keeps_the_shapes_of_the_last_pass(device):
    net = Net(NET, TRAIN, device=device)
    net.forward(x=rows(1, -1, 1, -1))
    assert net.forward(start="square")["z"].shape == (2, 2)
    net.blobs["x"].reshape(2, 3)
    assert net.forward(x=rows(1, 1))["z"].shape == (2, 2)


def test_the_first_pass_secures_the_largest_shapes():
    device = SimulatedDevice()
    net = Net(NET, TRAIN, device=device)
    net.forward(x=rows(1, -1, -1, -1))
    before = device.statistics.snapshot()
    net.forward(x=rows(1, 1, 1, 1))
    assert (device.statistics - before).allocator_calls == 0


def test_running_out_comes_before_a_value_is_read():
    device = SimulatedDevice(capacity=100)
    net = Net(NET, TRAIN, device=device)
    net.blobs["x"].data[...] = rows(1, -1, 1, -1)
    with pytest.raises(OutOfDeviceMemory):
        net.forward()
    assert device.statistics.htod_copies == 0
