"""proto/caffe.proto and what is generated from it, against tests/data/schema.tsv (facts of Caffe's format)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from blobmem.proto import caffe_pb2

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "tests" / "data" / "schema.tsv"
COMMUNITY = ROOT / "tests" / "data" / "community.tsv"  # fields of forks, as we number them
Row = tuple[str, ...]


def expected_rows() -> list[Row]:
    rows = []
    for line in SCHEMA.read_text().splitlines() + COMMUNITY.read_text().splitlines():
        if line and not line.startswith("#"):
            cells = line.split("\t")
            rows.append(tuple(cells + [""] * (8 - len(cells))))
    return rows


def default_of(field: Any, proto: Any) -> str:
    if not proto.HasField("default_value"):
        return ""
    if field.enum_type is not None:
        return field.enum_type.values_by_number[field.default_value].name
    if proto.type == descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT:
        # protobuf's pure Python runtime does not round defaults to what a float holds; the others do.
        return repr(float(np.float32(field.default_value)))
    return repr(field.default_value)


def field_row(owner: str, field: Any, proto: Any) -> Row:
    kinds = descriptor_pb2.FieldDescriptorProto
    label = kinds.Label.Name(proto.label).removeprefix("LABEL_").lower()
    named = proto.type in (kinds.TYPE_MESSAGE, kinds.TYPE_ENUM)
    kind = proto.type_name.removeprefix(".") if named else kinds.Type.Name(proto.type).removeprefix("TYPE_").lower()
    packed = "packed" if proto.options.packed else ""
    return ("field", owner, field.name, str(field.number), label, kind, default_of(field, proto), packed)


def enum_rows(owner: str, descriptor: Any) -> list[Row]:
    return [("enum", owner, value.name, str(value.number), "", "", "", "") for value in descriptor.values]


def actual_rows() -> list[Row]:
    file = caffe_pb2.DESCRIPTOR
    protos = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
    rows: list[Row] = []
    for name, descriptor in file.enum_types_by_name.items():
        rows += enum_rows(name, descriptor)
    for message in protos.message_type:
        descriptor = file.message_types_by_name[message.name]
        assert not message.nested_type and not message.extension and not message.oneof_decl
        for name, nested in descriptor.enum_types_by_name.items():
            rows += enum_rows(f"{message.name}.{name}", nested)
        for proto in message.field:
            rows.append(field_row(message.name, descriptor.fields_by_name[proto.name], proto))
    return rows


def test_every_field_and_enum_value_is_caffes() -> None:
    expected, actual = set(expected_rows()), set(actual_rows())
    assert len(expected) > 500
    assert expected - actual == set(), "in schema.tsv, not in caffe.proto"
    assert actual - expected == set(), "in caffe.proto, not in schema.tsv"
    assert len(expected_rows()) == len(actual_rows())


def test_the_package_is_caffe_in_proto2() -> None:
    file = descriptor_pb2.FileDescriptorProto.FromString(caffe_pb2.DESCRIPTOR.serialized_pb)
    assert file.package == "caffe"
    assert file.syntax in ("", "proto2")


def test_the_descriptor_is_that_of_the_proto_file() -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools to compile caffe.proto")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    fresh = descriptor_pb2.FileDescriptorSet.FromString(generate.compile_descriptor())
    shipped = descriptor_pb2.FileDescriptorSet.FromString(generate.TARGET.read_bytes())
    assert fresh == shipped, "run python proto/generate.py"


def test_a_default_is_changed_by_nothing_but_the_tsv() -> None:
    """Spot checks by hand, independent of how both sides are read above."""
    solver = caffe_pb2.SolverParameter()
    assert solver.type == "SGD" and solver.random_seed == -1 and solver.test_initialization
    assert solver.momentum2 == pytest.approx(0.999) and solver.delta == pytest.approx(1e-8)
    assert caffe_pb2.NetState().phase == caffe_pb2.TEST
    assert caffe_pb2.LayerParameter.DESCRIPTOR.fields_by_name["convolution_param"].number == 106
