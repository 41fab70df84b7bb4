"""The HDF5Output layer: what a net computes, as rows of an HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.data.hdf5_write import new_file, old_file
from blobmem.data.options import place_of
from blobmem.errors import NetError
from blobmem.layers.base import EXACT, Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, read

NAMES = ("data", "label")
"""Names of the datasets, whatever the bottoms' are."""


@register_layer
class HDF5Output(Layer):
    """Writes two bottoms to the datasets "data" and "label" of a file, the rows of each forward pass after the last's.

    As Caffe's, the datasets have four axes or more. The first pass replaces a file that is there. Between passes the
    file is closed and complete; HDF5 has no protection against a process that is killed while it writes a pass.

    Attributes:
        rows: number of rows written; what a snapshot keeps, so that a restored run goes on behind them.
    """

    type = "HDF5Output"
    bottoms = (2, 2)
    tops = (0, 0)
    propagates = (False,)
    bottom_kinds = (EXACT,)
    rewinds = True

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.file_name: str = self.param.hdf5_output_param.file_name
        if not self.file_name or os.path.isdir(self.file_name):
            raise self.error("file_name", "the name of a file to write", repr(self.file_name))
        self.rows = 0

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        # a single value is a row of its own
        if (bottom[0].shape[:1] or (1,)) != (bottom[1].shape[:1] or (1,)):
            raise self.error("bottom", "two blobs of one batch size", f"{bottom[0].describe()}, {bottom[1].describe()}")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(self._write, *map(read, bottom))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        if not isinstance(rows, int) or rows < 0:
            raise NetError(f"layer '{self.name}': a number of rows written of {rows!r}, expected 0 or more")
        self.rows = rows

    def _write(self, *arrays: np.ndarray) -> None:
        tables = {
            name: array.reshape(array.shape + (1,) * (4 - array.ndim))
            for name, array in zip(NAMES, arrays, strict=True)
        }
        opened = old_file(self.file_name) if self.rows else new_file(self.file_name, overwrite=True)
        try:
            with opened as file:
                file.put(self.rows, tables)
        except NetError as error:
            raise NetError(f"{place_of(self, 'file_name')}: {error}") from None
        self.rows += len(tables[NAMES[0]])
