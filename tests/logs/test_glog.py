"""Caffe's lines, of several versions."""

import math

import pytest

from blobmem.logs.reading import read_lines

CAFFE_1 = """\
Log file created at: 2017/05/23 10:11:00
I0523 10:11:10.000000  1234 caffe.cpp:217] Using GPUs 0
I0523 10:11:12.000000  1234 solver.cpp:273] Solving LeNet
I0523 10:11:12.000001  1234 solver.cpp:274] Learning Rate Policy: inv
I0523 10:11:12.500000  1234 solver.cpp:331] Iteration 0, Testing net (#0)
I0523 10:11:13.000000  1234 solver.cpp:398]     Test net output #0: accuracy = 0.0832
I0523 10:11:13.000001  1234 solver.cpp:398]     Test net output #1: loss = 2.38 (* 1 = 2.38 loss)
I0523 10:11:13.500000  1234 solver.cpp:219] Iteration 0 (-1.4013e-45 iter/s, 0.1s/100 iters), loss = 2.4
I0523 10:11:13.500001  1234 solver.cpp:238]     Train net output #0: loss = 2.41 (* 1 = 2.41 loss)
I0523 10:11:13.500002  1234 sgd_solver.cpp:105] Iteration 0, lr = 0.01
I0523 10:11:22.000000  1234 solver.cpp:219] Iteration 100 (12.3 iter/s, 8.1s/100 iters), loss = 0.5
I0523 10:11:22.000001  1234 solver.cpp:238]     Train net output #0: loss = 0.25 (* 1 = 0.25 loss)
I0523 10:11:22.000002  1234 sgd_solver.cpp:105] Iteration 100, lr = 9.9e-03
I0523 10:11:23.000000  1234 solver.cpp:449] Snapshotting to binary proto file x_iter_100.caffemodel
I0523 10:11:24.000000  1234 solver.cpp:331] Iteration 100, Testing net (#0)
I0523 10:11:25.000000  1234 solver.cpp:398]     Test net output #0: accuracy = 0.97
I0523 10:11:25.000001  1234 solver.cpp:331] Iteration 100, Testing net (#1)
I0523 10:11:26.000000  1234 solver.cpp:398]     Test net output #0: accuracy = 0.9
I0523 10:11:26.000001  1234 solver.cpp:316] Optimization Done.
"""


def rows(lines):
    log = read_lines(lines.splitlines(keepends=True), "x")
    return [(r.iteration, r.values) for r in log.train], [(r.iteration, r.net, r.values) for r in log.test]


def test_caffe_1():
    train, test = rows(CAFFE_1)
    assert train == [
        (0, {"seconds": 1.5, "loss": 2.4, "output_loss": 2.41, "lr": 0.01}),
        (100, {"seconds": 10, "loss": 0.5, "output_loss": 0.25, "lr": 0.0099}),
    ]
    assert test == [
        (0, 0, {"seconds": 0.5, "accuracy": 0.0832, "loss": 2.38}),
        (100, 0, {"seconds": 12, "accuracy": 0.97}),
        (100, 1, {"seconds": 13.000001, "accuracy": 0.9}),
    ]


def test_older_lines():
    train, test = rows("""\
I0101 00:00:00.000000 77 solver.cpp:40] Starting Optimization
I0101 00:00:01.000000 77 sgd_solver.cpp:9] Iteration 20, lr = 0.1
I0101 00:00:02.000000 77 solver.cpp:87] Iteration 20, loss = 1.5
I0101 00:00:03.000000 77 solver.cpp:106] Iteration 20, Testing net
I0101 00:00:03.500000 77 solver.cpp:106] Iteration 20, Testing net (#0)
I0101 00:00:04.000000 77 solver.cpp:142] Test score #0: 0.75
I0101 00:00:04.000000 77 solver.cpp:142] Test score #1: 1.25
""")
    assert train == [(20, {"seconds": 1, "lr": 0.1, "loss": 1.5})]
    assert test == [(20, 0, {"seconds": 3.5, "score0": 0.75, "score1": 1.25})]


def test_an_output_of_several_values():
    _, test = rows("""\
I0101 00:00:00.000000 77 solver.cpp:331] Iteration 0, Testing net (#0)
I0101 00:00:00.000000 77 solver.cpp:398]     Test net output #0: per_class = 0.1
I0101 00:00:00.000000 77 solver.cpp:398]     Test net output #1: per_class = 0.2
I0101 00:00:00.000000 77 solver.cpp:398]     Test net output #2: per_class = 0.3
I0101 00:00:00.000000 77 solver.cpp:398]     Test net output #3: loss = 3
""")
    expected = {"seconds": 0.0, "per_class[0]": 0.1, "per_class[1]": 0.2, "per_class[2]": 0.3, "loss": 3}
    assert test == [(0, 0, expected)]


def test_lines_without_stamps():
    train, _ = rows("Iteration 100, loss = 0.5\nIteration 100, lr = 0.01\n")
    assert train == [(100, {"loss": 0.5, "lr": 0.01})]


@pytest.mark.parametrize(
    ("text", "value"),
    [("nan", math.nan), ("-nan", math.nan), ("inf", math.inf), ("1e-05", 1e-5), ("87.3365", 87.3365), ("0", 0.0)],
    ids=["nan", "minus-nan", "inf", "power", "plain", "zero"],
)
def test_numbers_as_c_prints_them(text, value):
    train, _ = rows(f"Iteration 3, loss = {text}\n")
    assert train[0][1]["loss"] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    ["Iteration 3, loss = 1.#QNAN", "Iteration 3, loss = ", "Iteration x, loss = 1", "loss = 1", "Test net output #0: a = 1",
     "E0101 00:00:00.000000 7 net.cpp:1] cannot read", "\x00\x01\x02", "I9999 00:00:00.000000 7 a.cpp:1] x"],
    ids=["windows", "cut", "number", "alone", "no-test", "error", "bytes", "no-date"],
)  # fmt: skip
def test_lines_that_say_nothing(line):
    assert rows(line + "\n") == ([], [])


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("0523 23:59:59.000000", "0524 00:00:01.000000", 2),
        ("1231 23:59:59.000000", "0101 00:00:01.000000", 2),
        ("1231 00:00:00.000000", "0305 00:00:00.000000", 64 * 86400),
        ("0228 12:00:00.000000", "0301 12:00:00.000000", 86400),
        ("0228 12:00:00.000000", "0229 12:00:00.000000", 86400),
        ("0229 12:00:00.000000", "0301 12:00:00.000000", 86400),
        ("0523 10:00:00.000002", "0523 10:00:00.000001", -1e-6),
        ("20240228 12:00:00.000000", "20240301 12:00:00.000000", 2 * 86400),
        ("20230228 12:00:00.000000", "20230301 12:00:00.000000", 86400),
        ("20231231 23:59:59.000000", "20240101 00:00:00.500000", 1.5),
    ],
    ids=["midnight", "new-year", "over-new-year", "march", "leap-eve", "leap-day", "threads", "leap-year", "plain-year", "years"],
)  # fmt: skip
def test_time_goes_on_over_days_and_years(first, second, seconds):
    train, _ = rows(f"I{first} 7 s.cpp:1] Solving x\nI{second} 7 s.cpp:1] Iteration 5, loss = 1\n")
    assert train == [(5, {"loss": 1.0, "seconds": pytest.approx(seconds)})]


def test_a_run_that_goes_on_replaces_what_came_after_its_snapshot():
    train, test = rows("""\
I0101 00:00:00.000000 7 s.cpp:1] Solving x
I0101 00:00:10.000000 7 s.cpp:1] Iteration 0, loss = 3
I0101 00:00:20.000000 7 s.cpp:1] Iteration 10, loss = 2
I0101 00:00:21.000000 7 s.cpp:1] Iteration 10, Testing net (#0)
I0101 00:00:21.000000 7 s.cpp:1] Test net output #0: accuracy = 0.1
I0101 00:00:30.000000 7 s.cpp:1] Iteration 20, loss = 9
I0101 00:00:31.000000 7 s.cpp:1] Iteration 20, Testing net (#0)
I0101 00:00:31.000000 7 s.cpp:1] Test net output #0: accuracy = 0.2
I0102 00:00:00.000000 7 s.cpp:1] Solving x
I0102 00:00:05.000000 7 s.cpp:1] Iteration 15, loss = 1.5
I0102 00:00:10.000000 7 s.cpp:1] Iteration 20, loss = 1
""")
    assert train == [
        (0, {"loss": 3, "seconds": 10}),
        (10, {"loss": 2, "seconds": 20}),
        (15, {"loss": 1.5, "seconds": 25}),
        (20, {"loss": 1, "seconds": 30}),
    ]
    assert [row[:2] for row in test] == [(10, 0)]
