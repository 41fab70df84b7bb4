"""The console script `caffe`: Caffe's command lines and what becomes of them."""

import pytest

from blobmem.cli import caffe


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train -solver s.prototxt", "train --solver s.prototxt"),
        ("train --solver=s.prototxt --snapshot=x.solverstate", "train --solver s.prototxt --snapshot x.solverstate"),
        ("-solver s -weights a,b train", "train --solver s --weights a,b"),
        (
            "train -solver s -sigint_effect none -sighup_effect=stop",
            "train --solver s --sigint-effect none --sighup-effect stop",
        ),
        ("train -solver s -gpu 1 -level 2 -stage a,b", "train --solver s --device cuda:1 --level 2 --stage a,b"),
        ("test -model m -weights w -iterations 7", "test --model m --weights w --iterations 7"),
        ("test -model m -weights w -gpu 0", "test --model m --weights w --device cuda:0 --iterations 50"),
        ("time -model m -phase TEST -logtostderr -minloglevel=1 -v=2", "time --model m --phase TEST --iterations 50"),
        ("time -model m -weights w", "time --model m --iterations 50"),
        ("device_query -gpu 0", "device-query --device cuda:0"),
        ("train -solver s -snapshot= -gpu=", "train --solver s"),
    ],
    ids=["plain", "equals", "first", "effects", "state", "test", "gpu", "log", "unused", "query", "empty"],
)
def test_what_a_command_line_becomes(given, expected):
    assert caffe.translate(given.split()) == expected.split()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train -sover s", "unknown flag -sover"),
        ("learn -solver s", "expected one of train, test, device_query, time, got learn"),
        ("-solver s", "got no command"),
        ("train -solver s -gpu 0,1", "the number of one GPU"),
        ("train -solver s -gpu all", "the number of one GPU"),
    ],
    ids=["flag", "command", "none", "gpus", "all"],
)
def test_a_wrong_command_line(given, message, capsys):
    assert caffe.main(given.split()) == 1
    assert message in capsys.readouterr().err


def test_help_and_version(capsys):
    assert caffe.main(["-help"]) == 0 and caffe.main(["--version"]) == 0 and caffe.main([]) == 1
    out = capsys.readouterr().out
    assert out.count("usage: caffe COMMAND") == 2 and "blobmem" in out


def test_training_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.prototxt").write_text(
        """net_param { name: "n"
          layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 3 } data_filler { type: "gaussian" } } }
          layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 2 } }
          layer { name: "extra" type: "Silence" bottom: "y" include { stage: "quiet" } }
          layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "y" top: "loss" exclude { stage: "quiet" } } }
        base_lr: 0.1 lr_policy: "fixed" max_iter: 2 display: 1 snapshot_prefix: "run" """
    )
    assert caffe.main(["train", "-solver", "s.prototxt"]) == 0
    assert "loss=" in capsys.readouterr().out
    assert caffe.main(["train", "-solver=s.prototxt", "-stage", "quiet"]) == 0
    assert caffe.main(["train", "-solver", "s.prototxt", "-snapshot", "run_iter_2.solverstate"]) == 0
