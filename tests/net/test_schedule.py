"""Schedules: what has been done, found or secured is not done again without need."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, SimulatedDevice
from blobmem.memory import SyncedMemory

NET = """
force_backward: true
layer { name: "in" type: "Input" top: "x" top: "chosen" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 } } }
layer { name: "constant" type: "DummyData" top: "c"
  dummy_data_param { shape { dim: 2 } data_filler { type: "constant" value: 1 } } }
layer { name: "f" type: "Filter" bottom: "x" bottom: "chosen" top: "y" }
layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def run(net, *chosen):
    net.blobs["x"].data[...] = 1
    net.blobs["chosen"].data[...] = chosen
    net.forward()
    net.backward()
    return net.blobs["x"].cpu_diff()[:, 0].tolist()


def test_a_constant_and_a_gradient_of_the_loss_that_a_script_set_stay(device):
    net = Net(NET, TRAIN, device=device)
    assert run(net, 1, 0, 1, 0) == [1, 0, 1, 0] and (net.blobs["c"].cpu_data() == 1).all()
    net.blobs["c"].data[...] = 7
    net.blobs["loss"].diff[...] = 3
    for chosen in [(1, 0, 1, 0), (1, 0, 1, 1), (0, 0, 0, 1)]:  # other shapes, and so other schedules
        assert run(net, *chosen) == [3 * c for c in chosen]
        assert (net.blobs["c"].cpu_data() == 7).all()
    net.reshape()
    net.reseed(12)
    net.move_to(SimulatedDevice())
    assert run(net, 1, 1, 0, 0) == [3, 3, 0, 0] and (net.blobs["c"].cpu_data() == 7).all()


def test_a_constant_of_another_size_is_filled_anew(device):
    net = Net(NET, TRAIN, device=device)
    run(net, 1, 0, 1, 0)
    net.blobs["c"].data[...] = 7
    net.blobs["c"].reshape(3)
    run(net, 1, 0, 1, 0)
    assert net.blobs["c"].cpu_data().tolist() == [1, 1, 1]


def test_what_depends_on_more_than_places_is_done_again(device):
    boxes = """
    layer { name: "in" type: "Input" top: "map" top: "image" input_param { shape { dim: 1 dim: 1 dim: 2 dim: 2 }
      shape { dim: 1 dim: 3 dim: 20 dim: 20 } } }
    layer { name: "p" type: "PriorBox" bottom: "map" bottom: "image" top: "boxes" prior_box_param { min_size: 4 } }
    """
    net = Net(boxes, TRAIN, device=device)
    small = net.forward()["boxes"].copy()
    net.blobs["image"].reshape(1, 3, 40, 40)
    large = net.forward()["boxes"].copy()
    np.testing.assert_allclose(np.ptp(large[0, 0, :4:2]), np.ptp(small[0, 0, :4:2]) / 2, rtol=1e-5)


INNER = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 } }
layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }
"""


def test_what_stays_in_its_place_is_not_accessed_again(device, monkeypatch):
    net = Net(INNER, TRAIN, device=device)
    forward, backward = net.compiled()
    accessed = []
    access = SyncedMemory.access
    monkeypatch.setattr(SyncedMemory, "access", lambda *args: accessed.append(args[0]) or access(*args))

    def accesses(schedule):
        accessed.clear()
        schedule.run()
        return set(accessed)

    for _ in range(3):
        net.clear_param_diffs()
        first = accesses(forward)
        added = accesses(backward)
    gradients = {entry.blob.diff_view.memory for entry in net.learnable}
    # what the device alone had is overwritten there again without one
    assert (first, added) == (set(), gradients if device.is_host else set())
    assert accesses(backward) == set()
    net.blobs["x"].data[...] = 1
    assert device.is_host or net.blobs["x"].data_view.memory in accesses(forward)
