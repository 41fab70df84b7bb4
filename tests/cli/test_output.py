import re

import pytest

from blobmem.cli.output import Output, described, mib, pairs, per_second, plain_table

ROWS = ["separate", ["  train", "1.0"], ["+ test 50", "12.5"]]


def test_sizes_have_one_decimal():
    assert [mib(n) for n in (0, 1, 2**20, 1536 * 2**10, 241 * 2**20)] == ["0.0", "<0.1", "1.0", "1.5", "241.0"]


def test_pairs_can_be_taken_apart():
    values = {"event": "test", "loss": 0.123456789, "path": "a b.txt", "names": 'x="y"', "count": 3, "empty": ""}
    line = pairs(values)
    assert line == r'event=test loss=0.123457 path="a b.txt" names="x=\"y\"" count=3 empty=""'


def test_speeds():
    assert per_second(31.24, "step") == "31.2 steps/s"
    assert per_second(0.25, "step") == "4.0 s/step"
    assert per_second(0.0, "step") == "0.0 steps/s"
    assert per_second(2.0, "batch") == "2.0 batches/s" and per_second(2.0, "pass") == "2.0 passes/s"


def test_described():
    assert described({"accuracy": 0.97123, "loss": 0.1}) == "accuracy 0.9712, loss 0.1"


def test_a_plain_table_is_aligned():
    lines = plain_table("Sizes", ["net", "solver\nstate"], ROWS)
    assert lines == [
        "Sizes",
        "           solver",
        "net         state",
        "-----------------",
        "separate",
        "  train       1.0",
        "+ test 50    12.5",
    ]


def test_two_columns_of_text():
    lines = plain_table("T", ["a", "b", "c"], [["x", "y", "1"], ["xx", "yy", "22"]], texts=2)
    assert lines[-2:] == ["x   y    1", "xx  yy  22"]


def test_a_pipe_gets_lines_and_no_bar(capsys):
    output = Output()
    assert not output.terminal
    with output.progress(3, "step") as bar:
        bar.update(1, remark="busy")
        output.event("step", "for people", n=1)
        output.note("warning: careful")
    output.table("T", ["a", "b"], ROWS)
    out, err = capsys.readouterr()
    assert out.startswith("event=step n=1\nT\n") and "\x1b" not in out
    assert err == "warning: careful\n"


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_gets_a_bar_and_a_rich_table(terminal, capsys):
    output = Output()
    assert output.terminal
    with output.progress(3, "step") as bar:
        bar.update(2, remark="loss 0.5")
        output.event("step", "for people", n=1)
        output.note("warning: careful")
    output.table("T", ["a", "b"], ROWS)
    out, err = capsys.readouterr()
    assert "for people" in out and "event=" not in out and "\x1b[" in out
    assert "2/3" in out and "loss 0.5" in out
    assert "warning: careful" in out and not err, "it would tear the bar"
    assert "─" in out


@pytest.mark.parametrize(("width", "across"), [(60, 60), (34, 34), (31, 31), (20, 34)])
def test_a_narrow_terminal_does_not_cut_a_table(terminal, monkeypatch, capsys, width, across):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    columns = ["net, batch", "parameters", "total"]
    Output().table("T", columns, ["separate", ["  train 256", "1234.5", "12345.6"]])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert "…" not in "".join(lines) and max(map(len, lines)) <= across
    assert [line.split() for line in lines if "train" in line] == [["train", "256", "1234.5", "12345.6"]]


def test_a_narrow_terminal_shortens_the_bar_and_nothing_else(terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with Output().progress(450_000, "iteration") as bar:
        bar.update(310_000, remark="loss 0.001388, rate 0.0272")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).splitlines()
    assert any(line.endswith("loss 0.001388, rate 0.0272") and "310000/450000" in line for line in lines)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80


def test_no_color_is_honoured(terminal, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    Output().error("this went wrong")
    assert "\x1b[31m" not in capsys.readouterr().err and Output().terminal


def test_a_dumb_terminal_is_treated_as_a_pipe(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not Output().terminal


def test_text_is_printed_as_it_is(capsys):
    text = "[bold]layer[/bold] " + "x" * 200 + " [3]"
    Output().say(text)
    Output().error(text)
    out, err = capsys.readouterr()
    assert out == text + "\n" and err == f"blobmem: {text}\n"
