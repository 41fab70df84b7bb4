"""The events of `blobmem train`, put together to a log."""

import pytest

from blobmem.errors import NetError
from blobmem.logs.reading import read_lines, read_log

EVENTS = """\
event=start solver=s.prototxt net=tiny parameters=21 batch=8 device=cpu iteration=0 max_iter=8
event=share test_net=0 shared=3 not_shared=label
event=test iteration=0 test_net=0 accuracy=0.1 loss=2.3
event=train iteration=0 loss=2.5 lr=0.1 seconds=1 waited=0.5 output_loss=2.6
a line of somebody else
event=test iteration=4 test_net=0 accuracy=0.8 loss=1.3
event=test iteration=4 test_net=1 accuracy=0.7 loss=1.4 "mean(x)"=3
event=train iteration=4 loss=nan lr=0.1 seconds=2 waited=0.75 output_mean(x)=4
event=snapshot iteration=4 caffemodel="a b.caffemodel" solverstate=s
event=done iteration=8 iterations=8 seconds=3 loss=1
"""


def read(text):
    return read_lines(text.splitlines(keepends=True), "x")


def test_rows():
    log = read(EVENTS)
    assert [(row.iteration, row.net) for row in log.train] == [(0, None), (4, None)]
    assert log.train[0].values == {"loss": 2.5, "lr": 0.1, "seconds": 1, "waited": 0.5, "output_loss": 2.6}
    assert log.train[1].values["output_mean(x)"] == 4
    assert [(row.iteration, row.net) for row in log.test] == [(0, 0), (4, 0), (4, 1)]
    assert log.test[1].values == {"accuracy": 0.8, "loss": 1.3}


def test_series_with_last_and_best():
    series = {one.title: one for one in read(EVENTS).series()}
    assert list(series)[:2] == ["train loss", "train lr"]
    assert series["train loss"].best == (0, 2.5), "NaN is never best"
    assert series["train loss"].last[0] == 4
    assert series["train lr"].best is series["train seconds"].best is series["train output mean(x)"].best is None
    assert series["test 0 accuracy"].best == series["test 0 accuracy"].last == (4, 0.8)
    assert series["test 0 loss"].best == (4, 1.3)
    assert series["test 1 accuracy"].points == [(4, 0.7)]


@pytest.mark.parametrize(
    ("name", "direction"),
    [("accuracy", 1), ("top-5", 1), ("mAP", 1), ("acc/top1", 1), ("loss3/top-5", 1), ("loss3/loss3", -1), ("accuracy/x", 1), ("loss", -1), ("error_rate", -1),
     ("mapped", 0), ("score0", 0), ("lr", 0)],
)  # fmt: skip
def test_which_way_is_better(name, direction):
    (series,) = read(f"event=test iteration=1 test_net=0 {name}=1\n").series()
    assert series.direction == direction


def test_a_resumed_run_replaces_what_came_later_and_its_time_adds_up():
    log = read(EVENTS + "event=start iteration=2\nevent=train iteration=2 loss=2 seconds=1 waited=0.25\n")
    assert [(row.iteration, row.values["seconds"]) for row in log.train] == [(0, 1), (2, 2)]
    assert log.train[1].values["waited"] == 0.75
    assert [row.iteration for row in log.test] == [0]


def test_another_training_in_the_same_file_replaces_the_first():
    log = read(EVENTS + EVENTS.replace("loss=2.5", "loss=7"))
    assert [(row.iteration, row.values["seconds"]) for row in log.train] == [(0, 1), (4, 2)]
    assert log.train[0].values["loss"] == 7
    assert [(row.iteration, row.net) for row in log.test] == [(0, 0), (4, 0), (4, 1)]


def test_a_report_of_the_same_iteration_replaces_it():
    log = read("event=train iteration=3 loss=1\nevent=train iteration=3 loss=2\n")
    assert [row.values["loss"] for row in log.train] == [2]


def test_quoted_values():
    log = read(r'event=train note="a \"b\" loss=9" iteration=1 loss=3' + "\n")
    assert log.train[0].values == {"loss": 3}


@pytest.mark.parametrize(
    "line",
    ["event=train", "event=train iteration=5", "event=train iteration=x loss=1", "event=test iteration=1 accuracy=1",
     "event=done iteration=8 loss=1", "event=", "noise"],
    ids=["bare", "empty", "number", "no-net", "done", "nothing", "noise"],
)  # fmt: skip
def test_lines_that_say_nothing(line):
    assert not read(line + "\n")


def test_files(tmp_path):
    path = tmp_path / "train.log"
    path.write_bytes(EVENTS.encode() + b"\xff\xfe not UTF-8\n")
    assert len(read_log(path).train) == 2 and read_log(path).name == str(path)
    path.write_text("nothing\n")
    with pytest.raises(NetError, match=r"train.log has no line of a training run"):
        read_log(path)
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "absent")
