"""The MNIST subset in models/lenet/mnist, and the script that cuts it."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "models" / "lenet" / "mnist"
SPLITS = [("train", 10_000), ("t10k", 2_000)]


def read(name: str) -> np.ndarray:
    """An idx file of unsigned bytes as an array of its shape."""
    data = gzip.decompress((FOLDER / name).read_bytes())
    assert data[:3] == b"\0\0\x08"
    axes = data[3]
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def cutter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_cut", FOLDER / "cut.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("split", "count"), SPLITS)
def test_images_and_labels_have_the_right_counts(split: str, count: int) -> None:
    images, labels = read(f"{split}-images-idx3-ubyte.gz"), read(f"{split}-labels-idx1-ubyte.gz")
    assert images.shape == (count, 28, 28)
    assert labels.shape == (count,)
    assert images.any(axis=(1, 2)).all(), "an image without ink"


@pytest.mark.parametrize(("split", "count"), SPLITS)
def test_classes_are_balanced(split: str, count: int) -> None:
    """Every digit has its tenth, give or take a quarter of it; the full set is no closer."""
    classes = np.bincount(read(f"{split}-labels-idx1-ubyte.gz"), minlength=10)
    assert classes.size == 10
    assert classes.min() > 0.75 * count / 10 and classes.max() < 1.25 * count / 10


def test_digits_match_their_labels() -> None:
    """The nearest class mean of the training images tells most test images apart: labels and images are in step."""
    images = read("train-images-idx3-ubyte.gz").reshape(10_000, -1) / 255
    labels = read("train-labels-idx1-ubyte.gz")
    means = np.stack([images[labels == digit].mean(axis=0) for digit in range(10)])
    tests = read("t10k-images-idx3-ubyte.gz").reshape(2_000, -1) / 255
    # argmin |x - m|^2 = argmin |m|^2 - 2 x.m
    nearest = ((means**2).sum(axis=1) - 2 * tests @ means.T).argmin(axis=1)
    assert (nearest == read("t10k-labels-idx1-ubyte.gz")).mean() > 0.7


def test_files_are_small_and_carry_no_time() -> None:
    files = sorted(FOLDER.glob("*.gz"))
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) < 3 * 2**20
    for path in files:
        flags, time = path.read_bytes()[3], path.read_bytes()[4:8]
        assert flags == 0 and time == b"\0\0\0\0", f"{path.name} depends on when it was made"


def test_cut_keeps_the_first_items() -> None:
    whole = b"\0\0\x08\x03" + struct.pack(">3I", 4, 2, 3) + bytes(range(24))
    assert cutter().cut(whole, 3) == b"\0\0\x08\x03" + struct.pack(">3I", 3, 2, 3) + bytes(range(18))


@pytest.mark.parametrize("count", [5, 100])
def test_cut_refuses_a_set_that_is_too_small(count: int) -> None:
    whole = b"\0\0\x08\x01" + struct.pack(">I", 4) + bytes(4)
    with pytest.raises(ValueError, match="holds 4 items"):
        cutter().cut(whole, count)


def test_cut_refuses_what_is_no_idx_file() -> None:
    with pytest.raises(ValueError, match="not an idx file"):
        cutter().cut(b"PNG" + bytes(20), 1)
