import sys

import pytest

pytest.importorskip("matplotlib")

from blobmem.errors import NetError
from blobmem.logs.plot import _figure, plot
from blobmem.logs.reading import read_lines

LINES = [
    "event=train iteration=0 loss=2.5 lr=0.1 seconds=1 output_loss=2.5 output_extra=3\n",
    "event=train iteration=4 loss=1 lr=0.1 seconds=2 output_loss=1 output_extra=4\n",
    "event=test iteration=4 test_net=0 accuracy=0.25 loss=1.5\n",
]


def curves(logs):
    """Label -> points, by panel."""
    return [
        {line.get_label(): list(map(tuple, line.get_xydata())) for line in axes.get_lines()}
        for axes in _figure(logs).axes
    ]


def test_losses_above_the_rest():
    above, below = curves([read_lines(LINES, "a")])
    assert above == {"train loss": [(0, 2.5), (4, 1)], "test 0 loss": [(4, 1.5)]}
    assert below == {"train output extra": [(0, 3), (4, 4)], "test 0 accuracy": [(4, 0.25)]}


def test_several_logs_lie_over_each_other():
    (above,) = curves([read_lines(LINES[:1], "a"), read_lines(["event=train iteration=9 loss=7\n"], "b")])[:1]
    assert above == {"a: train loss": [(0, 2.5)], "b: train loss": [(9, 7)]}


@pytest.mark.parametrize(("extension", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(tmp_path, extension, magic):
    path = tmp_path / f"curves.{extension}"
    plot([read_lines(LINES, "a")], path)
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["curves", "curves.doc"])
def test_a_name_without_a_format_that_it_knows(tmp_path, name):
    with pytest.raises(NetError, match="ends with a format: .*png"):
        plot([read_lines(LINES, "a")], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_log_of_rates_has_nothing_to_draw(tmp_path):
    with pytest.raises(NetError, match="no loss and no output"):
        plot([read_lines(["event=train iteration=0 lr=1\n"], "a")], tmp_path / "x.png")


def test_no_window_system_is_touched(tmp_path):
    plot([read_lines(LINES, "a")], tmp_path / "x.png")
    assert "matplotlib.pyplot" not in sys.modules
