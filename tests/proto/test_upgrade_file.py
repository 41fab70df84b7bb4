"""Files in old formats, written in today's: what they are is told by what is in them."""

import pytest

from blobmem.errors import NetError
from blobmem.proto import caffe_pb2
from blobmem.proto.text import parse_text, read_binary, read_net, read_solver, write_binary
from blobmem.proto.upgrade_file import upgrade_file

V1 = """# an old net
name: "old"
layers { name: "ip" type: INNER_PRODUCT bottom: "x" top: "y" blobs_lr: 1 inner_product_param { num_output: 2 } }
"""
SOLVER = 'net: "a.prototxt"\nbase_lr: 0.1 # of the paper\nsolver_type: ADAM\n'


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in", tmp_path / "out"


def test_a_net_in_text(files):
    source, target = files
    source.write_text(V1)
    result = upgrade_file(source, target)
    assert (result.kind, result.binary, result.done.steps) == ("net", False, ["1 V1 layer"])
    assert read_net(target) == read_net(source)
    assert "layers" not in target.read_text() and source.read_text() == V1


def test_a_solver_in_text(files):
    source, target = files
    source.write_text(SOLVER)
    result = upgrade_file(source, target)
    assert (result.kind, result.done.steps) == ("solver", ['solver_type ADAM to type "Adam"'])
    assert 'type: "Adam"' in target.read_text() and "solver_type" not in target.read_text()
    assert read_solver(target) == read_solver(source)


def test_a_solver_with_its_net_inside(files):
    source, target = files
    source.write_text(f"base_lr: 1 max_iter: 3 snapshot_format: HDF5 net_param {{ {V1} }}")
    result = upgrade_file(source, target)
    assert (result.kind, result.done.steps) == ("solver", ["1 V1 layer"])
    assert read_solver(target).net_param.layer[0].type == "InnerProduct"


def test_a_net_in_binary_keeps_its_values(files):
    source, target = files
    net = parse_text(V1, caffe_pb2.NetParameter)
    net.layers[0].blobs.add(num=1, channels=1, height=2, width=3, data=[1, 2, 3, 4, 5, 6])
    write_binary(net, source)
    result = upgrade_file(source, target)
    assert (result.kind, result.binary) == ("net", True)
    written = read_binary(target, caffe_pb2.NetParameter)
    assert not written.layers and list(written.layer[0].blobs[0].data) == [1, 2, 3, 4, 5, 6]


def test_a_solver_in_binary(files):
    source, target = files
    write_binary(parse_text(SOLVER, caffe_pb2.SolverParameter), source)
    result = upgrade_file(source, target)
    assert (result.kind, result.binary) == ("solver", True)
    assert read_binary(target, caffe_pb2.SolverParameter).type == "Adam"


@pytest.mark.parametrize("text", ['name: "x" # kept\n', 'type: "Adam" # kept\nbase_lr: 1\n'], ids=["net", "solver"])
def test_what_is_up_to_date_is_copied_byte_for_byte(files, text):
    source, target = files
    source.write_text(text)
    assert not upgrade_file(source, target).done
    assert target.read_text() == text


def test_what_has_no_effect_is_told(files):
    source, target = files
    source.write_text('layer { name: "d" type: "Data" top: "x" data_param { source: "db" scale: 0.5 } }')
    done = upgrade_file(source, target).done
    assert not done.steps and len(done.ignored) == 1 and "scale of data layer 'd'" in done.ignored[0]


def test_a_file_may_be_upgraded_in_its_place(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(V1)
    assert upgrade_file(path, path).done.steps
    assert not upgrade_file(path, path).done.steps


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b'name: "x" layers { kind: 1 }', "in:1:20: "),
        (b"net: 5", "in:1:6: "),
        (b'type: "SGD" solver_type: ADAM base_lr: 1', "both solver_type and type"),
        (b"\x00\x01\x02 junk", "is not a NetParameter"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "is an HDF5 file"),
        (b'layers { type: RELU } layer { type: "ReLU" }', "1 V1 layer"),
        (
            caffe_pb2.SolverState(
                iter=5, learned_net="x", history=[caffe_pb2.BlobProto(data=[1, 2])]
            ).SerializeToString(),
            "solver's state",
        ),
    ],
    ids=["empty", "net", "solver", "contradiction", "junk", "hdf5", "mixed", "state"],
)
def test_what_cannot_be_read_leaves_the_target_alone(files, data, message):
    source, target = files
    source.write_bytes(data)
    target.write_text("as it was")
    with pytest.raises(NetError, match=message):
        upgrade_file(source, target)
    assert target.read_text() == "as it was"


def test_missing_files(files):
    source, target = files
    with pytest.raises(NetError, match="there is no file"):
        upgrade_file(source, target)
    source.write_text(V1)
    with pytest.raises(NetError, match="create the folder"):
        upgrade_file(source, target / "deeper")
