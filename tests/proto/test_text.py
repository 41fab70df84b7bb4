"""Files of nets, solvers and models: reading, writing, and what is said of a wrong one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, text_format

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2, text
from blobmem.proto.compat import message_class

NET = 'name: "n"\nlayer { name: "a" type: "ReLU" bottom: "x" top: "y" }\n'


def refuse(call, *args) -> str:
    with pytest.raises(NetError) as caught:
        call(*args)
    return str(caught.value)


def weights() -> object:
    net = text.read_net(NET)
    net.layer[0].blobs.add(data=[1, 2, 3]).shape.dim.append(3)
    return net


def test_read_net_from_file_path_text_and_message(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    expected = text_format.Parse(NET, caffe_pb2.NetParameter())
    assert text.read_net(path) == text.read_net(str(path)) == text.read_net(NET) == expected
    copied = text.read_net(expected)
    assert copied == expected and copied is not expected
    assert text.read_net('name: "n"').name == "n"
    assert text.read_net('# one line only\nlayer{name:"a"}').layer[0].name == "a"


def test_a_file_named_like_a_text_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net:v1").write_text(NET)
    assert text.read_net("net:v1").name == "n"


def test_read_net_upgrades_and_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.prototxt"
    path.write_text('layers { name: "a" type: RELU }')
    with caplog.at_level(logging.INFO):
        net = text.read_net(path)
    assert net.layer[0].type == "ReLU"
    assert caplog.messages == [f"{path}: upgraded 1 V1 layer"]
    assert caplog.records[0].levelno == logging.INFO
    caplog.clear()
    text.read_net('layers { layer { name: "a" type: "relu" pad: 1 } }')
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    text.read_net(NET)
    assert not caplog.records


def test_read_net_leaves_a_message_alone() -> None:
    old = text_format.Parse('layers { name: "a" type: RELU }', caffe_pb2.NetParameter())
    assert text.read_net(old).layer[0].type == "ReLU"
    assert old.layers[0].name == "a" and not old.layer


def test_read_net_takes_messages_of_another_caffe_proto() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="other.proto", package="caffe", syntax="proto2")
    file.message_type.add(name="NetParameter").field.add(name="name", number=1, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    foreign = message_class(pool.FindMessageTypeByName("caffe.NetParameter"), pool)(name="foreign")
    net = text.read_net(foreign)
    assert type(net) is caffe_pb2.NetParameter and net.name == "foreign"
    assert "expected a NetParameter, got a Datum" in refuse(text.read_net, caffe_pb2.Datum())
    with pytest.raises(TypeError, match="expected a path, a text or a NetParameter, got int"):
        text.read_net(3)


def test_read_solver(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text('net: "dir/../net.prototxt"\nsolver_type: ADAM\n')
    solver = text.read_solver(path)
    assert solver.type == "Adam" and not solver.HasField("solver_type")
    assert solver.net == "dir/../net.prototxt", "paths inside stay as they are"
    assert "both solver_type and type" in refuse(text.read_solver, 'solver_type: SGD\ntype: "SGD"')


def test_errors_name_file_line_column_layer_and_field(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(NET + 'layer {\n  name: "b"\n  convolution_param { kernal_size: 3 }\n}\n')
    assert refuse(text.read_net, path) == (
        f"{path}:5:23: layer 'b', convolution_param: unknown field 'kernal_size' in ConvolutionParameter; "
        f"did you mean 'kernel_size' or 'kernel_w' or 'kernel_h'?"
    )
    assert refuse(text.read_net, "layer {\n top: 3 }").startswith("<text>:2:7: unnamed layer 1: top is '3'")


def test_what_only_protobuf_refuses_still_has_a_place() -> None:
    said = refuse(text.read_net, 'layer {\n  name: "b"\n  bottom: "\\377"\n}')
    assert said.startswith("<text>:4:1: layer 'b': Couldn't parse string")


def test_a_missing_required_field() -> None:
    said = refuse(text.read_net, 'layer {\n name: "c"\n clip_param { min: 1 }\n}')
    assert said.startswith("<text>:3:22: layer 'c', clip_param: 'max' is missing")


def test_upgrade_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text('input: "a"')
    assert refuse(text.read_net, path).startswith(f"{path}: 1 input (a) but 0 input_dim: give four for each")


def test_missing_files_and_near_names(tmp_path: Path) -> None:
    (tmp_path / "train.prototxt").write_text(NET)
    assert f"did you mean {tmp_path / 'train.prototxt'}?" in refuse(text.read_net, tmp_path / "tarin.prototxt")
    assert "nor a folder" in refuse(text.read_net, tmp_path / "none" / "x.prototxt")
    assert "relative paths start at" in refuse(text.read_net_binary, "no-such-thing-here.caffemodel")
    assert "is a folder" in refuse(text.read_net, tmp_path)
    assert "empty" in refuse(text.read_net, " ")
    assert "null" in refuse(text.read_net, "a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    path.chmod(0)
    assert "cannot be read: Permission denied" in refuse(text.read_net, path)


def test_binary_where_text_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    text.write_binary(weights(), path)
    assert "is a binary file" in refuse(text.read_net, path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(8))
    assert "is an HDF5 file" in refuse(text.read_net, path)
    assert "is an HDF5 file" in refuse(text.read_net_binary, path)
    path.write_bytes(b"")
    assert "is empty" in refuse(text.read_net, path)
    assert "is empty" in refuse(text.read_net_binary, path)


def test_text_where_binary_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    for content in (NET, "# a comment\n\n  " + NET, "<!DOCTYPE html>\n<html>not found</html>"):
        path.write_text(content)
        assert "is a text file" in refuse(text.read_net_binary, path)


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes(b"\xef\xbb\xbf" + NET.encode())
    assert text.read_net(path).name == "n", "a byte order mark is skipped"
    path.write_bytes(NET.replace("\n", "\r\n").encode() + b"# caf\xe9\r\n")
    assert text.read_net(path).name == "n", "comments may be in any encoding"
    path.write_bytes(b'name: "n"\nlayer { name: "caf\xe9" }')
    assert refuse(text.read_net, path).startswith(f"{path}:2:15: this text is not UTF-8")
    path.write_text(NET, encoding="utf-16")
    assert "UTF-16" in refuse(text.read_net, path)
    path.write_text('name: "\u7f51\u7edc"', encoding="utf-8")
    assert text.read_net(path).name == "\u7f51\u7edc"


def test_binary_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    net = weights()
    text.write_binary(net, path)
    assert text.read_net_binary(path) == net
    assert text.read_binary(path, caffe_pb2.NetParameter) == net
    old = text_format.Parse('layers { name: "a" type: RELU }', caffe_pb2.NetParameter())
    text.write_binary(old, path)
    assert text.read_net_binary(path).layer[0].type == "ReLU"
    assert text.read_binary(path, caffe_pb2.NetParameter).layers[0].name == "a", "read_binary upgrades nothing"


def test_truncated_and_foreign_binary_files(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    data = weights().SerializeToString()  # type: ignore[attr-defined]
    path.write_bytes(data[:-5])
    assert f"cut short or damaged ({len(data) - 5} bytes)" in refuse(text.read_net_binary, path)
    path.write_bytes(data)
    assert "it looks like a net (caffemodel)" in refuse(text.read_binary, path, caffe_pb2.SolverState)
    state = caffe_pb2.SolverState(iter=3, learned_net="/some/where.caffemodel")
    path.write_bytes(state.SerializeToString())
    assert "it looks like a solver's state (solverstate)" in refuse(text.read_net_binary, path)
    path.write_bytes(caffe_pb2.BlobProto(num=1, channels=1, height=1, width=1, data=[1]).SerializeToString())
    assert "it looks like a single array (binaryproto)" in refuse(text.read_net_binary, path)
    path.write_bytes(bytes(range(256)))
    assert "is not a NetParameter" in refuse(text.read_net_binary, path)
    path.write_bytes(caffe_pb2.NetParameter(layer=[{"clip_param": {"min": 1}}]).SerializePartialToString())
    assert "lacks layer[0].clip_param.max" in refuse(text.read_net_binary, path)


def test_files_beyond_the_cap_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(2**31)
    assert "is larger than 2048 MiB" in refuse(text.read_net_binary, path)
    assert "is larger than 64 MiB" in refuse(text.read_net, path)


def test_text_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    net = weights()
    net.name = "caf\u00e9"  # type: ignore[attr-defined]
    net.layer[0].blobs[0].data[0] = 0.1  # type: ignore[attr-defined]
    text.write_text(net, path)
    assert text.read_net(path) == net
    assert "caf\u00e9" in path.read_text(encoding="utf-8")


def test_an_incomplete_message_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    assert "cannot be written" in refuse(
        text.write_binary, caffe_pb2.NetParameter(layer=[{"clip_param": {"min": 1}}]), path
    )
    assert os.listdir(tmp_path) == []
