"""Each source of data in half precision: what it gives in float32, rounded once; labels as they are."""

import h5py
import numpy as np
import pytest
from cuda_devices import EMULATED, GPU
from PIL import Image

from blobmem import TEST, Net, dtypes
from blobmem.proto.text import read_net

HALVES = pytest.mark.parametrize("dtype", dtypes.HALVES)
LABEL = 3001  # of the first item: no half, nor are those after it


@pytest.fixture(params=[EMULATED, GPU])
def device(request):
    return request.param()


def check(text, dtype, device, feed=lambda net: None, passes=3):
    half, full = (Net(read_net(text), TEST, device=device, dtype=each, seed=3) for each in (dtype, "float32"))
    for net in (half, full):
        feed(net)
    assert [half.blobs[name].dtype.name for name in ("data", "label")] == [dtype, "float32"]
    for _ in range(passes):
        found, expected = half.forward(), full.forward()
        assert np.array_equal(found["label"], expected["label"]) and found["label"].max() > 3000
        assert np.array_equal(found["data"], expected["data"].astype(dtypes.of(dtype))) and found["data"].any()


def data_text(path, batch=4):
    return (
        'layer { name: "in" type: "Data" top: "data" top: "label" transform_param { scale: 0.3 mean_value: 3 } '
        f'data_param {{ source: "{path}" batch_size: {batch} backend: LMDB }} }}'
    )


@HALVES
@pytest.mark.parametrize("batch", [1, 4])
def test_databases(make, dtype, device, batch):
    pictures = [make.datum(values, LABEL + 2 * i) for i, values in enumerate(make.pictures(6))]
    check(data_text(make(pictures), batch), dtype, device)
    floats = [make.datum(values / np.float32(7), LABEL + 2 * i) for i, values in enumerate(make.pictures(6))]
    check(data_text(make(floats, "floats"), batch), dtype, device)


@HALVES
def test_images_and_windows(tmp_path, dtype, device):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    listed, windows = tmp_path / "list.txt", tmp_path / "windows.txt"
    listed.write_text(f"{tmp_path}/a.png {LABEL}\n{tmp_path}/a.png {LABEL + 2}\n")
    options = f'top: "data" top: "label" image_data_param {{ source: "{listed}" batch_size: 2 }}'
    check(f'layer {{ name: "in" type: "ImageData" {options} transform_param {{ scale: 0.3 }} }}', dtype, device)
    rows = f"{LABEL} 0.9 1 1 6 7\n0 0.1 2 0 7 8\n"
    windows.write_text(f"# 0\n{tmp_path}/a.png\n3\n9\n8\n2\n{rows}")
    options = f'top: "data" top: "label" window_data_param {{ source: "{windows}" batch_size: 4 fg_fraction: 0.5 }}'
    check(
        f'layer {{ name: "in" type: "WindowData" {options} transform_param {{ crop_size: 5 scale: 0.3 }} }}',
        dtype,
        device,
    )


@HALVES
def test_hdf5(tmp_path, dtype, device):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["data"], file["label"] = np.random.default_rng(0).normal(size=(8, 3)), LABEL + 2 * np.arange(8)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/rows.h5\n")
    text = f"""layer {{ name: "in" type: "HDF5Data" top: "data" top: "label"
                hdf5_data_param {{ source: "{tmp_path}/list.txt" batch_size: 4 }} }}
               layer {{ name: "again" type: "Input" top: "table" input_param {{ shape {{ dim: 4000 dim: 2 }} }} }}
               layer {{ name: "pick" type: "BatchReindex" bottom: "table" bottom: "label" top: "picked" }}"""
    half, full = (Net(read_net(text), TEST, device=device, dtype=each, seed=3) for each in (dtype, "float32"))
    for net in (half, full):
        net.blobs["table"].data[...] = np.arange(4000)[:, None] % 100
        net.forward()
    assert [half.blobs[name].dtype.name for name in ("data", "label", "picked")] == [dtype, "float32", dtype]
    for name in ("data", "label", "picked"):
        assert np.array_equal(half.blobs[name].cpu_data(), full.blobs[name].cpu_data().astype(half.blobs[name].dtype))


@HALVES
def test_arrays_and_files_written(tmp_path, dtype, device):
    text = """layer { name: "in" type: "MemoryData" top: "data" top: "label"
                      memory_data_param { batch_size: 2 channels: 1 height: 2 width: 3 } }"""
    data, labels = np.random.default_rng(0).normal(size=(4, 1, 2, 3)), LABEL + 2 * np.arange(4)
    check(text, dtype, device, lambda net: net.set_input_arrays(data, labels))
    out = f'layer {{ name: "out" type: "HDF5Output" bottom: "data" bottom: "label" hdf5_output_param {{ file_name: "{tmp_path}/o.h5" }} }}'
    net = Net(read_net(text + out), TEST, device=device, dtype=dtype)
    net.set_input_arrays(data, labels)
    net.forward()
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["data"].dtype == np.float32
        assert np.array_equal(file["data"][...], data[:2].astype(dtypes.of(dtype)).astype(np.float32))


@HALVES
def test_python_layers_see_arrays_of_the_dtype(dtype, device):
    text = """layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
              layer { name: "twice" type: "Python" bottom: "x" top: "y"
                      python_param { module: "doubling" layer: "Twice" } }"""
    net = Net(read_net(text), TEST, device=device, dtype=dtype)
    net.blobs["x"].data[...] = 1.5
    y = net.forward()["y"]
    assert y.dtype == dtypes.of(dtype) and (y == 3).all()
