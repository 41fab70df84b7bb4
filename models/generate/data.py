"""Small data made up for the nets whose data sets are not to be had in a moment: enough to train on, and to measure.

Run from the root of the repository:

    python -m models.generate.data densenet264    # or vnet, lstm_lm, resnet1001
    python -m models.generate.data vnet --train 16 --test 4 --into DIR

Writes what the model's data layers read, in its folder, from random numbers that are the same in every run. What is
there already is left, with an error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blobmem.data.hdf5_write import new_file
from blobmem.data.writer import new_database
from blobmem.errors import BlobmemError
from blobmem.io import array_to_datum

from .lstm_lm import VOCABULARY
from .vnet import SHAPE

Tables = dict[str, np.ndarray]


def images(path: Path, count: int, side: int, classes: int, seed: int) -> None:
    """An LMDB of `count` colour images, side x side: stripes whose direction and hue are the class's, and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    with new_database(path) as database:
        for index in range(count):
            label = int(rng.integers(classes))
            angle = np.pi * label / classes
            stripes = np.sin(2 * np.pi * (4 * (x * np.cos(angle) + y * np.sin(angle)) + rng.random()))
            hue = np.cos(2 * angle + np.arange(3) * 2 * np.pi / 3).reshape(3, 1, 1)
            image = 120 + 60 * hue * stripes + 20 * rng.standard_normal((3, side, side))
            datum = array_to_datum(image.clip(0, 255).astype(np.uint8), label)
            database.put(b"%08d" % index, datum.SerializeToString())


def volumes(count: int, shape: Sequence[int], seed: int) -> Tables:
    """Rows of `data`, (count, *shape), noise with a brighter ellipsoid in it, and of `label`, 1 inside it, else 0."""
    rng = np.random.default_rng(seed)
    channels, *sizes = shape
    axes = np.meshgrid(*(np.linspace(-1, 1, size, dtype=np.float32) for size in sizes), indexing="ij")
    data = rng.standard_normal((count, channels, *sizes), np.float32)
    label = np.empty((count, *sizes), np.float32)
    for index in range(count):
        middle, radii = rng.uniform(-0.4, 0.4, len(sizes)), rng.uniform(0.2, 0.6, len(sizes))
        distance = sum(((axis - at) / radius) ** 2 for axis, at, radius in zip(axes, middle, radii, strict=True))
        label[index] = distance < 1
        data[index] += 2 * label[index]
    return {"data": data, "label": label}


def words(count: int, streams: int, vocabulary: int, seed: int) -> Tables:
    """Rows of `data`, `cont` and `label`, (count, streams): words, whether they go on, and the words that follow.

    Frequent words are far more frequent than rare ones, as in any language, and every second word follows from the one
    before it. Each stream is one text from the first row to the last.
    """
    rng = np.random.default_rng(seed)
    text = (np.exp(rng.random((count + 1, streams)) * np.log(vocabulary + 1)) - 1).astype(np.int64)
    for row in range(1, count + 1, 2):
        text[row] = (7 * text[row - 1] + 3) % vocabulary
    cont = np.ones((count, streams), np.float32)
    cont[0] = 0
    return {"data": text[:-1].astype(np.float32), "cont": cont, "label": text[1:].astype(np.float32)}


def write_rows(folder: Path, split: str, tables: Tables) -> None:
    """Write tables as `folder`/`split`.h5, and the list of this one file that an HDF5Data layer reads from here."""
    path = folder / f"{split}.h5"
    with new_file(path) as file:
        file.put(0, tables)
    (folder / f"{split}_h5.txt").write_text(f"{os.path.relpath(path)}\n", encoding="utf-8")


class Maker(NamedTuple):
    """How a model's data are made: `make(folder, split, count, seed)`, and how many by default."""

    make: Callable[[Path, str, int, int], None]
    train: int
    test: int


def _imagenet(folder: Path, split: str, count: int, seed: int) -> None:
    images(folder / f"ilsvrc12_{'train' if split == 'train' else 'val'}_lmdb", count, 256, 1000, seed)


def _cifar10(folder: Path, split: str, count: int, seed: int) -> None:
    images(folder / f"cifar10_{split}_lmdb", count, 40, 10, seed)


def _volumes(folder: Path, split: str, count: int, seed: int) -> None:
    write_rows(folder, split, volumes(count, SHAPE, seed))


def _words(folder: Path, split: str, count: int, seed: int) -> None:
    write_rows(folder, split, words(count, 40, VOCABULARY, seed))


MAKERS = {
    "densenet264": Maker(_imagenet, 256, 50),
    "lstm_lm": Maker(_words, 14080, 1408),
    "resnet1001": Maker(_cifar10, 2000, 500),
    "vnet": Maker(_volumes, 16, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate.data", description="Write small, made-up data for a model."
    )
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("model", choices=MAKERS, help="whose")
    parser.add_argument("--train", type=int, metavar="N", help="images, volumes or rows of words to train on")
    parser.add_argument("--test", type=int, metavar="N", help="the same to test on")
    parser.add_argument("--into", type=Path, default=here, metavar="DIR", help="the folder of models (default: models)")
    args = parser.parse_args()
    maker, folder = MAKERS[args.model], args.into / args.model
    try:
        for seed, split in enumerate(("train", "test")):
            count = getattr(args, split) or getattr(maker, split)
            maker.make(folder, split, count, seed)
            print(f"{folder}: {count} to {split}")
    except BlobmemError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
