"""LeNet's recorded run: the first steps of what the original Caffe computed on MNIST."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from blobmem.devices import HOST, SimulatedDevice
from blobmem.proto.text import read_solver
from blobmem.solvers import get_solver

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "lenet"
MNIST = ROOT / "models" / "lenet" / "mnist"
STEPS = 25


def images(first, count):
    """Training images [first, first + count) and their labels; the carried subset is the set's beginning."""
    with gzip.open(MNIST / "train-images-idx3-ubyte.gz") as file:
        file.seek(16 + first * 784)
        pixels = np.frombuffer(file.read(count * 784), np.uint8).reshape(count, 1, 28, 28)
    with gzip.open(MNIST / "train-labels-idx1-ubyte.gz") as file:
        file.seek(8 + first)
        labels = np.frombuffer(file.read(count), np.uint8)
    return pixels * np.float32(0.00390625), labels


@pytest.mark.parametrize("device", [HOST, SimulatedDevice()], ids=["host", "simulated"])
def test_first_losses(device):
    param = read_solver(DATA / "solver.txt")
    param.net = str(DATA / "net.prototxt")
    solver = get_solver(param, seed=1, device=device)
    solver.net.copy_trained_layers_from(DATA / "init.caffemodel")
    losses = []
    solver.add_callback(on_iteration=lambda iteration, loss: losses.append(loss))
    data, labels = images(0, 64 * STEPS)
    for step in range(STEPS):
        solver.net.blobs["data"].data[...] = data[64 * step : 64 * step + 64]
        solver.net.blobs["label"].data[...] = labels[64 * step : 64 * step + 64]
        solver.step(1)
    expected = np.load(DATA / "losses.npy")
    np.testing.assert_allclose(losses[:20], expected[:20], rtol=0, atol=1e-4 * expected.max())
    np.testing.assert_allclose(losses, expected[:STEPS], rtol=0, atol=2e-2 * expected.max())
