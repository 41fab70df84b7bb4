"""Cuts this folder's subset of MNIST from the full set.

    python models/lenet/mnist/cut.py FOLDER_WITH_THE_FULL_SET

The first 10,000 training and the first 2,000 test images with their labels, under the names of the full set's files.
The compressed bytes carry no time and no name, so the same images give the same files (with the same zlib).
"""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

FILES = {
    "train-images-idx3-ubyte.gz": 10_000,
    "train-labels-idx1-ubyte.gz": 10_000,
    "t10k-images-idx3-ubyte.gz": 2_000,
    "t10k-labels-idx1-ubyte.gz": 2_000,
}


def cut(idx: bytes, count: int) -> bytes:
    """The idx file `idx` (uncompressed) with only its first `count` items.

    An idx file begins with two zero bytes, the type (8: unsigned bytes) and the number of axes; then each axis' length
    as a big-endian 32-bit integer, then the items. Raises ValueError where this does not hold or items are too few.
    """
    if idx[:3] != b"\0\0\x08":
        raise ValueError("not an idx file of unsigned bytes; is this the MNIST file as it was published, gzipped?")
    axes = idx[3]
    start = 4 + 4 * axes
    items, *shape = struct.unpack(f">{axes}I", idx[4:start])
    if items < count:
        raise ValueError(f"the file holds {items} items, {count} are needed; give the folder of the full set")
    size = 1
    for length in shape:
        size *= length
    return idx[:4] + struct.pack(f">{axes}I", count, *shape) + idx[start : start + count * size]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python models/lenet/mnist/cut.py FOLDER_WITH_THE_FULL_SET")
    source, target = Path(sys.argv[1]), Path(__file__).resolve().parent
    for name, count in FILES.items():
        subset = cut(gzip.decompress((source / name).read_bytes()), count)
        (target / name).write_bytes(gzip.compress(subset, compresslevel=9, mtime=0))


if __name__ == "__main__":
    main()
