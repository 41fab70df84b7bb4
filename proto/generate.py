"""Writes `blobmem/proto/caffe.desc` from `proto/caffe.proto`; run it after every edit of the latter.

    pip install grpcio-tools
    python proto/generate.py

The result is a serialized FileDescriptorSet and not Python code: code that protoc generates runs only on the protobuf
releases near its own, a descriptor on all of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "blobmem" / "proto" / "caffe.desc"


def compile_descriptor() -> bytes:
    """The serialized FileDescriptorSet of caffe.proto. RuntimeError if protoc does not accept it."""
    from grpc_tools import protoc  # type: ignore[import-untyped, import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "caffe.desc"
        status = protoc.main(["protoc", f"--proto_path={HERE}", f"--descriptor_set_out={out}", "caffe.proto"])
        if status != 0:
            raise RuntimeError("protoc rejected proto/caffe.proto; its complaint is above")
        return out.read_bytes()


if __name__ == "__main__":
    TARGET.write_bytes(compile_descriptor())
    sys.stdout.write(f"wrote {TARGET}\n")
