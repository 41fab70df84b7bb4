"""Input, DummyData and MemoryData."""

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, NetError, build_nets
from blobmem.errors import BlobmemError


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def test_input_shapes():
    one = 'layer { name: "in" type: "Input" top: "a" top: "b" input_param { shape { dim: 2 dim: 3 } } }'
    assert [blob.shape for blob in Net(one, TRAIN).blobs.values()] == [(2, 3), (2, 3)]
    bare = 'layer { name: "in" type: "Input" top: "a" }'
    assert Net(bare, TRAIN).blobs["a"].shape == ()
    three = one.replace("shape { dim: 2 dim: 3 }", "shape { dim: 2 } shape { dim: 2 } shape { dim: 2 }")
    with pytest.raises(NetError, match="layer 'in'.*shape: expected none, 1 or 2.*got 3"):
        Net(three, TRAIN)


DUMMY = """
layer { name: "d" type: "DummyData" top: "noise" top: "ones" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } shape { dim: 200 } shape { dim: 3 } } }
"""


def test_dummy_data_draws_anew_and_keeps_constants(device):
    net = Net(DUMMY, TRAIN, device=device, seed=4)
    net.run_forward()
    first = net.blobs["noise"].cpu_data().copy()
    assert (net.blobs["ones"].cpu_data() == 1).all()
    net.blobs["ones"].data[...] = 5
    net.run_forward()
    assert (net.blobs["noise"].cpu_data() != first).all()
    assert (net.blobs["ones"].cpu_data() == 5).all(), "a constant is filled once; a script may change it"
    again = Net(DUMMY, TRAIN, device=device, seed=4)
    again.run_forward()
    np.testing.assert_array_equal(again.blobs["noise"].cpu_data(), first)


def test_dummy_data_in_the_old_fields():
    text = 'layer { name: "d" type: "DummyData" top: "a" dummy_data_param { num: 2 channels: 3 height: 4 width: 5 } }'
    assert Net(text, TRAIN).blobs["a"].shape == (2, 3, 4, 5)
    two = text.replace('top: "a"', 'top: "a" top: "b"').replace("num: 2 channels: 3", "num: 2 channels: 3 channels: 1")
    assert [blob.shape for blob in Net(two, TRAIN).blobs.values()] == [(2, 3, 4, 5), (2, 1, 4, 5)]
    with pytest.raises(NetError, match="layer 'd'.*width: expected 1 or 1.*got 0"):
        Net(text.replace("width: 5", ""), TRAIN)
    with pytest.raises(NetError, match="layer 'd'.*shape: expected either shape, or the older num"):
        Net(text.replace("width: 5", "width: 5 shape { dim: 2 }"), TRAIN)


MEMORY = """
layer { name: "m" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 2 channels: 1 height: 2 width: 3 } }
"""


def test_memory_data_serves_batches_in_turn(device):
    net = Net(MEMORY, TRAIN, device=device)
    data, labels = np.arange(36, dtype=np.float32).reshape(6, 1, 2, 3), np.arange(6, dtype=np.float32)
    net.set_input_arrays(data, labels)
    for batch in (0, 1, 2, 0):
        net.run_forward()
        np.testing.assert_array_equal(net.blobs["data"].cpu_data(), data[2 * batch : 2 * batch + 2])
        np.testing.assert_array_equal(net.blobs["label"].cpu_data(), labels[2 * batch : 2 * batch + 2])
    assert net.layers[0].state_dict() == {"position": 2}


def test_memory_data_refuses_what_does_not_fit():
    net = Net(MEMORY, TRAIN)
    with pytest.raises(BlobmemError, match="layer 'm' has no data yet.*set_input_arrays"):
        net.run_forward()
    with pytest.raises(ValueError, match="multiple of 2 items of 1 x 2 x 3"):
        net.set_input_arrays(np.zeros((3, 1, 2, 3)), np.zeros(3))
    with pytest.raises(ValueError, match="as many labels as items, 2; got 3"):
        net.set_input_arrays(np.zeros((2, 1, 2, 3)), np.zeros(3))
    with pytest.raises(NetError, match="no MemoryData layer"):
        Net(DUMMY, TRAIN).set_input_arrays(np.zeros((2, 1, 2, 3)), np.zeros(2))


def test_memory_data_adopts_the_arrays(device):
    net = Net(MEMORY, TRAIN, device=device)
    data, labels = np.arange(24, dtype=np.float32).reshape(4, 1, 2, 3), np.zeros(4, np.float32)
    net.set_input_arrays(data, labels)
    net.run_forward()
    assert np.shares_memory(net.blobs["data"].data, data[:2])
    data[2:] = 7  # what is in the array when its batch's turn comes
    net.run_forward()
    assert (net.blobs["data"].cpu_data() == 7).all() and np.shares_memory(net.blobs["data"].cpu_data(), data[2:])
    net.blobs["data"].data[...] = 5
    assert (data[2:] == 5).all()


@pytest.mark.parametrize("kind", ["float64", "strided", "read-only"])
def test_memory_data_copies_arrays_that_cannot_be_adopted(device, kind):
    data, labels = np.arange(24, dtype=np.float32).reshape(4, 1, 2, 3), np.arange(4)
    given = {"float64": data.astype(np.float64), "strided": np.repeat(data, 2, axis=0)[::2], "read-only": data.copy()}[
        kind
    ]
    given.setflags(write=kind != "read-only")
    net = Net(MEMORY, TRAIN, device=device)
    net.set_input_arrays(given, labels.reshape(4, 1, 1, 1))
    net.run_forward()
    net.run_forward()
    np.testing.assert_array_equal(net.blobs["data"].cpu_data(), data[2:])
    assert net.blobs["label"].cpu_data().tolist() == [2, 3]


def test_memory_data_of_nets_that_share_stays_apart(device):
    nets = build_nets(MEMORY, device=device)
    arrays = [np.full((2, 1, 2, 3), value, np.float32) for value in (1, 2)]
    for net, array in zip((nets.train, nets.tests[0]), arrays, strict=True):
        net.set_input_arrays(array, np.zeros(2))
    for net in (nets.train, nets.tests[0]):
        net.run_forward()
    assert (nets.train.blobs["data"].cpu_data() == 1).all() and (nets.tests[0].blobs["data"].cpu_data() == 2).all()
