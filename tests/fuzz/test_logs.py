"""Damaged logs of training, ours and Caffe's."""

import pytest
from mutations import damage_bytes, damage_text
from strangers import fuzz, success_or_error

from blobmem.logs.reading import read_lines, read_log

LOG = """event=start iteration=0
event=train iteration=10 loss=0.5 lr=0.1 out="a b"
event=test iteration=10 test_net=0 accuracy=0.25
I0101 00:00:01.000000 12 solver.cpp:279] Solving LeNet
I0101 00:00:02.000000 12 solver.cpp:337] Iteration 0, Testing net (#0)
I0101 00:00:03.000000 12 solver.cpp:404]     Test net output #0: accuracy = 0.1
I0101 00:00:03.000000 12 solver.cpp:404]     Test net output #1: accuracy = 0.2
I0101 00:00:04.000000 12 solver.cpp:228] Iteration 0, loss = 2.3
I0101 00:00:04.000000 12 solver.cpp:244]     Train net output #0: loss = 2.3 (* 1 = 2.3 loss)
I0101 00:00:04.000000 12 sgd_solver.cpp:106] Iteration 0, lr = 0.01
"""


@fuzz(200)
def test_logs(chance, tmp_path):
    path = tmp_path / "log"
    if chance.random() < 0.8:
        path.write_text(damage_text(LOG, chance, ("9" * 5000, "1e999", "0230", "12:61:61.0")), encoding="utf-8")
    else:
        path.write_bytes(damage_bytes(LOG.encode(), chance))
    with success_or_error():
        read_log(path)


@pytest.mark.parametrize(
    "lines",
    [
        ["Iteration " + "9" * 5000 + ", loss = 1"],
        ["Iteration 0, loss = 1", "Iteration 0, Testing net (#0)", "Test net output #0: output_x = 1", "Train net output #0: x = 2"],
    ],
    ids=["a number of thousands of digits", "an output of the other net's name"],
)  # fmt: skip
def test_lines_that_no_solver_writes(lines):
    read_lines(lines, "log")
