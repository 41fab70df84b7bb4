"""Nets in half precision: which blobs are of which dtype, files, sharing, bytes, and what is refused."""

import warnings

import numpy as np
import pytest
from cuda_emulation import EmulatedCuda

from blobmem import TEST, TRAIN, Net, NetError, SimulatedDevice, build_nets, dtypes
from blobmem.devices import HOST
from blobmem.errors import DeviceError
from blobmem.net.schedule import Schedule
from blobmem.ops.call import call, overwrite, read
from blobmem.ops.registry import Op, table

HALVES = pytest.mark.parametrize("dtype", dtypes.HALVES)

LENET = "models/lenet/train_val.prototxt"

BRANCHES = """
    layer { name: "in" type: "Input" top: "x" top: "label" top: "weight"
            input_param { shape { dim: 4 dim: 6 } shape { dim: 4 } shape { dim: 4 dim: 1 } } }
    layer { name: "column" type: "Reshape" bottom: "label" top: "column" reshape_param { shape { dim: 4 dim: 1 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
            inner_product_param { num_output: 3 weight_filler { type: "gaussian" std: 0.5 } } }
    layer { name: "one" type: "InnerProduct" bottom: "x" top: "one"
            inner_product_param { num_output: 1 weight_filler { type: "gaussian" std: 0.5 } } }
    layer { name: "classes" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "classes" }
    layer { name: "distance" type: "EuclideanLoss" bottom: "one" bottom: "column" top: "distance" }
    layer { name: "both" type: "Concat" bottom: "weight" bottom: "column" top: "both" }
    layer { name: "losses" type: "Eltwise" bottom: "classes" bottom: "distance" top: "losses" }
"""


def bits(net, name):
    return net.blobs[name].dtype.name


@HALVES
def test_what_has_to_be_exact_is_float32(dtype):
    net = Net(BRANCHES, TRAIN, device=EmulatedCuda(), dtype=dtype, seed=1)
    for name in ("x", "ip", "one", "weight", "both"):
        assert bits(net, name) == dtype, name
    for name in ("label", "column", "classes", "distance", "losses"):
        assert bits(net, name) == "float32", name
    # targets are halves, as predictions are; what is joined is alike
    converted = {name for name in net.blobs if name.endswith("_convert")}
    assert len(converted) == 2 and all(bits(net, name) == dtype for name in converted)
    twin = Net(BRANCHES, TRAIN, device=EmulatedCuda(), dtype="float32", seed=1)
    rng = np.random.default_rng(0)
    for name, values in {
        "x": rng.normal(size=(4, 6)),
        "label": [0, 1, 2, 1],
        "weight": rng.normal(size=(4, 1)),
    }.items():
        net.blobs[name].data[...] = values
        twin.blobs[name].data[...] = net.blobs[name].cpu_data()
    for each in (net, twin):
        each.run_forward()
        each.run_backward()
    assert net.blobs["losses"].cpu_data() == pytest.approx(twin.blobs["losses"].cpu_data(), rel=0.02)
    found, expected = (each.params["one"][0].cpu_diff().astype("f4") for each in (net, twin))
    assert found == pytest.approx(expected, abs=0.02 * float(np.abs(expected).max()))


@HALVES
def test_indices_above_2048_stay_what_they_are(dtype):
    text = """layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 1 dim: 50 dim: 100 } } }
              layer { name: "pool" type: "Pooling" bottom: "x" top: "y" top: "mask"
                      pooling_param { kernel_size: 5 stride: 5 } }
              layer { name: "largest" type: "ArgMax" bottom: "x" top: "at" }"""
    net = Net(text, TEST, device=EmulatedCuda(), dtype=dtype)
    net.blobs["x"].data.flat[4999] = 1
    net.forward()
    assert net.blobs["at"].cpu_data().item() == 4999 and net.blobs["mask"].cpu_data().max() == 4999


def test_a_layer_in_place_on_float32_says_what_to_do():
    text = """layer { name: "in" type: "Input" top: "label" input_param { shape { dim: 4 } } }
              layer { name: "shift" type: "Power" bottom: "label" top: "label" power_param { shift: 1 } }
              layer { name: "table" type: "Embed" bottom: "label" top: "y" embed_param { num_output: 2 input_dim: 9 } }"""
    with pytest.raises(NetError, match=r"layer 'shift' \(Power\), top: .* give the top another name"):
        Net(text, TEST, device=EmulatedCuda(), dtype="float16")
    net = Net(text.replace('top: "label" power', 'top: "shifted" power').replace('bottom: "label" top: "y"', 'bottom: "shifted" top: "y"'),
              TEST, device=EmulatedCuda(), dtype="float16")  # fmt: skip
    net.forward()


@pytest.mark.parametrize("device", [HOST, SimulatedDevice()], ids=["host", "simulated"])
@HALVES
def test_the_host_does_not_compute_in_halves(dtype, device):
    with pytest.raises(DeviceError, match=r"give device='cuda' \(--device cuda\), or take dtype float32"):
        Net(BRANCHES, TEST, device=device, dtype=dtype)
    net = Net(BRANCHES, TEST, device=EmulatedCuda(), dtype=dtype)
    with pytest.raises(DeviceError, match=f"nets of {dtype} compute on a GPU"):
        net.move_to(device)
    net.forward()  # it is where it was


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="one of float32, float64, float16, bfloat16, not int8"):
        Net(BRANCHES, TEST, device=EmulatedCuda(), dtype=np.int8)


@HALVES
def test_nets_of_two_dtypes_do_not_share(dtype):
    device = EmulatedCuda()
    half, full = (Net(BRANCHES, TRAIN, device=device, dtype=each) for each in (dtype, "float32"))
    with pytest.raises(NetError, match=f"cannot share parameters: they are of {dtype} here, of float32 in the"):
        half.share_with(full)
    with pytest.raises(ValueError, match=f"is of {dtype}.* of float32: they cannot share"):
        half.blobs["x"].share_data(full.blobs["x"])


@HALVES
@pytest.mark.parametrize("suffix", ["caffemodel", "caffemodel.h5"])
def test_files_have_float32(dtype, suffix, tmp_path):
    device = EmulatedCuda()
    full, half, again = (
        Net(BRANCHES, TRAIN, device=device, dtype=each, seed=3) for each in ("float32", dtype, "float32")
    )

    def save(net, path):
        (net.save_hdf5 if suffix.endswith("h5") else net.save)(path)

    save(full, tmp_path / f"full.{suffix}")
    half.copy_from(tmp_path / f"full.{suffix}")
    save(half, tmp_path / f"half.{suffix}")
    again.copy_from(tmp_path / f"half.{suffix}")
    values, rounded, read_back = (net.params["ip"][0].cpu_data() for net in (full, half, again))
    assert rounded.dtype.name == dtype and np.array_equal(rounded, values.astype(rounded.dtype))
    assert np.array_equal(read_back, rounded.astype(np.float32))


@HALVES
def test_layers_of_the_host_see_arrays_of_the_dtype(dtype, monkeypatch):
    seen = []

    def half_of(x, y):
        seen.append((x.dtype, y.dtype))
        y[...] = x / 2

    monkeypatch.setitem(table("host"), "half_of", Op("half_of", half_of))
    device = EmulatedCuda()
    net = Net(BRANCHES, TEST, device=device, dtype=dtype)
    x, y = net.blobs["x"], net.blobs["both"]
    y.reshape(x.shape)
    x.data[...] = 3

    def by_hand(a, b):
        seen.append((a.dtype, b.dtype))
        b[...] = a

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the op runs on the host
        Schedule([call("half_of", read(x), overwrite(y)), call(by_hand, read(y), overwrite(x))], device).run()
    assert seen == [(np.float32, np.float32), (x.dtype, x.dtype)]  # ops are given what they are written for
    assert (x.cpu_data() == 1.5).all()


@HALVES
@pytest.mark.parametrize("memory", ["keep", "train"])
def test_arrays_have_half_the_bytes(dtype, memory):
    shapes = {"data": (1, 28, 28)}
    half, full = (
        build_nets(LENET, device=SimulatedDevice(compute=False), dtype=each, input_shapes=shapes, memory=memory).train
        for each in (dtype, "float32")
    )
    for net in (half, full):
        net.run_forward()
        net.run_backward()
    for name in ("data", "conv1", "ip1"):
        assert 2 * half.blobs[name].nbytes == full.blobs[name].nbytes
    assert half.blobs["label"].nbytes == full.blobs["label"].nbytes
    assert half.device.statistics.bytes_held < 0.6 * full.device.statistics.bytes_held


@HALVES
def test_the_host_reads_what_the_device_made(dtype):
    net = Net(BRANCHES, TEST, device=EmulatedCuda(), dtype=dtype, seed=1)
    net.blobs["x"].data[...] = 1
    out = net.forward(blobs=["ip"])["ip"]
    weights = net.params["ip"][0].cpu_data().astype("f4")
    assert out.dtype == dtypes.of(dtype)
    assert np.array_equal(out, np.broadcast_to(weights.sum(1), (4, 3)).astype(out.dtype))
