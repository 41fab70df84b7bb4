"""Our nets and solvers on constant data: the models' files, with net inputs in place of their data layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

import blobmem
from benchmarks.host import images
from blobmem import dtypes
from blobmem.footprint import stated_shapes
from blobmem.net.builder import specs_of
from blobmem.net.graph import set_batch
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

MODELS = Path(__file__).parents[1] / "models"
SOURCES = ("Data", "HDF5Data")
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 5e-4  # of every training step that is compared, on both sides


def dtype_of(math: str) -> str:
    """That of a net of which "fp32", "tf32" or a dtype of halves is said: the latter is it."""
    return math if math in dtypes.HALVES else "float32"


def with_inputs(model: str, batch: int, deploy: bool = False) -> Any:
    """The NetParameter of a model's train_val (or deploy) file, whose inputs, the tops of its data layers (`data`,
    `label`), have that batch.

    The file states the shape of an item of each (`# input-shape:`); a label without one is a number.
    """
    path = MODELS / model / ("deploy.prototxt" if deploy else "train_val.prototxt")
    param = read_net(path)
    if not deploy:
        shapes = stated_shapes(specs_of(path))
        sources = [layer for layer in param.layer if layer.type in SOURCES]
        kept = [layer for layer in param.layer if layer.type not in SOURCES]
        del param.layer[:]
        source = param.layer.add(name="data", type="Input", top=sources[0].top)
        for top in source.top:
            source.input_param.shape.add(dim=(batch, *shapes.get(top, ())))
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
    """Give a net's inputs their images, labels below `classes` (or what its loss knows) if it takes any, words if these
    are its data, and `cont` (a text begins with each batch). Once: its device keeps them."""
    batch, *shape = net.blobs["data"].shape
    data = net.blobs["data"].data
    if data.dtype != np.float32:
        data[...], labels = images(tuple(shape), classes, batch)
    else:
        _, labels = images(tuple(shape), classes, batch, data)  # in place: no second one in a peak
    layers = {node.layer.type: node for node in net.nodes}
    if "Embed" in layers:
        data[...] = np.floor(data * layers["Embed"].layer.param.embed_param.input_dim)
    if "cont" in net.inputs:
        net.blobs["cont"].data[...] = np.arange(batch)[:, None] > 0
    if "label" in net.inputs:
        label = net.blobs["label"].data
        if label.size > batch:  # of voxels or words
            loss = layers["SoftmaxWithLoss"]
            known = loss.bottom[0].shape[loss.layer.param.softmax_param.axis]
            labels = np.random.default_rng(1).integers(0, min(classes, known), label.shape)
        label[...] = labels
