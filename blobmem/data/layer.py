"""The Data layer: batches of a database of Datum messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from blobmem.data.batches import BatchLoader
from blobmem.data.database import MARK_FILE, kind_of
from blobmem.data.feed import ImageBatches
from blobmem.data.lmdb_file import DATA_FILE
from blobmem.data.mnist import DATABASES
from blobmem.data.options import first_position, place_of, stated_item
from blobmem.data.transform import Transformer
from blobmem.layers.base import TRAIN, register_layer
from blobmem.memory.blob import Blob
from blobmem.proto import caffe_pb2

log = logging.getLogger("blobmem")


@register_layer
class Data(ImageBatches):
    """Images (batch, channels, height, width) and, with a second top, labels (batch,), in the database's order.

    Attributes:
        position: records taken so far, or skipped by rand_skip; the next batch begins there, modulo their number.
    """

    type = "Data"
    tops = (1, 2)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.data_param
        batch: int = options.batch_size
        self.transformer = Transformer(self._transform_param(), self.phase == TRAIN, self.context.exact, self.error)
        self._loader: BatchLoader | None = None
        first = first_position(self, options.rand_skip)
        stated = self.context.input_shapes.get(self.param.top[0])
        # a stated shape stands in for a database that may be absent, and then holds for all its records
        if stated is None:
            record, holds_bytes = self._open().record(first)
            item = self.transformer.crop_of(record)
        else:
            item, holds_bytes = stated_item(self, self.transformer, stated), True
            record = stated[0], stated[1], stated[2]
        self.start_images(
            batch,
            item,
            record,
            holds_bytes=holds_bytes,
            position=first,
            prefetch=options.prefetch,
            varies=batch == 1 and stated is None,
        )

    def load_images(
        self, position: int, seed: int, data: np.ndarray, labels: np.ndarray | None, cuts: np.ndarray | None
    ) -> None:
        self._open().load(position, seed, data, labels, cuts)

    def shapes(self, position: int, seed: int) -> Sequence[tuple[int, ...]]:
        return [(1, *self._open().shape(position)), (1,)][: len(self.param.top)]

    # ---------------------------------------------------------------- the parts

    def _open(self) -> BatchLoader:
        """The loader of this layer's database, opened at first use. Raises NetError saying what to do."""
        if self._loader is None:
            self._loader = BatchLoader(
                self._database(),
                self.transformer,
                self.name,
                place_of(self, "source"),
                skip_damaged=self.context.skip_damaged,
            )
        return self._loader

    def _database(self) -> str:
        """The folder to read. Raises NetError unless it is, by what is said and by what is there, a database."""
        options = self.param.data_param
        path: str = options.source
        if not path:
            raise self.error("source", "the folder of an LMDB or LevelDB database", "nothing")
        kind = kind_of(path)
        stated: str = caffe_pb2.DataParameter.DB.Name(options.backend)
        if kind is None:
            raise self.error("source", self._expected(stated), self._absence(path))
        if kind != stated:
            if options.HasField("backend"):
                raise self.error("backend", f"{kind}, which {path!r} is", stated)
            log.info("layer '%s': no backend stated; %s is an %s database and is read as one", self.name, path, kind)
        return path

    def _expected(self, stated: str) -> str:
        if not self.param.data_param.HasField("backend"):
            return f"the folder of an LMDB or LevelDB database, with {DATA_FILE} or {MARK_FILE} in it"
        if stated == "LMDB":
            return f"the folder of an LMDB database, with {DATA_FILE} in it"
        return f"the folder of a LevelDB database, with {MARK_FILE} in it"

    def _absence(self, path: str) -> str:
        """What is not there, and what to do about it."""
        if os.path.isdir(path):
            found = f"{path!r}, a folder without it"
        elif os.path.exists(path):
            found = f"{path!r}, a file"
        else:
            start = "" if os.path.isabs(path) else f" (relative paths start at {os.getcwd()})"
            found = f"{path!r}, which does not exist{start}"
        folder, name = os.path.split(os.path.normpath(path))
        create = "create it"
        if name in DATABASES:
            beside = os.path.join(folder, "mnist")
            images = beside if os.path.isdir(beside) else "FOLDER_OF_MNIST_FILES"
            create += f" with `blobmem convert mnist {images} {folder or '.'}`"
        top = self.param.top[0]
        return f"{found}: {create}, or, for footprints, state an item's shape with --input-shape {top}=CxHxW"

    def _transform_param(self) -> Any:
        """transform_param, with force_color if an old file says so in data_param."""
        result = caffe_pb2.TransformationParameter()
        result.CopyFrom(self.param.transform_param)
        if self.param.data_param.force_encoded_color:
            result.force_color = True
        return result
