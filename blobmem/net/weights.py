"""A net's parameters in files and in other nets, by layer name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from blobmem.errors import NetError
from blobmem.memory.blob import Blob
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_shape, has_values, shape_matches
from blobmem.proto.text import read_net_binary, write_binary

if TYPE_CHECKING:
    from blobmem.net.net import Net


def share_params(params: dict[str, list[Blob]], other: dict[str, list[Blob]]) -> set[str]:
    """Put parameters into the memory of another net's, by layer name; returns the names.

    Raises NetError if numbers or shapes differ.
    """
    shared = set()
    for name, blobs in params.items():
        sources = other.get(name)
        if sources is None:
            continue
        if [blob.shape for blob in blobs] != [blob.shape for blob in sources]:
            raise NetError(
                f"layer '{name}' cannot share parameters: shapes {[blob.shape for blob in blobs]} here, "
                f"{[blob.shape for blob in sources]} in the other net"
            )
        for blob, source in zip(blobs, sources, strict=True):
            blob.share_data(source)
            blob.share_diff(source)
        shared.add(name)
    return shared


def load(net: Net, weights: Any) -> list[str]:
    """Copy parameters from a caffemodel or a NetParameter into the net's layers of the same names; returns those names.

    Everything is checked before the first value is copied. Raises NetError.
    """
    source = os.fspath(weights) if isinstance(weights, str | os.PathLike) else "the net given"
    param = read_net_binary(weights) if isinstance(weights, str | os.PathLike) else weights
    pairs = [(layer, net.params[layer.name]) for layer in param.layer if layer.blobs and layer.name in net.params]
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
    return [layer.name for layer, _ in pairs]


def to_proto(net: Net, write_diff: bool = False) -> Any:
    """The net's NetParameter, with parameters in it."""
    result = caffe_pb2.NetParameter(name=net.name)
    for layer in net.layers:
        message = result.layer.add()
        message.CopyFrom(layer.param)
        del message.blobs[:]
        for blob in layer.blobs:
            message.blobs.append(blob.to_proto(write_diff))
    return result


def save(net: Net, path: str | os.PathLike[str], write_diff: bool = False) -> None:
    """Write the net's parameters as a caffemodel, atomically."""
    write_binary(to_proto(net, write_diff), path)
