"""The classes of Caffe's messages, under the names that protoc's own module would have.

    from blobmem.proto import caffe_pb2
    net = caffe_pb2.NetParameter(name="LeNet")
    net.state.phase = caffe_pb2.TRAIN

They are made at import from `caffe.desc`, the descriptor of `proto/caffe.proto`: one file serves every protobuf
runtime from 4.21 on, whichever its implementation. The descriptor goes into a pool of its own, because a process may
hold another caffe.proto (pycaffe's, OpenCV's, a colleague's), and two that differ must not share the default pool.

Every message and enum at the top of caffe.proto is an attribute, and so is every value of such an enum (`TRAIN`,
`TEST`); nested ones are attributes of their message (`PoolingParameter.MAX`, `PoolingParameter.PoolMethod.Name(0)`).
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import enum_type_wrapper

from blobmem.proto.compat import message_class


def _load() -> tuple[Any, Any]:
    """The pool and, in it, the descriptor of caffe.proto."""
    data = pkgutil.get_data(__package__, "caffe.desc")
    if data is None:
        raise ImportError("blobmem/proto/caffe.desc is missing from this installation: reinstall blobmem")
    pool: Any = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool, pool.FindFileByName("caffe.proto")


def _export(pool: Any, file: Any) -> dict[str, Any]:
    """Name to message class, enum wrapper or enum value, for all at the top of `file`."""
    names: dict[str, Any] = {}
    for name, descriptor in file.message_types_by_name.items():
        cls = message_class(descriptor, pool)
        cls.__module__ = __name__  # by which pickle finds the class
        names[name] = cls
    for name, descriptor in file.enum_types_by_name.items():
        names[name] = enum_type_wrapper.EnumTypeWrapper(descriptor)
        names.update((value.name, value.number) for value in descriptor.values)
    return names


POOL, DESCRIPTOR = _load()
globals().update(_export(POOL, DESCRIPTOR))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
