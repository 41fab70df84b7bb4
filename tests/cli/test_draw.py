import sys
from pathlib import Path

import pytest

pytest.importorskip("pydot")

MODELS = Path(__file__).parents[2] / "models"


def test_without_a_file_the_text_is_printed(blobmem, tiny):
    result = blobmem("draw", tiny.net)
    assert result.code == 0 and not result.err
    assert result.out.startswith("digraph") and "rankdir=LR" in result.out
    assert r'"ip_InnerProduct" -> "ip_blob" [label="8x3\n96 bytes"]' in result.out


def test_a_dot_file_needs_no_graphviz(blobmem, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    target = tiny.folder / "net.dot"
    result = blobmem("draw", "--phase", "TEST", "--batch", 2, "--rankdir", "TB", tiny.net, target)
    assert result.code == 0, result.err
    text = target.read_text()
    assert r"2x3\n24 bytes" in text and "rankdir=TB" in text
    assert result.events("draw") == [{"event": "draw", "path": str(target), "bytes": str(target.stat().st_size)}]


def test_without_pygraphviz_a_picture_is_refused_and_says_what_to_do(blobmem, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    target = tiny.folder / "net.svg"
    result = blobmem("draw", tiny.net, target)
    assert result.code == 1 and "pip install 'blobmem[draw]'" in result.err and ".dot" in result.err
    assert not target.exists()


def test_a_picture(blobmem, tiny):
    pytest.importorskip("pygraphviz")
    target = tiny.folder / "net.svg"
    assert blobmem("draw", tiny.net, target).code == 0
    assert b"<svg" in target.read_bytes() and b"96 bytes" in target.read_bytes()


def test_without_pydot(blobmem, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydot", None)
    result = blobmem("draw", tiny.net)
    assert (result.code, result.out) == (1, "")
    assert "pip install 'blobmem[draw]'" in result.err


def test_a_name_without_a_format(blobmem, tiny):
    result = blobmem("draw", tiny.net, tiny.folder / "net")
    assert result.code == 1 and "ends with a format" in result.err


def test_a_shape_that_no_file_states(blobmem, data_net):
    result = blobmem("draw", data_net)
    assert result.code == 1 and "--input-shape data=" in result.err
    assert "4x1x5x5" in blobmem("draw", data_net, "--input-shape", "data=1x5x5").out


def test_a_net_of_many_layers_is_drawn_without_a_remark(blobmem):
    result = blobmem("draw", MODELS / "resnet50" / "train_val.prototxt", "--phase", "TEST")
    assert result.code == 0 and not result.err
    assert r'"bn_conv1_BatchNorm" -> "conv1_blob" [label="25x64x112x112\n76.6 MiB"]' in result.out
