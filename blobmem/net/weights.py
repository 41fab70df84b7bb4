"""A net's parameters in files and in other nets, by layer name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.dtypes import exact
from blobmem.errors import NetError
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import Intent
from blobmem.proto import caffe_pb2, hdf5
from blobmem.proto.arrays import blob_array, blob_shape, fill_blob, has_values, shape_matches
from blobmem.proto.files import write_atomic
from blobmem.proto.text import read_net_binary, write_binary

if TYPE_CHECKING:
    from blobmem.layers.base import Layer
    from blobmem.net.net import Net


Values = Mapping[SyncedMemory, np.ndarray]
Unrounded = Mapping[SyncedMemory, Callable[[np.ndarray], None]]
NOTHING: Mapping[SyncedMemory, Any] = MappingProxyType({})


def share_params(params: dict[str, list[Blob]], other: dict[str, list[Blob]]) -> set[str]:
    """Put parameters into the memory of another net's, by layer name; returns the names.

    Gradients stay apart, as in Caffe: each net's backward adds to its own. Raises NetError, and nothing is shared, if
    numbers, shapes or dtypes differ.
    """
    pairs = [(name, blobs, other[name]) for name, blobs in params.items() if name in other]
    for name, blobs, sources in pairs:
        if [blob.shape for blob in blobs] != [blob.shape for blob in sources]:
            raise NetError(
                f"layer '{name}' cannot share parameters: shapes {[blob.shape for blob in blobs]} here, "
                f"{[blob.shape for blob in sources]} in the other net"
            )
        for blob, source in zip(blobs, sources, strict=True):
            if blob.dtype != source.dtype:
                raise NetError(
                    f"layer '{name}' cannot share parameters: they are of {blob.dtype} here, of {source.dtype} in the "
                    "other net"
                )
    for _, blobs, sources in pairs:
        for blob, source in zip(blobs, sources, strict=True):
            blob.share_data(source)
    return {name for name, _, _ in pairs}


def load(net: Net, weights: Any, unrounded: Unrounded = NOTHING) -> list[str]:
    """Copy parameters from a caffemodel (binary or HDF5) or a NetParameter into the net's layers of the same names;
    returns those names.

    What `unrounded` has for the memory of a parameter of halves is called with its values, as they are in the file.

    Everything is checked before the first value is copied. Raises NetError.
    """
    if isinstance(weights, str | os.PathLike) and hdf5.is_hdf5(weights):
        return load_hdf5(net, weights, unrounded)
    source = os.fspath(weights) if isinstance(weights, str | os.PathLike) else "the net given"
    param = read_net_binary(weights) if isinstance(weights, str | os.PathLike) else weights
    pairs = [(layer, net.params[layer.name]) for layer in param.layer if layer.name in net.params]
    for layer, blobs in pairs:
        if len(layer.blobs) != len(blobs):
            raise NetError(
                f"{source}: layer '{layer.name}' has {len(layer.blobs)} parameters, {len(blobs)} in {net.identity}; "
                "rename the layer in the prototxt to start it afresh"
            )
        for index, (proto, blob) in enumerate(zip(layer.blobs, blobs, strict=True)):
            where = f"{source}: layer '{layer.name}', parameter {index}"
            try:
                fits, empty = shape_matches(proto, blob.shape), not has_values(proto) and blob.count > 0
            except NetError as error:
                raise NetError(f"{where}: {error}") from None
            if not fits:
                raise NetError(
                    f"{where} has shape {blob_shape(proto)}, {blob.shape} in {net.identity}; "
                    "rename the layer in the prototxt to start it afresh"
                )
            if empty:
                raise NetError(f"{where} has no values")
    for layer, blobs in pairs:
        for proto, blob in zip(layer.blobs, blobs, strict=True):
            blob.from_proto(proto, reshape=False)
            keep = unrounded.get(blob.data_view.memory)
            if keep is not None and (values := blob_array(proto)) is not None:
                keep(values.reshape(blob.shape))
    return [layer.name for layer, _ in pairs]


def to_proto(net: Net, write_diff: bool = False, values: Values = NOTHING) -> Any:
    """The net's NetParameter, with parameters in it; `values` are written in place of what lies in those memories."""
    result = caffe_pb2.NetParameter(name=net.name)
    for layer in (node.layer for node in net.nodes):
        message = result.layer.add()
        message.CopyFrom(layer.param)
        del message.blobs[:]
        for blob in layer.blobs:
            message.blobs.append(blob.to_proto(write_diff))
            if (array := values.get(blob.data_view.memory)) is not None:
                fill_blob(message.blobs[-1], array.reshape(blob.shape))
    return result


def save(net: Net, path: str | os.PathLike[str], write_diff: bool = False) -> None:
    """Write the net's parameters as a caffemodel, atomically."""
    write_binary(to_proto(net, write_diff), path)


# -------------------------------------------------------------------- HDF5, as Caffe writes it: /data/LAYER/INDEX


def to_hdf5(net: Net, write_diff: bool = False, values: Values = NOTHING) -> bytes:
    """The bytes of an HDF5 file of the net's parameters, and of their gradients if asked.

    A parameter that several layers share is there once, with the layer that owns it; its gradient is there with each.
    `values` are written in place of what lies in those memories.
    Raises NetError for a layer whose name HDF5 cannot hold.
    """
    return hdf5.encode(_items(net, write_diff, values))


def _items(net: Net, write_diff: bool, values: Values) -> Iterator[tuple[str, np.ndarray | None]]:
    yield "data", None
    for layer in (node.layer for node in net.nodes):
        if layer.blobs or hdf5.is_name(layer.name):
            yield f"data/{layer.name}", None
        for index, blob in enumerate(layer.blobs):
            if index not in layer.shared_params:
                array = values.get(blob.data_view.memory)
                yield f"data/{layer.name}/{index}", _as_in_files(blob.cpu_data() if array is None else array)
    for name, blobs in net.params.items() if write_diff else ():
        for index, blob in enumerate(blobs):
            yield f"diff/{name}/{index}", _as_in_files(blob.cpu_diff())


def _as_in_files(array: np.ndarray) -> np.ndarray:
    """Values as Caffe knows them: float32 for halves."""
    return array.astype(exact(array.dtype), copy=False)


def save_hdf5(net: Net, path: str | os.PathLike[str], write_diff: bool = False) -> None:
    """Write the net's parameters as an HDF5 file, atomically."""
    write_atomic(path, to_hdf5(net, write_diff))


def load_hdf5(net: Net, path: str | os.PathLike[str], unrounded: Unrounded = NOTHING) -> list[str]:
    """Copy parameters from an HDF5 file into the net's layers of the same names; returns those names.

    Gradients in the file are left, as Caffe does. Everything is checked and read before the first value is copied.
    Raises NetError naming the file and the dataset.
    """
    names: list[str] = []
    pairs: list[tuple[Blob, hdf5.Dataset]] = []
    with hdf5.File(path) as file:
        if file.members("data") is None:
            raise NetError(f"{file.path} has no group /data: it does not hold a net's parameters")
        for layer in (node.layer for node in net.nodes if node.layer.blobs):
            members = file.members(f"data/{layer.name}")
            if members is not None and _is_layer(members):
                names.append(layer.name)
                pairs += _matched(net, layer, file, members)
        values = [dataset.read(exact(blob.dtype)) for blob, dataset in pairs]
    for (blob, _), array in zip(pairs, values, strict=True):
        rounded = array.astype(blob.dtype, copy=False)
        blob.data_view.cpu_data(Intent.OVERWRITE)[...] = rounded.reshape(-1).view(np.uint8)
        if (keep := unrounded.get(blob.data_view.memory)) is not None:
            keep(array)
    return names


def _is_layer(members: dict[str, bool]) -> bool:
    """Whether a group is a layer's, and not just on the way to one with a slash in its name."""
    return not members or not all(members.values())


def _matched(net: Net, layer: Layer, file: hdf5.File, members: dict[str, bool]) -> Iterator[tuple[Blob, hdf5.Dataset]]:
    """The layer's parameters with what the file has for them; shared ones may be with their owner instead."""
    where, advice = f"{file.path}: /data/{layer.name}", "rename the layer in the prototxt to start it afresh"
    names = {name for name, is_group in members.items() if not is_group}
    expected = {str(index) for index in range(len(layer.blobs))}
    owned = {str(index) for index in range(len(layer.blobs)) if index not in layer.shared_params}
    if not owned <= names <= expected:
        raise NetError(f"{where} has parameters {sorted(names)}, {sorted(expected)} in {net.identity}; {advice}")
    for index, blob in enumerate(layer.blobs):
        if str(index) not in names:
            continue
        dataset = file.dataset(f"data/{layer.name}/{index}")
        if dataset.shape != blob.shape:
            raise NetError(f"{dataset.where} has shape {dataset.shape}, {blob.shape} in {net.identity}; {advice}")
        yield blob, dataset
