"""LeNet's recorded run: the first steps of what the original Caffe computed on MNIST."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import GPU, TF32_GPU, needs_gpu

from blobmem.devices import HOST, SimulatedDevice
from blobmem.proto.text import read_solver
from blobmem.solvers import get_solver

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "lenet"
MNIST = ROOT / "models" / "lenet" / "mnist"


def images(first, count):
    """Training images [first, first + count) and their labels; the carried subset is the set's beginning."""
    with gzip.open(MNIST / "train-images-idx3-ubyte.gz") as file:
        file.seek(16 + first * 784)
        pixels = np.frombuffer(file.read(count * 784), np.uint8).reshape(count, 1, 28, 28)
    with gzip.open(MNIST / "train-labels-idx1-ubyte.gz") as file:
        file.seek(8 + first)
        labels = np.frombuffer(file.read(count), np.uint8)
    return pixels * np.float32(0.00390625), labels


def losses_of(device, steps):
    """Our losses and Caffe's."""
    param = read_solver(DATA / "solver.txt")
    param.net = str(DATA / "net.prototxt")
    solver = get_solver(param, seed=1, device=device)
    solver.net.copy_trained_layers_from(DATA / "init.caffemodel")
    losses = []
    solver.add_callback(on_iteration=lambda iteration, loss: losses.append(loss))
    data, labels = images(0, 64 * steps)
    for step in range(steps):
        solver.net.blobs["data"].data[...] = data[64 * step : 64 * step + 64]
        solver.net.blobs["label"].data[...] = labels[64 * step : 64 * step + 64]
        solver.step(1)
    return np.array(losses), np.load(DATA / "losses.npy")[:steps]


@pytest.mark.parametrize(
    "make_device", [pytest.param(lambda: HOST, id="host"), pytest.param(SimulatedDevice, id="simulated")]
)
def test_first_losses(make_device):
    losses, expected = losses_of(make_device(), 25)
    np.testing.assert_allclose(losses[:20], expected[:20], rtol=0, atol=1e-4 * expected.max())
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-2 * expected.max())


@pytest.mark.parametrize(
    "make_device, tolerance", [(*GPU.values, 1e-4), (*TF32_GPU.values, 2e-3)], ids=["fp32", "tf32"]
)
@pytest.mark.gpu
@needs_gpu[1]
def test_the_run_on_a_gpu(make_device, tolerance):
    """As far as the images that are carried last, of 200 steps."""
    losses, expected = losses_of(make_device(), 156)
    np.testing.assert_allclose(losses[:20], expected[:20], rtol=0, atol=tolerance * expected.max())
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-2 * expected.max())
    assert losses[-50:].mean() == pytest.approx(expected[-50:].mean(), rel=0.02)
