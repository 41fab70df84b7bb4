"""The nets of models/ that are large in any case, from the same generators, small enough for a CPU."""

from models.generate import data
from models.generate.densenet264 import densenet264
from models.generate.lstm_lm import lstm_lm
from models.generate.vnet import vnet

SMALL = {
    "densenet264": lambda: densenet264(False, blocks=(2, 3, 2), growth=4, classes=5, side=32, batch=8),
    "vnet": lambda: vnet(False, shape=(1, 16, 16, 16), channels=2),
    "lstm_lm": lambda: lstm_lm(False, vocabulary=50, units=16, steps=12, streams=8),
}
"""By name: what builds the net of its train_val file."""


def write_small(name, root):
    """A small net's train_val file, and data for it, below a folder, from which it is to be used; the file's path."""
    folder = root / "models" / name
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "test")):
        if name == "densenet264":
            data.images(folder / f"ilsvrc12_{'train' if split == 'train' else 'val'}_lmdb", 40, 36, 5, seed)
        elif name == "vnet":
            data.write_rows(folder, split, data.volumes(6, (1, 16, 16, 16), seed))
        else:
            data.write_rows(folder, split, data.words(120, 8, 50, seed))
    path = folder / "train_val.prototxt"
    path.write_text(SMALL[name]().text())
    return path
