"""What a net makes of its data, into databases or an HDF5 file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from blobmem.data.convert import Converted, Progress
from blobmem.data.hdf5_write import check_new_file, new_file
from blobmem.data.tables import HDF5_SUFFIXES
from blobmem.data.writer import check_target, new_database
from blobmem.errors import NetError
from blobmem.proto import caffe_pb2

Put = Callable[[int, dict[str, np.ndarray]], None]
"""put(start, rows): write the rows of each blob, from row `start` of that blob on."""


def extract(
    net: Any,
    names: Sequence[str],
    passes: int,
    prefix: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Converted]:
    """Run a net forward so many times and keep the rows (first axis) of the blobs named.

    A prefix that ends in .h5 is an HDF5 file with a dataset for each blob. Any other gives a database for each, in the
    folder PREFIX_BLOB_lmdb (with _ for / in the name), of records of a row's channels x height x width as Caffe's tool
    makes them; further axes count as width. All appear when all are complete. `progress` is called with the passes
    done, and those in all.

    Raises NetError for a name that is no blob of the net, or if what is to be made exists (and not `overwrite`) or
    cannot be written.
    """
    for name in names:
        if name not in net.blobs:
            raise NetError(f"{net.identity} has no blob '{name}'; it has {', '.join(net.blobs)}")
    targets = targets_of(names, prefix)
    to_file = is_file(prefix)
    for target in targets.values():
        (check_new_file if to_file else check_target)(target, overwrite)
    counts = dict.fromkeys(targets, 0)
    with ExitStack() as stack:
        put = (_to_file if to_file else _to_databases)(stack, targets, overwrite)
        for done in range(1, passes + 1):
            net.run_forward()
            for name in targets:
                values = net.blobs[name].cpu_data()
                rows = values.reshape(values.shape or (1,))
                put(counts[name], {name: rows})
                counts[name] += len(rows)
            if progress is not None:
                progress(done, passes)
    return [Converted.of(target, counts[name]) for name, target in targets.items()]


def is_file(prefix: str | os.PathLike[str]) -> bool:
    """Whether all blobs go into one HDF5 file."""
    return Path(prefix).suffix.lower() in HDF5_SUFFIXES


def targets_of(names: Sequence[str], prefix: str | os.PathLike[str]) -> dict[str, Path]:
    """Where each blob goes. Raises NetError if two would go to one place."""
    path = Path(prefix)
    if is_file(prefix):
        return dict.fromkeys(names, path)
    targets = {name: path.with_name(f"{path.name}_{name.replace('/', '_')}_lmdb") for name in names}
    if len(set(targets.values())) < len(targets):
        raise NetError(f"two of {', '.join(targets)} would be the same folder: give a prefix that ends in .h5")
    return targets


def _to_file(stack: ExitStack, targets: dict[str, Path], overwrite: bool) -> Put:
    file = stack.enter_context(new_file(next(iter(targets.values())), overwrite=overwrite))
    return file.put


def _to_databases(stack: ExitStack, targets: dict[str, Path], overwrite: bool) -> Put:
    writers = {name: stack.enter_context(new_database(path, overwrite=overwrite)) for name, path in targets.items()}

    def put(start: int, blobs: dict[str, np.ndarray]) -> None:
        for name, rows in blobs.items():
            axes = (*rows.shape[1:], 1, 1, 1)
            channels, height = axes[:2]
            width = math.prod(axes[2:])
            for number, row in enumerate(rows.reshape(len(rows), -1).tolist(), start):
                datum = caffe_pb2.Datum(channels=channels, height=height, width=width, float_data=row)
                writers[name].put(b"%010d" % number, datum.SerializeToString())

    return put
