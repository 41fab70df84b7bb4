import csv

from blobmem.logs.reading import read_lines
from blobmem.logs.tables import write_csv

ONE = ["event=train iteration=0 output_x=5 lr=0.1 loss=2.5\n", "event=train iteration=4 loss=1 lr=0.1 seconds=2\n"]
TWO = [*ONE, "event=test iteration=4 test_net=1 accuracy=0.25\n"]


def table(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_one_log(tmp_path):
    names = write_csv([read_lines(TWO, "a")], f"{tmp_path}/run")
    assert names == [f"{tmp_path}/run.train.csv", f"{tmp_path}/run.test.csv"]
    assert table(names[0]) == [
        ["iteration", "seconds", "loss", "lr", "output_x"],
        ["0", "", "2.5", "0.1", "5.0"],
        ["4", "2.0", "1.0", "0.1", ""],
    ]
    assert table(names[1]) == [["iteration", "test_net", "accuracy"], ["4", "1", "0.25"]]


def test_several_logs_say_which(tmp_path):
    names = write_csv([read_lines(ONE, "a"), read_lines(TWO, "b, c")], f"{tmp_path}/run")
    assert [row[:2] for row in table(names[0])] == [
        ["log", "iteration"],
        ["a", "0"],
        ["a", "4"],
        ["b, c", "0"],
        ["b, c", "4"],
    ]
    assert table(names[1])[1:] == [["b, c", "4", "1", "0.25"]]


def test_without_tests_there_are_the_names_of_columns(tmp_path):
    names = write_csv([read_lines(ONE, "a")], f"{tmp_path}/run")
    assert table(names[1]) == [["iteration", "test_net"]]
