"""The scripts of the documentation run, and show what they say."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blobmem

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def run(name):
    """A script's variables when it has ended."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The folder that learning_lenet.py was run in, and its variables."""
    folder = tmp_path_factory.mktemp("digits")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return folder, run("learning_lenet")
    finally:
        os.chdir(before)


@pytest.fixture
def trained(learnt, tmp_path, monkeypatch):
    """A working folder with the caffemodel that the others begin with."""
    os.link(learnt[0] / "lenet.caffemodel", tmp_path / "lenet.caffemodel")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_learning_lenet(learnt):
    folder, result = learnt
    loss, accuracy = result["train_loss"], result["test_accuracy"]
    assert loss[:10].mean() > 1 > 0.4 > loss[-10:].mean()
    assert len(accuracy) == 4 and accuracy[-1] > 0.9
    right = (result["scores"].argmax(2) == result["first_labels"]).sum(1)
    assert right[0] < 7 <= right[-1]  # of the same eight images
    assert {"mnist_train_lmdb", "lenet.caffemodel"} <= {path.name for path in folder.iterdir()}


def test_net_surgery(trained):
    result = run("net_surgery")
    assert result["agree"] > 0.9
    weights = result["other"].params["ip1"][0].data
    assert np.array_equal(weights, result["net"].params["ip1"][0].data)
    assert np.mean(weights == 0) == 0.5


def test_fine_tuning(trained):
    result = run("fine_tuning")
    assert result["tuned_accuracy"] > max(0.9, result["scratch_accuracy"] + 0.1)
    assert result["losses"][-1, 0] < result["losses"][-1, 1]


def test_feature_extraction(trained):
    result = run("feature_extraction")
    features, labels = result["features"], result["labels"]
    assert result["same"] > 0.8
    Path("files.txt").write_text("features.h5\n")
    readers = {
        "HDF5Data": 'hdf5_data_param { source: "files.txt" batch_size: 120 }',
        "Data": 'data_param { source: "features_lmdb" batch_size: 120 backend: LMDB }',
    }
    for type_, options in readers.items():
        layer = f'layer {{ name: "d" type: "{type_}" top: "data" top: "label" {options} }}'
        read = blobmem.Net(layer, blobmem.TEST).forward()
        assert np.array_equal(read["data"].reshape(features.shape), features)
        assert np.array_equal(read["label"].ravel(), labels)


def test_fully_convolutional(trained):
    result = run("fully_convolutional")
    assert result["scores"].shape == (1, 10, 8, 15)
    assert result["read"] == {place: result["labels"][number] for place, number in result["places"].items()}


def test_memory():
    result = run("memory")
    assert result["device"].statistics.htod_bytes == 4096 + 512
    assert result["large"].data[0, 1] == 1 and result["small"].data[0, 1] == 1


def test_own_layer(tmp_path):
    # in a process of its own: it registers a layer type
    script = [sys.executable, str(EXAMPLES / "own_layer.py")]
    done = subprocess.run(script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "op on cpu", "python on cpu", "op on simulated", "python on simulated",
    ]  # fmt: skip
    assert all("25." in line and "gradient [ 0.  2." in line for line in lines)


def test_every_script_is_tested_and_shown():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in scripts}
    pages = "".join(path.read_text() for path in EXAMPLES.parent.glob("*.md"))
    assert scripts == {name for name in scripts if f"{{literalinclude}} examples/{name}.py" in pages}
