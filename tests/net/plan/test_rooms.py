"""How much workspace convolutions may take in a net whose first layers take the batch in parts."""

import numpy as np
import pytest
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda

from blobmem import TEST, Net
from blobmem.devices import HOST
from blobmem.devices.cuda.predicted import PredictedCuda
from blobmem.net.plan import parts, rooms

ROOM = 1 << 20


@pytest.fixture(autouse=True)
def _small_nets(monkeypatch):
    """Bytes that would not be worth it are, and there is no room that all have."""
    monkeypatch.setattr(parts, "_LITTLE", 0)
    monkeypatch.setattr(parts, "_CALL", 0)
    monkeypatch.setattr(rooms, "LEAST", 0)


def conv(name, bottom):
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{'
        f' num_output: 16 kernel_size: 3 pad: 1 weight_filler {{ type: "xavier" }} }} }}\n'
    )


def net_of(device, inputs=4, **options):
    """Two convolutions on arrays of 128 KiB an image, then a pool to 8 KiB, and another convolution."""
    options = {"memory": "inference", "device": device, "seed": 3, "forward_only": True, **options}
    text = (
        f'layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 32 dim: {inputs} dim: 32'
        " dim: 64 } } }\n" + conv("a", "x") + conv("b", "a") + 'layer { name: "pool" type: "Pooling" bottom: "b"'
        ' top: "pool" pooling_param { kernel_size: 4 stride: 4 } }\n' + conv("c", "pool")
    )
    return Net(text, TEST, **options)


def rooms_of(net):
    """By layer; the same in all parts."""
    calls = [each for each in net.compiled()[0].calls if each.op == "conv_forward"]
    found = {each.layer_name: each.attributes.get("room") for each in calls}
    assert all(each.attributes.get("room") == found[each.layer_name] for each in calls)
    return found


def test_there_is_room_for_as_much_as_arrays_would_take_of_the_whole_batch():
    net = net_of(PredictedCuda())
    found = rooms_of(net)
    assert net.pieces[0].shape[0] == 8
    beside = net.blobs["x"].nbytes + net.blobs["c"].nbytes
    beside += sum(blob.nbytes for blobs in net.params.values() for blob in blobs)
    most = 2 * 32 * (128 << 10) - beside
    kib = {"a": 8 * 128, "b": 2 * 8 * 128, "c": 8 * 8}  # of parts, while each runs
    assert found == {name: (most - (kib[name] << 10)) // ROOM * ROOM for name in kib}


def test_where_parts_take_more_there_is_room_under_their_peak():
    """So much lies beside them here: the input, of 256 KiB an image."""
    net = net_of(PredictedCuda(), inputs=32)
    found = rooms_of(net)
    assert net.blobs["x"].nbytes == 2 * 32 * (128 << 10) and net.pieces[0].shape[0] == 8
    assert found == {"a": ROOM, "b": 0, "c": 2 * ROOM}, "beside the top of pool, which is whole"


def test_some_room_there_always_is(monkeypatch):
    monkeypatch.setattr(rooms, "LEAST", 7 * ROOM)
    assert set(rooms_of(net_of(PredictedCuda(), inputs=32)).values()) == {7 * ROOM}


@pytest.mark.parametrize("options", [{"passes": ()}, {"memory": "keep"}, {"memory": "keep", "passes": ["parts"]}])
def test_others_take_what_they_want(options):
    assert {*rooms_of(net_of(PredictedCuda(), **options)).values()} == {None}


def test_the_host_has_none():
    net = net_of(HOST)
    assert net.compiled() and net.pieces and {*rooms_of(net).values()} == {None}


@needs_compiler
def test_kernels_are_told_of_it():
    results = []
    for memory in ("inference", "keep"):
        device = EmulatedCuda()
        device.channels_last, device.deterministic = False, False
        net = net_of(device, memory=memory)
        net.blobs["x"].data[...] = np.random.default_rng(0).standard_normal(net.blobs["x"].shape)
        results.append(net.forward()["c"].copy())
        assert (None in rooms_of(net).values()) == (memory == "keep")
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
