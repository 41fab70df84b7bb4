"""Our nets and solvers on constant data: the models' files, with net inputs in place of their data layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

import blobmem
from benchmarks.host import images
from blobmem.dtypes import is_half
from blobmem.footprint import stated_shapes
from blobmem.net.builder import specs_of
from blobmem.net.graph import set_batch
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

MODELS = Path(__file__).parents[1] / "models"
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 5e-4  # of every training step that is compared, on both sides


def with_inputs(model: str, batch: int, deploy: bool = False) -> Any:
    """The NetParameter of a model's train_val (or deploy) file, whose inputs `data` (and `label`) have that batch.

    The file states the shape of an item (`# input-shape:`).
    """
    path = MODELS / model / ("deploy.prototxt" if deploy else "train_val.prototxt")
    param = read_net(path)
    if not deploy:
        shape = stated_shapes(specs_of(path))["data"]
        kept = [layer for layer in param.layer if layer.type != "Data"]
        del param.layer[:]
        source = param.layer.add(name="data", type="Input", top=["data", "label"])
        for dims in ((batch, *shape), (batch,)):
            source.input_param.shape.add(dim=dims)
        param.layer.extend(kept)
    set_batch(param, batch)
    return param


def solver_of(net: Any, tests: bool = False, **options: Any) -> Any:
    """A solver that trains a NetParameter by SGD with momentum and weight decay, with a test net if so asked."""
    param = caffe_pb2.SolverParameter(
        base_lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, lr_policy="fixed", random_seed=1
    )
    param.net_param.CopyFrom(net)
    if tests:
        param.test_iter.append(1)
        param.test_interval, param.test_initialization = 1 << 30, False  # when it is asked for
    return blobmem.get_solver(param, **options)


def fill_weights(net: Any) -> None:
    """Give a net whose file has no fillers random weights, and statistics that change nothing: a GPU takes less power,
    and so is faster, where it multiplies zeros."""
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    for node in net.nodes:
        blobs = node.layer.blobs
        if node.layer.type == "BatchNorm":
            for blob, value in zip(blobs, (0, 1, 1), strict=True):
                blob.data[...] = value
        elif blobs and blobs[0].num_axes > 1:
            blobs[0].data[...] = np.resize(values, blobs[0].shape) / math.sqrt(blobs[0].count_of(1))


def fill(net: Any, classes: int) -> None:
    """Give a net's inputs their images, and labels if it takes any. Once: its device keeps them."""
    batch, *shape = net.blobs["data"].shape
    data = net.blobs["data"].data
    if is_half(data.dtype):
        data[...], labels = images(tuple(shape), classes, batch)
    else:
        _, labels = images(tuple(shape), classes, batch, data)  # in place: no second one in a peak
    if "label" in net.inputs:
        net.blobs["label"].data[...] = labels
