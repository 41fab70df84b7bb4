"""The Data layer: batches of an LMDB database of Datum messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blobmem.data.batches import BatchLoader
from blobmem.data.database import DATA_FILE
from blobmem.data.datum import RecordError, Shape, dims
from blobmem.data.mnist import DATABASES
from blobmem.data.transform import Transformer, random_words
from blobmem.errors import NetError
from blobmem.layers.base import TRAIN, register_layer
from blobmem.layers.source import Source
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite
from blobmem.proto import caffe_pb2

log = logging.getLogger("blobmem")

_LMDB = caffe_pb2.DataParameter.LMDB


@register_layer
class Data(Source):
    """Images (batch, channels, height, width) and, with a second top, labels (batch,), in the database's order.

    Attributes:
        position: records taken so far (or skipped by rand_skip); the next batch begins there, modulo their number.
    """

    type = "Data"
    tops = (1, 2)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.data_param
        self.batch: int = options.batch_size
        if self.batch < 1:
            raise self.error("batch_size", "1 or more", self.batch)
        self.transformer = Transformer(self._transform_param(), self.phase == TRAIN, self.context.dtype, self.error)
        self.position = self._first_position(options.rand_skip)
        self._loader: BatchLoader | None = None
        stated = self.context.input_shapes.get(self.param.top[0])
        # a stated shape stands in for a database that may be absent, and then holds for all its records
        self._stated = stated is not None
        self.item = self._item(stated) if stated is not None else self._open().shape(self.position)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        top[0].reshape(self.batch, *self.item)
        if len(top) > 1:
            top[1].reshape(self.batch)

    def prepare(self, top: Sequence[Blob]) -> None:
        """Give a batch of 1 the shape of the next record, which stays where it is; larger batches keep theirs."""
        if self.batch == 1 and not self._stated:
            shape = self._open().shape(self.position)
            if shape != self.item:
                self.item = shape
                self.reshape((), top)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(self._load, *map(overwrite, top))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = state["position"]
        if not isinstance(position, int) or position < 0:
            raise NetError(f"layer '{self.name}': a position in the data of {position!r}, expected 0 or more")
        self.position = position

    # ---------------------------------------------------------------- the parts

    def _load(self, data: np.ndarray, labels: np.ndarray | None = None) -> None:
        self._open().load(self.position, self.context.state.seed, data, labels)
        self.position += self.batch

    def _open(self) -> BatchLoader:
        """The loader of this layer's database, opened at first use. Raises NetError saying what to do."""
        if self._loader is None:
            net = f"{self.context.source}: " if self.context.source else ""
            where = f"{net}layer '{self.name}' ({self.type}), source"
            self._loader = BatchLoader(self._database(), self.transformer, self.name, where)
        return self._loader

    def _database(self) -> str:
        """The folder to read. Raises NetError unless it is, by what is said and by what is there, an LMDB."""
        options = self.param.data_param
        path: str = options.source
        if not path:
            raise self.error("source", "the folder of an LMDB database", "nothing")
        is_lmdb = os.path.isfile(os.path.join(path, DATA_FILE))
        stated = options.HasField("backend")
        if options.backend != _LMDB and (stated or (os.path.isdir(path) and not is_lmdb)):
            what = "is one" if is_lmdb else "is none: copy its records into one" if os.path.isdir(path) else "is absent"
            raise self.error(
                "backend",
                f"`backend: LMDB` and an LMDB database, all that this version reads ({path!r} {what})",
                "LEVELDB" if stated else "nothing, which stands for LEVELDB",
            )
        if not is_lmdb:
            raise self.error("source", f"the folder of an LMDB database, with {DATA_FILE} in it", self._absence(path))
        if options.backend != _LMDB:
            log.info("layer '%s': no backend stated; %s is an LMDB database and is read as one", self.name, path)
        return path

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

    def _item(self, stated: Sequence[int]) -> Shape:
        """The shape of an item of the batch, from the stated shape of a record."""
        what = f"input shape of '{self.param.top[0]}'"
        shape = tuple(int(length) for length in stated)
        if len(shape) != 3 or min(shape) < 1:
            raise self.error(what, "channels x height x width, 1 or more each", shape)
        try:
            return self.transformer.crop_of((shape[0], shape[1], shape[2]))
        except RecordError as error:
            raise self.error(what, f"one that fits transform_param ({error})", dims(shape)) from None

    def _transform_param(self) -> Any:
        """transform_param, with what old files say in data_param."""
        result = caffe_pb2.TransformationParameter()
        result.CopyFrom(self.param.transform_param)
        if self.param.data_param.force_encoded_color:
            result.force_color = True
        return result

    def _first_position(self, rand_skip: int) -> int:
        if not rand_skip:
            return 0
        words = random_words(self.context.state.seed, f"{self.name}/rand_skip", 0, 1)
        return words[0][0] % rand_skip
