import sys

import pytest

LOG = """\
event=train iteration=0 loss=2.5 lr=0.1 seconds=1
event=test iteration=0 test_net=0 accuracy=0.75
event=train iteration=4 loss=3 lr=0.1 seconds=2
event=test iteration=4 test_net=0 accuracy=0.5
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(LOG)
    return path


def test_last_and_best(blobmem, log):
    result = blobmem("parse-log", log)
    assert result.code == 0 and not result.err
    lines = result.out.splitlines()
    assert lines[0] == str(log)
    assert [line.split() for line in lines[4:]] == [
        ["train", "loss", "2", "3", "4", "2.5", "0"],
        ["train", "lr", "2", "0.1", "4"],
        ["train", "seconds", "2", "2", "4"],
        ["test", "0", "accuracy", "2", "0.5", "4", "0.75", "0"],
    ]


def test_tables(blobmem, log, tmp_path):
    result = blobmem("parse-log", log, "--csv", tmp_path / "run")
    assert result.code == 0
    assert [event["path"] for event in result.events("csv")] == [
        f"{tmp_path}/run.train.csv",
        f"{tmp_path}/run.test.csv",
    ]
    assert (tmp_path / "run.test.csv").read_text() == "iteration,test_net,accuracy\n0,0,0.75\n4,0,0.5\n"


def test_curves(blobmem, log, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "curves.svg"
    result = blobmem("parse-log", log, log, "--plot", target)
    assert result.code == 0 and result.events("plot") == [{"event": "plot", "path": str(target)}]
    assert b"<svg" in target.read_bytes()


def test_without_matplotlib(blobmem, log, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    result = blobmem("parse-log", log, "--plot", tmp_path / "curves.png")
    assert result.code == 1 and "pip install 'blobmem[plot]'" in result.err


def test_a_log_with_nothing_in_it(blobmem, log, tmp_path):
    empty = tmp_path / "empty.log"
    empty.write_text("x\n")
    result = blobmem("parse-log", log, empty, "--csv", tmp_path / "run")
    assert result.code == 1 and "empty.log has no line of a training run" in result.err
    assert not (tmp_path / "run.train.csv").exists()
    result = blobmem("parse-log", tmp_path / "absent.log")
    assert result.code == 1 and "absent.log: No such file" in result.err


@pytest.mark.parametrize("way", ["log", "pipe"])
def test_what_train_writes_is_read(blobmem, tiny, way):
    path = tiny.folder / "train.log"
    done = blobmem("train", "--solver", tiny.solver, *(["--log", path] if way == "log" else []))
    assert done.code == 0, done.err
    if way == "pipe":
        path.write_text(done.out)
    result = blobmem("parse-log", path, "--csv", tiny.folder / "run")
    assert result.code == 0, result.err
    train = (tiny.folder / "run.train.csv").read_text().splitlines()
    assert train[0].startswith("iteration,seconds,loss,lr,waited") and [row.split(",")[0] for row in train[1:5]] == [
        event["iteration"] for event in done.events("train")[:4]
    ]
    test = (tiny.folder / "run.test.csv").read_text().splitlines()
    assert test[0] == "iteration,test_net,loss" and [row.split(",")[:2] for row in test[1:]] == [
        ["0", "0"],
        ["4", "0"],
        ["8", "0"],
    ]
